// The recurrence over trees on the GPU, in one launch. The problem: core/recurrent.h; the formulas and the order of
// sums: core/recurrent-inl.h, so the bits are the CPU's.
//
// A block walks a request's tree for up to 32 value columns of a head. Four lanes share a column: each holds the rows
// of the state that belong to one of the four parts of a sum, in registers. The state is read once, through shared
// memory. Of a node's children the one with the most descendants comes last and goes on with the node's state; before
// each other child the state is kept in shared memory, at most nine times at once in a tree of 1,024 nodes. Shared
// memory is for trees of the usual size in the batch: a larger one is walked for fewer columns at a time.
//
// The block itself orders the nodes, while the state is on its way: about 60 cycles a node by one thread, where a node
// of the walk takes several hundred.
#pragma once

#include "core/recurrent.h"
#include "cuda/recurrent_rows.cuh"

namespace pass_ext::gpu {

constexpr int kWarpColumns = 32 / kSumParts;  // value columns of a warp
constexpr int kMostWalkWarps = 4;
constexpr size_t kMostWalkBytes = 99 * 1024;  // of shared memory, which every GPU from sm_80 on gives to a block

// Rows of q, k and v, each head contiguous. Distances in elements.
struct RowsOfType {
  const void* data;
  int64_t row_distance, head_distance;
};

// Shared memory of a block, as offsets in bytes. First two nodes' numbers, then the states that are kept for further
// children, which begin as the tile that the request's state arrives in; then the order of the nodes.
struct WalkMemory {
  int32_t kept, plans, steps, levels, parents, bytes;
  int32_t warp_states, warp_state;  // how many states of a warp may be kept, and the floats of one
};

struct RecurrentLaunch {
  Forest forest;
  RowsOfType q, k, v;
  RecurrentDecay decay;
  const float* beta;
  const float* states;
  StateLayout layout;
  void* out;
  float* u;
  int32_t heads, group, dk, dv;  // group: heads to a key head
  float scale;
  RowType type;
  bool is_delta;
  bool by_rows;                   // the state's rows lie side by side in memory, else its columns
  bool wide;                      // they are read in units of 16 bytes
  int32_t tile_row, tile_column;  // distances in the tile
  int32_t column_blocks;
  WalkMemory memory;
};

// ---- the order of the nodes ----

// A node, or at index 0 what stands before all roots. Place: in the order.
struct NodePlan {
  uint32_t largest_child;  // descendants of the child with the most, itself among them, and its index
  int16_t nodes, place;    // nodes: itself and its descendants
};
// The same memory afterwards: what a node's rows share.
struct NodeScalars {
  float decay, beta;
};
static_assert(sizeof(NodePlan) == sizeof(NodeScalars), "they take turns");

constexpr uint32_t kNoState = 15;

// A node in its turn: the kept state that it begins from, and where its own is kept for further children.
struct WalkStep {
  uint32_t bits;

  PASS_EXT_DEVICE static WalkStep of(int32_t node, uint32_t from, uint32_t to) {
    return {static_cast<uint32_t>(node) | from << 16 | to << 20};
  }
  PASS_EXT_DEVICE int32_t node() const { return static_cast<int32_t>(bits & 0xffff); }
  PASS_EXT_DEVICE uint32_t from() const { return bits >> 16 & 15; }  // kNoState: from registers
  PASS_EXT_DEVICE uint32_t to() const { return bits >> 20 & 15; }    // kNoState: nowhere
};

// Kept states of a tree of so many nodes, at most. A child that is not the largest has at most half of the descendants.
PASS_EXT_HOST_DEVICE int32_t most_kept_states(int32_t nodes) {
  int32_t count = 0;
  for (int32_t left = nodes + 1; left >= 3; left = (left - 1) / 2) ++count;
  return count;
}
static_assert(kMaxTreeNodes <= 1024, "at most 9 states, and 16 bits for a node");

struct WalkOrder {
  NodePlan* plans;   // [1 + nodes]
  uint16_t* levels;  // [1 + nodes], the kept states above a node
  int16_t* parents;  // [nodes]
  uint32_t* steps;   // [1 + nodes]; while the order is made, the next free place for a node's children

