// The schedule of a persistent grid: the work of all requests, cut into equal shares for teams of blocks. A unit is the
// tiles of rows of one request for one key head (or an equal part of them, if there are more than kMostInStep); its
// work is a run of key tiles. The blocks of a team, one for each of the unit's tiles of rows, go through the same keys
// in step, so that keys come from memory once and for the other blocks from L2:
//   block = first + team * in_step + tile of rows        team t of n takes steps [begin(t), begin(t + 1)) of all
// Requests with equally many tiles of rows share teams of `in_step` blocks, as many teams as their share of the work.
// Lengths are on the device: every block adds them up for itself, up to kAttentionThreads requests at a time.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "core/quantize.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kAttentionThreads = 128;
constexpr int kAttentionWarps = kAttentionThreads / 32;
constexpr int32_t kLeastTilesOfBlock = 2;
// Blocks whose shares would be shorter stay away, down to one block on a multiprocessor. Alone there it takes 2.5 us
// for a tile that comes from memory in 1.4 (H100); but two blocks leave twice the parts, each to be stored and added.
constexpr int32_t kShortShare = 4;
constexpr int32_t kMostBlocks = 512;
constexpr int kMostInStep = 8;  // blocks of a team: 512 rows to a key compute for longer than the key takes to read

// A tile of rows that several blocks compute, each some of its keys: its members. Each leaves a part of the result.
struct SharedTile {
  int32_t first_node, head, first_row;  // as row_offset wants them
  int32_t members;
  int32_t in_step;  // blocks from a member to the next
};

// Global memory that blocks share. Parts [2 grid]: places 2 i and 2 i + 1 for block i. The first member of a shared
// tile has its part at the second place, because to it the tile is the last, and the others at the first.
struct SharedWork {
  float* parts;
  SharedTile* tiles;        // [grid], by the first member
  int32_t* rows;            // [grid], of these tiles; 0: the block is no tile's first member
  int32_t most_in_step;     // the plan's most blocks of a team
  int32_t multiprocessors;  // the plan's fewest blocks, if each has kLeastTilesOfBlock
};

using AttentionKernel = void(AttentionProblem, CodeType, SharedWork);

// Defined where the kernel is compiled: attention.cuh, in one of the attention_*.cu.
template <typename Shape>
AttentionKernel* attention_kernel_of();

// The cut of one request into tiles of kRows rows and kKeys keys.
struct RequestTiles {
  int32_t first_key;  // the first tile's first key
  int32_t keys;       // tiles of keys: the steps of one unit
  int32_t parts;      // units of one key head
  int32_t in_step;    // tiles of rows of one unit
};

template <typename Shape>
PASS_EXT_DEVICE RequestTiles tiles_of(const AttentionProblem& problem, const AttentionRequest& request, int32_t most) {
  RequestTiles tiles;
  tiles.first_key = request.begin / 64 * 64;
  tiles.keys = request.nodes == 0 ? 0 : (request.keys() - tiles.first_key + Shape::kKeys - 1) / Shape::kKeys;
  tiles.in_step = (request.nodes * problem.group + Shape::kRows - 1) / Shape::kRows;
  tiles.parts = 1;
  if constexpr (Shape::kRowWarps > 1)  // the small shape serves requests of one tile of rows
    if (tiles.in_step > most) {
      tiles.parts = (tiles.in_step + most - 1) / most;
      tiles.in_step = (tiles.in_step + tiles.parts - 1) / tiles.parts;
    }
  return tiles;
}

// One request's work: steps of teams of `in_step` blocks.
struct RequestSteps {
  int32_t in_step = 0, steps = 0;
};

template <typename Shape>
PASS_EXT_DEVICE RequestSteps steps_of(const AttentionProblem& problem, const AttentionRequest& request, int32_t most) {
  const RequestTiles tiles = tiles_of<Shape>(problem, request, most);
  return {tiles.in_step, problem.kv_heads * tiles.parts * tiles.keys};
}

// A block's place: its share of the requests with as many tiles of rows as its team has blocks.
struct Team {
  int32_t in_step;              // tiles of rows of its requests; 0: this block has no work
  int32_t steps, teams;         // for all those requests together
  int32_t quotient, remainder;  // steps / teams, steps % teams
  int32_t first_block;          // the first team's first block
  int32_t index, tile;          // this block's team among them, and this block's tile of rows

