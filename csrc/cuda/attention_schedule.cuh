// Who computes what: the work of all requests, cut into equal shares for the blocks of a persistent grid.
// A unit is one M tile of rows of one request for one key head; its work is a run of key tiles. Units stand in order of
// request, key head and M tile, so that neighbours read the same keys; block i of G takes tiles [i T / G, (i + 1) T /
// G) of the T in all. Lengths are on the device: every block adds them up for itself. Called by cuda/attention.cuh.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kAttentionThreads = 128;
constexpr int kAttentionWarps = kAttentionThreads / 32;
constexpr int64_t kLeastTilesOfBlock = 2;

// How one request is cut, for tiles of kRows rows and kKeys keys.
struct RequestTiles {
  int32_t first_key;  // of the first tile
  int32_t keys;       // tiles of one unit
  int32_t rows;       // M tiles of one key head
  int64_t work;       // tiles of all units
};

template <typename Shape>
PASS_EXT_DEVICE RequestTiles tiles_of(const AttentionProblem& problem, const AttentionRequest& request) {
  RequestTiles tiles;
  tiles.first_key = request.begin / 64 * 64;
  tiles.keys = request.nodes == 0 ? 0 : (request.keys() - tiles.first_key + Shape::kKeys - 1) / Shape::kKeys;
  tiles.rows = (request.nodes * problem.group + Shape::kRows - 1) / Shape::kRows;
  tiles.work = int64_t{tiles.rows} * problem.kv_heads * tiles.keys;
  return tiles;
}

// Found by all threads of a block together.
struct ScheduleScratch {
  int64_t sums[kAttentionWarps];
  int64_t request, before;  // the request at work, and the work of all before it
};

template <typename Shape>
PASS_EXT_DEVICE int64_t work_of(const AttentionProblem& problem, int64_t request) {
  return request < problem.requests ? tiles_of<Shape>(problem, request_of(problem, request)).work : 0;
}

// All work; scratch is at its start.
template <typename Shape>
PASS_EXT_DEVICE int64_t count_work(const AttentionProblem& problem, ScheduleScratch& scratch) {
  int64_t work = 0;
  for (int64_t b = thread_rank(); b < problem.requests; b += kAttentionThreads) work += work_of<Shape>(problem, b);
  for (int step = 16; step > 0; step /= 2) work += shuffle_xor(work, step);
  if (lane_index() == 0) scratch.sums[warp_index()] = work;
  if (thread_rank() == 0) scratch.request = scratch.before = 0;
  sync_block();
  work = 0;
  for (int warp = 0; warp < kAttentionWarps; ++warp) work += scratch.sums[warp];
  sync_block();
  return work;
}

// Moves scratch.request, scratch.before on to the request that tile `position` of the whole work belongs to.
template <typename Shape>
PASS_EXT_DEVICE void find_request(const AttentionProblem& problem, ScheduleScratch& scratch, int64_t position) {
  int64_t before = scratch.before;
  const int64_t begin = scratch.request;
  sync_block();
  for (int64_t first = begin; first < problem.requests && before <= position; first += kAttentionThreads) {
    const int64_t own = work_of<Shape>(problem, first + thread_rank());
    int64_t up_to = own;  // of this request and of those before it in its warp, then of all before it
    for (unsigned step = 1; step < 32; step *= 2) {
      const int64_t other = shuffle_up(up_to, step);
      if (lane_index() >= step) up_to += other;
    }
    if (lane_index() == 31) scratch.sums[warp_index()] = up_to;
    sync_block();
    up_to += before;
    for (unsigned warp = 0; warp < kAttentionWarps; ++warp) {
      if (warp < warp_index()) up_to += scratch.sums[warp];
      before += scratch.sums[warp];
    }
    if (up_to - own <= position && position < up_to) {
      scratch.request = first + thread_rank();
      scratch.before = up_to - own;
    }
    sync_block();
  }
}

// How the whole work is shared. Only as many blocks take part as can have kLeastTilesOfBlock.
struct Shares {
  int64_t work, blocks;

  PASS_EXT_DEVICE int64_t begin(int64_t block) const { return block < blocks ? block * work / blocks : work; }
  PASS_EXT_DEVICE int64_t block_of(int64_t tile) const { return ((tile + 1) * blocks - 1) / work; }
};

PASS_EXT_DEVICE Shares shares_of(int64_t work, int64_t grid) {
  return {work, between(work / kLeastTilesOfBlock, 1, grid)};
}

// The part of one unit that one block computes: key tiles [begin, end) of its `tiles`.
struct Segment {
  AttentionRequest request;
  int32_t head;       // key head
  int32_t first_row;  // of the M tile, among the request's rows
  int32_t rows;       // of the M tile that are a node's
  int32_t first_key, tiles;
  int32_t begin, end;
  int64_t unit_begin;  // in the whole work

  PASS_EXT_DEVICE bool is_whole() const { return begin == 0 && end == tiles; }
};

// The segment that starts at tile `position` of the whole work, in the request of `scratch`, cut where the block's
// share ends.
template <typename Shape>
PASS_EXT_DEVICE Segment segment_at(const AttentionProblem& problem, const ScheduleScratch& scratch, int64_t position,
                                   int64_t share_end) {
  Segment segment;
  segment.request = request_of(problem, scratch.request);
  const RequestTiles tiles = tiles_of<Shape>(problem, segment.request);
  const int32_t unit = static_cast<int32_t>((position - scratch.before) / tiles.keys);
  segment.unit_begin = scratch.before + int64_t{unit} * tiles.keys;
  segment.head = unit / tiles.rows;
  segment.first_row = unit % tiles.rows * Shape::kRows;
  const int32_t rows = segment.request.nodes * problem.group - segment.first_row;
  segment.rows = rows < Shape::kRows ? rows : Shape::kRows;
  segment.first_key = tiles.first_key;
  segment.tiles = tiles.keys;
  segment.begin = static_cast<int32_t>(position - segment.unit_begin);
  segment.end = static_cast<int32_t>(between(share_end - segment.unit_begin, 0, tiles.keys));
  return segment;
}

// Where row `row` of the segment's tile is in q and out.
PASS_EXT_DEVICE int64_t row_offset(const AttentionProblem& problem, const Segment& segment, int32_t row) {
  const int32_t index = segment.first_row + row, node = index / problem.group;
  return (int64_t{segment.request.first} + node) * problem.heads + segment.head * problem.group +
         (index - node * problem.group);
}

}  // namespace pass_ext::gpu