  PASS_EXT_DEVICE bool is_largest(int32_t node) const {
    return static_cast<int32_t>(plans[1 + parents[node]].largest_child & 0xffff) == node;
  }
  PASS_EXT_DEVICE bool has_several_children(int32_t index) const {
    return (plans[index].largest_child >> 16) + 1 < static_cast<uint32_t>(plans[index].nodes);
  }

  // For one thread.
  PASS_EXT_DEVICE void count_descendants(int32_t nodes) const {
#pragma unroll 1
    for (int32_t i = nodes - 1; i >= 0; --i) {
      NodePlan& parent = plans[1 + parents[i]];
      const uint32_t own = static_cast<uint32_t>(plans[1 + i].nodes) << 16 | static_cast<uint32_t>(i);
      parent.nodes = static_cast<int16_t>(parent.nodes + plans[1 + i].nodes);
      if (own > parent.largest_child) parent.largest_child = own;
    }
  }

  // For one thread: the largest child takes the last places below its parent, the others the next free ones.
  PASS_EXT_DEVICE void choose_places(int32_t nodes) const {
    plans[0].place = -1;
    levels[0] = 0;
    steps[0] = 0;
#pragma unroll 1
    for (int32_t i = 0; i < nodes; ++i) {
      const int32_t parent = 1 + parents[i], own = plans[1 + i].nodes;
      const bool last = is_largest(i);
      const int32_t place =
          last ? plans[parent].place + plans[parent].nodes - own : static_cast<int32_t>(steps[parent]);
      if (!last) steps[parent] = static_cast<uint32_t>(place + own);
      plans[1 + i].place = static_cast<int16_t>(place);
      levels[1 + i] = static_cast<uint16_t>(levels[parent] + !last);
      steps[1 + i] = static_cast<uint32_t>(place + 1);
    }
  }

  // For all threads of the block: `steps` becomes the order.
  PASS_EXT_DEVICE void make(const int32_t* given, int32_t nodes) const {
    const int32_t thread = static_cast<int32_t>(thread_rank()), threads = static_cast<int32_t>(block_size().x);
#pragma unroll 1
    for (int32_t i = thread; i < nodes; i += threads) parents[i] = static_cast<int16_t>(parent_or_root(given[i], i));
#pragma unroll 1
    for (int32_t i = thread; i <= nodes; i += threads) plans[i] = {0, 1, 0};
    sync_block();
    if (thread == 0) {
      count_descendants(nodes);
      choose_places(nodes);
    }
    sync_block();
#pragma unroll 1
    for (int32_t i = thread; i < nodes; i += threads) {
      const int32_t parent = 1 + parents[i];
      const bool follows = plans[1 + i].place == plans[parent].place + 1;
      steps[plans[1 + i].place] =
          WalkStep::of(i, follows ? kNoState : levels[parent], has_several_children(1 + i) ? levels[1 + i] : kNoState)
              .bits;
    }
    sync_block();
  }
};

// ---- the walk ----

// A node's numbers for all columns of a head, in shared memory: row i of the state is number i / 4 of part i % 4.
template <int kRows>
struct StagedNode {
  static constexpr int kPart = kRows + 4;  // lanes of different parts read different banks
  float k[kSumParts * kPart], q[kSumParts * kPart], decay[kSumParts * kPart];

  PASS_EXT_DEVICE static int place_of(int i) { return i % kSumParts * kPart + i / kSumParts; }
};

// What a thread loads for the next node while the block computes one.
template <int kOwn>
struct Ahead {
  uint32_t k[kOwn], q[kOwn], value;
  float log[kOwn], element_log;
};

struct FourFloats {
  float value[4];
  PASS_EXT_DEVICE explicit FourFloats(const float* from) {
    const Bytes16 bytes = load16(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = float_of(bytes.word[i]);
  }
};

// A part of a sum becomes the sum, in all four lanes of a column.
PASS_EXT_DEVICE float sum_of_column(float part) {
  part = part + shuffle_xor(part, kWarpColumns);
  return part + shuffle_xor(part, 2 * kWarpColumns);
}

// kRows: rows of the state in a lane. whole: dk is 4 kRows, else smaller.
template <int kRows, bool whole, Decay decay>
struct Walk {
  static constexpr int kOwn = (kSumParts * kRows + 31) / 32;  // rows that a thread loads, in a block of one warp