  PASS_EXT_DEVICE int32_t begin(int32_t team) const { return team * quotient + (team < remainder ? team : remainder); }
  PASS_EXT_DEVICE int32_t team_of(int32_t step) const {
    const int32_t longer = remainder * (quotient + 1);  // steps of the teams that have one more
    return step < longer ? step / (quotient + 1) : remainder + (step - longer) / quotient;
  }
};

// The part of one unit that one block computes: key tiles [begin, end) of its `tiles`.
struct Segment {
  AttentionRequest request;
  int32_t head;       // key head
  int32_t first_row;  // the tile's first row, among the request's rows
  int32_t rows;       // rows of the tile that belong to nodes; 0 if the unit has fewer tiles than its team has blocks
  int32_t first_key, tiles;
  int32_t begin, end;
  int32_t unit_begin;  // counted in the steps of all requests of the team

  PASS_EXT_DEVICE bool is_whole() const { return begin == 0 && end == tiles; }
};

// Shared memory in which all threads of a block build the schedule together.
struct ScheduleScratch {
  int32_t steps[kMostInStep + 1];  // steps of all requests with so many blocks in step
  int32_t sums[kAttentionWarps];
  int32_t chunk, before;  // first of the kAttentionThreads requests at work, and the steps before it
  Segment segment;
};

// Finds the block's share. `first_steps` becomes the work of request thread_rank(), or of the only request, which
// find_segment needs.
template <typename Shape>
PASS_EXT_DEVICE Team join_team(const AttentionProblem& problem, ScheduleScratch& scratch, int32_t most,
                               int32_t multiprocessors, RequestSteps& first_steps) {
  const bool is_single = problem.requests == 1;
  first_steps = {};
  if (is_single) {  // every thread knows all work, without a barrier
    const AttentionRequest request = request_of<Shape::kHasChunks>(problem, 0);
    first_steps = steps_of<Shape>(problem, request, most);
    if (thread_rank() == 0) scratch.segment.request = request;
  } else {
    if (thread_rank() <= kMostInStep) scratch.steps[thread_rank()] = 0;
    if (thread_rank() == 0) scratch.chunk = scratch.before = 0;
    sync_block();
#pragma unroll 1
    for (int64_t b = thread_rank(); b < problem.requests; b += kAttentionThreads) {
      const RequestSteps request_steps = steps_of<Shape>(problem, request_of<Shape::kHasChunks>(problem, b), most);
      if (b < kAttentionThreads) first_steps = request_steps;
      if (request_steps.steps > 0) atomic_add(&scratch.steps[request_steps.in_step], request_steps.steps);
    }
    sync_block();
  }
  const auto steps_with = [&](int32_t in_step) {
    return !is_single ? scratch.steps[in_step] : in_step == first_steps.in_step ? first_steps.steps : 0;
  };
  const int32_t grid = static_cast<int32_t>(grid_size().x), block = static_cast<int32_t>(block_index().x);
  // Each number of blocks in step that has work gets one team. The other blocks are divided by work, rounded down.
  int32_t least = 0;
  float work = 0.0f;
#pragma unroll 1
  for (int32_t in_step = 1; in_step <= most; ++in_step) {
    const int32_t steps = steps_with(in_step);
    if (steps == 0) continue;
    least += in_step;
    work += static_cast<float>(in_step) * static_cast<float>(steps);
  }
  int32_t blocks = grid;
  if (work < static_cast<float>(kShortShare) * static_cast<float>(grid)) {
    const int32_t busy = static_cast<int32_t>(work) / kShortShare;
    blocks = busy > multiprocessors ? busy : multiprocessors < grid ? multiprocessors : grid;
    if (blocks < least) blocks = least;
  }
  const int32_t left = blocks - least;
  Team team{};
#pragma unroll 1
  for (int32_t in_step = 1; in_step <= most; ++in_step) {
    const int32_t steps = steps_with(in_step);
    if (steps == 0) continue;
    // 1 + 2^-20: 64 may come out as 63.99. The sum over all stays below left + 1, because a grid has at most 512
    // blocks.
    const float share = static_cast<float>(left) * (static_cast<float>(steps) / work) * 1.00000095f;
    int32_t teams = 1 + static_cast<int32_t>(share);
    if (teams > steps / kLeastTilesOfBlock) teams = steps < kLeastTilesOfBlock ? 1 : steps / kLeastTilesOfBlock;
    const int32_t place = block - team.first_block;
    if (place < teams * in_step) {
      const int32_t index = most == 1 ? place : place / in_step;
      return {in_step, steps, teams, steps / teams, steps % teams, team.first_block, index, place - index * in_step};
    }
    team.first_block += teams * in_step;
  }
  return team;
}

