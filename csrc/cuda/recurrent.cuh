// The recurrence over trees on the GPU, in one launch. The problem: core/recurrent.h.
//
// A block walks a request's tree for up to 32 value columns of a head: cuda/recurrent_order.cuh orders the nodes,
// cuda/recurrent_walk.cuh computes them. Shared memory is for trees of the usual size in the batch: a larger one is
// walked for fewer columns at a time.
#pragma once

#include "cuda/recurrent_order.cuh"
#include "cuda/recurrent_walk.cuh"

namespace pass_ext::gpu {

// ---- the kernel ----

template <int kRows, bool whole, Decay decay>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(32 * kMostWalkWarps) walk_kernel(PASS_EXT_PARAMETER RecurrentLaunch launch) {
  begin_kernel(launch);
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