  const RecurrentLaunch& launch;
  const RequestTree& tree;
  int32_t head;
  int32_t thread, threads, warp, lane, part, column;  // column: of those that are walked at once
  int64_t value_column;                               // of the head
  bool walks, has_column;                             // walks: this warp has columns
  int64_t k, q, v, result;                            // where this thread's numbers begin in row 0
  float state[kRows];
  float rate[decay == Decay::element ? kRows : 1];

  // The columns from first_column on, by the first `active` warps; all warps load what nodes need.
  PASS_EXT_DEVICE Walk(const RecurrentLaunch& given, const RequestTree& request, int32_t of_head, int64_t first_column,
                       int32_t active)
      : launch(given),
        tree(request),
        head(of_head),
        thread(static_cast<int32_t>(thread_rank())),
        threads(static_cast<int32_t>(block_size().x)),
        warp(static_cast<int32_t>(warp_index())),
        lane(static_cast<int32_t>(lane_index())),
        part(lane / kWarpColumns),
        column(warp * kWarpColumns + lane % kWarpColumns),
        value_column(first_column + column),
        walks(warp < active && first_column + warp * kWarpColumns < given.dv),
        has_column(walks && value_column < given.dv),
        k(head / given.group * given.k.head_distance + thread),
        q(head / given.group * given.q.head_distance + thread),
        v(head * given.v.head_distance + value_column),
        result(int64_t{head} * given.dv + value_column) {}

  // function(j, row, checked) for fours of this lane's rows: registers j to j + 3 hold its rows `row` to row + 3. Only
  // the last four may reach beyond dk: they lie in the last registers, and have `checked`.
  template <typename Function>
  PASS_EXT_DEVICE void for_each_four(Function function) const {
    constexpr int kFull = whole ? kRows : kRows - 4;
#pragma unroll
    for (int j = 0; j < kFull; j += 4) {
      if (!whole && kSumParts * (j + 4) > launch.dk) break;
      function(j, j, std::false_type{});
    }
    if (!whole && launch.dk % (4 * kSumParts) != 0)
      function(kRows - 4, launch.dk / (4 * kSumParts) * 4, std::true_type{});
  }

  template <typename Checked>
  PASS_EXT_DEVICE bool is_row(int row, Checked) const {
    return !Checked::value || kSumParts * row + part < launch.dk;
  }

  // function(j, row): register j holds this lane's row `row`, which is row 4 row + part of the state.
  template <typename Function>
  PASS_EXT_DEVICE void for_each_row(Function function) const {
    for_each_four([&](int first, int row, auto checked) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (is_row(row + i, checked)) function(first + i, row + i);
    });
  }

  // Starts the copies of the block's columns of the state into shared memory.
  PASS_EXT_DEVICE void begin_state(float* tile, int64_t first_column, int32_t most_columns) const {
    const StateLayout& layout = launch.layout;
    const float* const from = launch.states + layout.offset(tree.slot, head) + first_column * layout.column;
    const int32_t columns =
        static_cast<int32_t>(launch.dv - first_column < most_columns ? launch.dv - first_column : most_columns);
    const int32_t inner = launch.by_rows ? launch.dk : columns, outer = launch.by_rows ? columns : launch.dk;
    const int64_t inner_distance = launch.by_rows ? layout.row : layout.column;
    const int64_t outer_distance = launch.by_rows ? layout.column : layout.row;
    const int32_t tile_outer = launch.by_rows ? launch.tile_column : launch.tile_row;
    const int32_t unit = launch.wide ? 4 : 1, units = inner / unit;
#pragma unroll 1
    for (int32_t i = thread; i < units * outer; i += threads) {
      const int32_t a = i % units * unit, b = i / units;
      float* const to = tile + b * tile_outer + a;
      if (launch.wide)
        copy_async16(to, from + b * outer_distance + a);
      else
        copy_async4(to, from + b * outer_distance + a * inner_distance);
    }
    copy_async_commit();
  }