// The segment that begins at step `step` of the team's requests and ends at the latest with the team's share. It lies
// in `request`, whose first step is `request_begin`.
template <typename Shape>
PASS_EXT_DEVICE Segment segment_at(const AttentionProblem& problem, const AttentionRequest& request,
                                   int32_t request_begin, const Team& team, int32_t step, int32_t most) {
  Segment segment;
  segment.request = request;
  const RequestTiles tiles = tiles_of<Shape>(problem, segment.request, most);
  const int32_t unit = (step - request_begin) / tiles.keys;
  segment.head = tiles.parts == 1 ? unit : unit / tiles.parts;
  segment.first_row = ((unit - segment.head * tiles.parts) * tiles.in_step + team.tile) * Shape::kRows;
  segment.rows =
      static_cast<int32_t>(between(segment.request.nodes * problem.group - segment.first_row, 0, Shape::kRows));
  segment.first_key = tiles.first_key;
  segment.tiles = tiles.keys;
  segment.unit_begin = request_begin + unit * tiles.keys;
  segment.begin = step - segment.unit_begin;
  const int32_t share_end = team.begin(team.index + 1) - segment.unit_begin;
  segment.end = share_end < tiles.keys ? share_end : tiles.keys;
  return segment;
}

// Sets scratch.segment to the segment at step `step` of the block's share. Steps must not fall from call to call.
template <typename Shape>
PASS_EXT_DEVICE void find_segment(const AttentionProblem& problem, ScheduleScratch& scratch, const Team& team,
                                  RequestSteps first_steps, int32_t step, int32_t most) {
  if (problem.requests == 1) {
    if (thread_rank() == 0) scratch.segment = segment_at<Shape>(problem, scratch.segment.request, 0, team, step, most);
    sync_block();
    return;
  }
  int32_t before = scratch.before;
#pragma unroll 1
  for (int64_t chunk = scratch.chunk; chunk < problem.requests && before <= step; chunk += kAttentionThreads) {
    const int64_t request = chunk + thread_rank();
    const RequestSteps candidate = chunk == 0 ? first_steps
                                   : request < problem.requests
                                       ? steps_of<Shape>(problem, request_of<Shape::kHasChunks>(problem, request), most)
                                       : RequestSteps{};
    const int32_t count = candidate.in_step == team.in_step ? candidate.steps : 0;
    int32_t up_to = count;  // steps up to this request: first within its warp, then from the very first
#pragma unroll
    for (unsigned distance = 1; distance < 32; distance *= 2) {
      const int32_t other = shuffle_up(up_to, distance);
      if (lane_index() >= distance) up_to += other;
    }
    if (lane_index() == 31) scratch.sums[warp_index()] = up_to;
    sync_block();
    up_to += before;
    const int32_t chunk_begin = before;
    for (unsigned warp = 0; warp < kAttentionWarps; ++warp) {
      if (warp < warp_index()) up_to += scratch.sums[warp];
      before += scratch.sums[warp];
    }
    if (up_to - count <= step && step < up_to) {
      scratch.segment =
          segment_at<Shape>(problem, request_of<Shape::kHasChunks>(problem, request), up_to - count, team, step, most);
      scratch.chunk = static_cast<int32_t>(chunk);
      scratch.before = chunk_begin;
    }
    sync_block();
  }
}

// The place in q and out of row `row` of a request's rows for one key head, counted in rows of head_dim elements.
PASS_EXT_DEVICE int64_t row_offset(const AttentionProblem& problem, int32_t first_node, int32_t head, int32_t row) {
  const int32_t node = row / problem.group;
  return (int64_t{first_node} + node) * problem.heads + head * problem.group + (row - node * problem.group);
}

// The same of row `row` of the segment's tile.
PASS_EXT_DEVICE int64_t row_offset(const AttentionProblem& problem, const Segment& segment, int32_t row) {
  return row_offset(problem, segment.request.first, segment.head, segment.first_row + row);
}

}  // namespace pass_ext::gpu