  PASS_EXT_DEVICE void take_state(const float* tile) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) state[j] = 0.0f;
    if (has_column)
      for_each_row([&](int j, int row) {
        state[j] = tile[(kSumParts * row + part) * launch.tile_row + column * launch.tile_column];
      });
  }

  PASS_EXT_DEVICE void take_rates() {
    if constexpr (decay == Decay::element) {
      const float* const from = launch.decay.rates + int64_t{head} * launch.dk * launch.dv + value_column;
#pragma unroll
      for (int j = 0; j < kRows; ++j) rate[j] = 0.0f;
      if (has_column)
        for_each_row([&](int j, int row) { rate[j] = from[(kSumParts * row + part) * int64_t{launch.dv}]; });
    }
  }

  PASS_EXT_DEVICE void keep(float* kept) const {
    for_each_row([&](int j, int row) { kept[row * 32 + lane] = state[j]; });
  }
  PASS_EXT_DEVICE void restore(const float* kept) {
    for_each_row([&](int j, int row) { state[j] = kept[row * 32 + lane]; });
  }

  PASS_EXT_DEVICE int64_t row_of(int32_t node) const { return tree.first + node; }

  // function(s, i): the s-th of this thread's rows, among `count`, is row i.
  template <typename Function>
  PASS_EXT_DEVICE void for_each_own_row(int32_t count, Function function) const {
    int32_t i = thread;
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
      if (i >= count) break;
      function(s, i);
      i += threads;
    }
  }

  PASS_EXT_DEVICE void load(Ahead<kOwn>& ahead, int32_t node) const {
    const int64_t row = row_of(node);
    const int64_t k_row = row * launch.k.row_distance + k, q_row = row * launch.q.row_distance + q;
    const float* const log = launch.decay.log + (row * launch.heads + head) * launch.dk + thread;  // of a key channel
    for_each_own_row(launch.dk, [&](int s, int32_t i) {
      ahead.k[s] = load_bits(launch.k.data, k_row + (i - thread), launch.type);
      ahead.q[s] = load_bits(launch.q.data, q_row + (i - thread), launch.type);
      if constexpr (decay == Decay::channel) ahead.log[s] = log[i - thread];
    });
    if (!has_column) return;
    ahead.value = load_bits(launch.v.data, row * launch.v.row_distance + v, launch.type);
    if constexpr (decay == Decay::element)
      ahead.element_log = launch.decay.log[row * launch.heads * launch.dv + result];
  }

  // Rows from dk to the next multiple of 16 are read with those before them: 0.
  PASS_EXT_DEVICE void stage(const Ahead<kOwn>& ahead, StagedNode<kRows>& staged) const {
    const int32_t padded = whole ? kSumParts * kRows : (launch.dk + 15) / 16 * 16;
    for_each_own_row(padded, [&](int s, int32_t i) {
      const int at = StagedNode<kRows>::place_of(i);
      const bool is_row = whole || i < launch.dk;
      staged.k[at] = is_row ? float_of_bits(ahead.k[s], launch.type) : 0.0f;
      staged.q[at] = is_row ? float_of_bits(ahead.q[s], launch.type) * launch.scale : 0.0f;
      if constexpr (decay == Decay::channel) staged.decay[at] = is_row ? decay_of(ahead.log[s]) : 0.0f;
    });
  }

  // The arithmetic of a step of one token.
  PASS_EXT_DEVICE void compute(const StagedNode<kRows>& staged, const NodeScalars& scalars, float value,
                               float element_log, int64_t packed_row) {
    const int at = part * StagedNode<kRows>::kPart;
    const auto decay_rows = [&](int first, int row, auto) {
      if constexpr (decay == Decay::channel) {
        const FourFloats factor(staged.decay + at + row);
#pragma unroll
        for (int i = 0; i < 4; ++i) state[first + i] = factor.value[i] * state[first + i];
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = first + i;
          float factor = scalars.decay;
          if constexpr (decay == Decay::element) factor = decay_of(element_log * rate[j]);
          state[j] = factor * state[j];
        }
      }
    };
    constexpr bool kDecaysFirst = decay == Decay::element;  // long code: once for both forms
    if constexpr (kDecaysFirst) for_each_four(decay_rows);
    float u;
    if (launch.is_delta) {
      float recalled = 0.0f;
      for_each_four([&](int first, int row, auto checked) {
        if constexpr (!kDecaysFirst) decay_rows(first, row, checked);
        const FourFloats k(staged.k + at + row);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (is_row(row + i, checked)) recalled = fused(state[first + i], k.value[i], recalled);
      });
      u = update_of<true>(scalars.beta, value, sum_of_column(recalled));
    } else {
      if constexpr (!kDecaysFirst) for_each_four(decay_rows);
      u = update_of<false>(scalars.beta, value, 0.0f);
    }
    float sum = 0.0f;
    for_each_four([&](int first, int row, auto checked) {
      const FourFloats k(staged.k + at + row), q(staged.q + at + row);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = first + i;
        state[j] = updated_state(state[j], k.value[i], u);
        if (is_row(row + i, checked)) sum = fused(state[j], q.value[i], sum);
      }
    });
    sum = sum_of_column(sum);
    if (part != 0 || !has_column) return;
    const int64_t at_row = packed_row * launch.heads * launch.dv + result;
    launch.u[at_row] = u;
    store_float(launch.out, at_row, sum, launch.type);
  }
};

template <int kRows, bool whole, Decay decay>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(32 * kMostWalkWarps) walk_kernel(PASS_EXT_PARAMETER RecurrentLaunch launch) {
  using Node = StagedNode<kRows>;
  const uint32_t block = block_index().x, columns = block_size().x / kSumParts;
  const int64_t first_column = int64_t{block % launch.column_blocks} * columns;
  const int32_t head = static_cast<int32_t>(block / launch.column_blocks % launch.heads);
  const int64_t request = block / launch.column_blocks / launch.heads;
  const RequestTree tree(launch.forest, request);
  const int32_t thread = static_cast<int32_t>(thread_rank()), threads = static_cast<int32_t>(block_size().x);
  tree.for_each_cleared_row(launch.forest, request, [&](int64_t row) {
    const int64_t column = first_column + thread;
    if (thread >= static_cast<int32_t>(columns) || column >= launch.dv) return;
    const int64_t at = (row * launch.heads + head) * launch.dv + column;
    launch.u[at] = 0.0f;
    store_float(launch.out, at, 0.0f, launch.type);
  });
  if (tree.nodes == 0) return;

  unsigned char* const shared = dynamic_shared<unsigned char>();
  const WalkMemory& memory = launch.memory;
  Node* const staged = reinterpret_cast<Node*>(shared);  // of two nodes
  float* const kept = reinterpret_cast<float*>(shared + memory.kept);
  NodePlan* const plans = reinterpret_cast<NodePlan*>(shared + memory.plans);
  NodeScalars* const scalars = reinterpret_cast<NodeScalars*>(shared + memory.plans);
  const WalkOrder order{plans, reinterpret_cast<uint16_t*>(shared + memory.levels),
                        reinterpret_cast<int16_t*>(shared + memory.parents),
                        reinterpret_cast<uint32_t*>(shared + memory.steps)};
  const int32_t warps = threads / 32, most_kept = most_kept_states(tree.nodes);
  int32_t active = warps;
  while (active > 1 && most_kept * active > memory.warp_states) active /= 2;
  bool keeps_request_state = false;
#pragma unroll 1
  for (int64_t column = first_column; column < first_column + columns && column < launch.dv;
       column += active * kWarpColumns) {
    const bool is_first = column == first_column;
    Walk<kRows, whole, decay> walk(launch, tree, head, column, active);
    const auto kept_state = [&](uint32_t index) {
      return kept + (static_cast<int32_t>(index) * active + walk.warp) * memory.warp_state;
    };
    if (!is_first) sync_block();  // kept states of the columns before, and staged nodes, are read
    walk.begin_state(kept, column, active * kWarpColumns);
    walk.take_rates();
    if (is_first) {
      order.make(launch.forest.parents + tree.first, tree.nodes);
      keeps_request_state = order.has_several_children(0);
    }
    Ahead<Walk<kRows, whole, decay>::kOwn> ahead;
    walk.load(ahead, WalkStep{order.steps[0]}.node());
    if (is_first) {
      sync_block();  // the plans are read
#pragma unroll 1
      for (int32_t i = thread; i < tree.nodes; i += threads) {
        const int64_t at = walk.row_of(i) * launch.heads + head;
        scalars[i] = {decay == Decay::head ? decay_of(launch.decay.log[at]) : 1.0f,
                      launch.beta ? launch.beta[at] : 1.0f};
      }
    }
    copy_async_wait<0>();
    sync_block();
    walk.take_state(kept);
    sync_block();  // the tile is read
    if (keeps_request_state && walk.walks) walk.keep(kept_state(0));
#pragma unroll 1
    for (int32_t n = 0; n < tree.nodes; ++n) {
      const WalkStep step{order.steps[n]};
      Node& node = staged[n % 2];
      walk.stage(ahead, node);
      const float value = walk.has_column ? float_of_bits(ahead.value, launch.type) : 0.0f;
      const float element_log = decay == Decay::element && walk.has_column ? ahead.element_log : 0.0f;
      sync_block();
      if (n + 1 < tree.nodes) walk.load(ahead, WalkStep{order.steps[n + 1]}.node());
      if (!walk.walks) continue;
      if (step.from() != kNoState) walk.restore(kept_state(step.from()));
      walk.compute(node, scalars[step.node()], value, element_log, walk.row_of(step.node()));
      if (step.to() != kNoState) walk.keep(kept_state(step.to()));
    }
  }
}

// ---- launch ----

// Fills in what depends on the number of warps of a block; false if its shared memory is too large.
inline bool fits_in_shared(RecurrentLaunch& launch, int warps, size_t node_bytes) {
  const int32_t columns = warps * kWarpColumns, nodes = most_nodes(launch.forest);
  const int32_t rows = (launch.dk + 15) / 16 * 4;                                   // of a lane, as they are kept
  launch.tile_row = launch.by_rows ? 1 : columns + (warps > 1 ? kWarpColumns : 0);  // banks: see take_state
  launch.tile_column = launch.by_rows ? (launch.dk + 3) / 4 * 4 + 4 : 1;
  launch.column_blocks = (launch.dv + columns - 1) / columns;
  WalkMemory& memory = launch.memory;
  // Room for the usual tree, and for the largest, if only one warp walks.
  const int64_t requests = requests_of_launch(launch.forest), mean = (launch.forest.rows + requests - 1) / requests;
  const int64_t usual = requests > 1 && mean + mean / 2 < nodes ? mean + mean / 2 : nodes;
  const int32_t at_once = most_kept_states(static_cast<int32_t>(usual));
  const int32_t alone = (most_kept_states(nodes) + warps - 1) / warps;
  memory.warp_state = rows * 32;
  memory.warp_states = (at_once > alone ? at_once : alone) * warps;
  const int32_t tile = launch.by_rows ? columns * launch.tile_column : launch.dk * launch.tile_row;
  const int32_t kept = memory.warp_states * memory.warp_state;
  int32_t at = static_cast<int32_t>(2 * node_bytes);
  const auto take = [&at](int32_t bytes) {
    const int32_t begin = at;
    at += (bytes + 15) / 16 * 16;
    return begin;
  };
  memory.kept = take(4 * (tile > kept ? tile : kept));
  memory.plans = take((nodes + 1) * static_cast<int32_t>(sizeof(NodePlan)));
  memory.steps = take((nodes + 1) * 4);
  memory.levels = take((nodes + 1) * 2);
  memory.parents = take(nodes * 2);
  memory.bytes = at;
  return static_cast<size_t>(at) <= kMostWalkBytes;
}

// A block of one warp always fits: two nodes, nine kept states, and 16 bytes for the order of each node.
static_assert(2 * sizeof(StagedNode<64>) + 9 * 64 * 32 * sizeof(float) + (16 * (kMaxTreeNodes + 4)) <= kMostWalkBytes);

template <int kRows, bool whole, Decay decay>
void launch_walk_kernel(RecurrentLaunch& launch, Stream stream) {
  int warps = kMostWalkWarps;
  while (warps > 1 &&
         (warps / 2 * kWarpColumns >= launch.dv || !fits_in_shared(launch, warps, sizeof(StagedNode<kRows>))))
    warps /= 2;
  fits_in_shared(launch, warps, sizeof(StagedNode<kRows>));
  gpu::launch("recurrent_tree", walk_kernel<kRows, whole, decay>,
              LaunchShape{{requests_of_launch(launch.forest) * launch.heads * launch.column_blocks},
                          {static_cast<unsigned>(32 * warps)},
                          static_cast<size_t>(launch.memory.bytes)},
              stream, launch);
}

template <int kRows>
void launch_walk_of(RecurrentLaunch& launch, Stream stream) {
  const auto with_decay = [&](auto whole) {
    constexpr bool kWhole = decltype(whole)::value;
    switch (launch.decay.kind) {
      case Decay::head: return launch_walk_kernel<kRows, kWhole, Decay::head>(launch, stream);
      case Decay::channel: return launch_walk_kernel<kRows, kWhole, Decay::channel>(launch, stream);
      case Decay::element: return launch_walk_kernel<kRows, kWhole, Decay::element>(launch, stream);
    }
  };
  if (launch.dk == kSumParts * kRows)
    with_decay(std::true_type{});
  else
    with_decay(std::false_type{});
}

inline bool is_multiple_of_4(int64_t elements) { return elements % 4 == 0; }

// A state's neighbours in memory are read in units of 16 bytes: `count` of them, the others at these distances.
inline bool has_wide_neighbours(const StateLayout& layout, const void* data, bool by_rows, int64_t count) {
  const int64_t next = by_rows ? layout.row : layout.column, other = by_rows ? layout.column : layout.row;
  return next == 1 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && is_multiple_of_4(count) &&
         is_multiple_of_4(layout.slot) && is_multiple_of_4(layout.head) && is_multiple_of_4(other);
}

// True if a state's rows are neighbours in memory, false if its columns are, or neither.
inline bool has_neighbouring_rows(const StateLayout& layout) { return layout.row == 1 && layout.column != 1; }

template <typename T>
void launch_recurrent_tree(const RecurrentTree<T>& problem, Stream stream) {
  if (problem.rows == 0 || problem.heads * problem.dv == 0) return;
  const auto rows_of = [](const HeadRows<T>& heads) {
    return RowsOfType{heads.data, heads.row_distance, heads.head_distance};
  };
  RecurrentLaunch launch{};
  launch.forest = forest_of(problem, problem.layout.slots);
  launch.q = rows_of(problem.q);
  launch.k = rows_of(problem.k);
  launch.v = rows_of(problem.v);
  launch.decay = problem.decay;
  launch.beta = problem.beta;
  launch.states = problem.states;
  launch.layout = problem.layout;
  launch.out = problem.out;
  launch.u = problem.u;
  launch.heads = static_cast<int32_t>(problem.heads);
  launch.group = static_cast<int32_t>(problem.heads / problem.key_heads);
  launch.dk = static_cast<int32_t>(problem.dk);
  launch.dv = static_cast<int32_t>(problem.dv);
  launch.scale = problem.scale;
  launch.type = row_type_of<T>();
  launch.is_delta = problem.form == RecurrentForm::delta;
  launch.by_rows = has_neighbouring_rows(problem.layout);
  launch.wide =
      has_wide_neighbours(problem.layout, problem.states, launch.by_rows, launch.by_rows ? problem.dk : problem.dv);
  if (problem.dk <= 16)
    launch_walk_of<4>(launch, stream);
  else if (problem.dk <= 128)
    launch_walk_of<32>(launch, stream);
  else
    launch_walk_of<64>(launch, stream);
}

}  // namespace pass_ext::gpu
