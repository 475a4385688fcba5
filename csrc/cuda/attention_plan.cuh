// The host's plan of attention in bf16 and fp16: the kernels, the numbers of blocks, and the memory that they share.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "core/attention.h"
#include "core/quantize.h"
#include "cuda/attention_codes_tile.cuh"
#include "cuda/attention_combine.cuh"
#include "cuda/attention_schedule.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// use(AttentionShape), or that of codes, chunks or two widths, for the problem's dtype, widths, chunks and number of
// rows that share a key head. Problems that are plain (attention_plain.cuh) have none.
template <typename Use>
decltype(auto) with_attention_shape(const AttentionProblem& problem, CodeType codes, const Use& use) {
  static_assert(kLargestHeadDim <= 256, "the widest kernel takes every head size");
  const bool is_one_tile = int64_t{problem.max_nodes} * problem.group <= 16;
  const auto with_rows = [&](auto element, auto dim, auto row_warps) -> decltype(auto) {
    using Shape = AttentionShape<decltype(element), decltype(dim)::value, decltype(row_warps)::value>;
    return codes == CodeType::none ? use(Shape{}) : use(CodesShape<Shape>{});
  };
  const auto with_dim = [&](auto element, auto dim) -> decltype(auto) {
    using std::integral_constant;
    return is_one_tile ? with_rows(element, dim, integral_constant<int, 1>{})
                       : with_rows(element, dim, integral_constant<int, 4>{});
  };
  const auto with_type = [&](auto element) -> decltype(auto) {
    using T = decltype(element);
    if (problem.chunk >= 0) return is_one_tile ? use(ChunkedShape<T, 1>{}) : use(ChunkedShape<T, 4>{});
    if (problem.head_dim != problem.value_dim)
      return is_one_tile ? use(TwoWidthsShape<T, 1>{}) : use(TwoWidthsShape<T, 4>{});
    return problem.head_dim <= 64    ? with_dim(element, std::integral_constant<int, 64>{})
           : problem.head_dim <= 96  ? with_dim(element, std::integral_constant<int, 96>{})
           : problem.head_dim <= 128 ? with_dim(element, std::integral_constant<int, 128>{})
                                     : with_dim(element, std::integral_constant<int, 256>{});
  };
  return problem.type == FloatType::bfloat16 ? with_type(bfloat16{}) : with_type(float16{});
}

struct AttentionPlan {
  unsigned blocks;
  unsigned combine_blocks;  // of attention_combine_kernel; 0: by shapes alone no two blocks share a tile of rows
  int64_t workspace;        // floats: parts, shared tiles and their rows (SharedWork)
  int32_t most_in_step, multiprocessors;
};

// Tiles of a request and key head, as far as shapes say.
template <typename Shape>
int64_t most_row_tiles(const AttentionProblem& problem) {
  return (int64_t{problem.max_nodes} * problem.group + Shape::kRows - 1) / Shape::kRows;
}

template <typename Shape>
int64_t most_key_tiles(const AttentionProblem& problem) {
  return (problem.slots + problem.max_nodes + Shape::kKeys - 1) / Shape::kKeys;
}

// The key tiles of all requests, key heads and tiles of rows; kernels count them in int32.
template <typename Shape>
int64_t most_steps(const AttentionProblem& problem) {
  return problem.requests * problem.kv_heads * most_row_tiles<Shape>(problem) * most_key_tiles<Shape>(problem);
}

// Refuses more tiles, over all requests, than the schedule counts in int32.
template <typename Shape>
void check_steps(const AttentionProblem& problem) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  const int64_t steps = most_steps<Shape>(problem);
  if (steps > kMost)
    throw std::runtime_error(
        "pass_ext::attention_tree: requests, key heads, tiles of 64 rows and tiles of keys must multiply to less than "
        "2^31 on CUDA, got " +
        std::to_string(problem.requests) + " requests, " + std::to_string(problem.kv_heads) + " key heads, " +
        std::to_string(problem.max_nodes) + " nodes of " + std::to_string(problem.group) + " heads each and " +
        std::to_string(problem.slots) + " slots: " + std::to_string(steps));
}

// Plans a grid of at most `most_blocks`, the number that fits on the GPU's multiprocessors at once, and no more than
// can have work by shapes alone. Teams are small enough for one of each size to fit into the grid.
inline AttentionPlan plan_attention(const AttentionProblem& problem, CodeType codes, int64_t most_blocks,
                                    int32_t multiprocessors) {
  return with_attention_shape(problem, codes, [&](auto shape) -> AttentionPlan {
    using Shape = decltype(shape);
    check_steps<Shape>(problem);
    const int64_t row_tiles = most_row_tiles<Shape>(problem);
    const int64_t blocks = between(most_steps<Shape>(problem) / kLeastTilesOfBlock, 1, most_blocks);
    int32_t most = 1;
    while (most < kMostInStep && most < row_tiles && (most + 1) * (most + 2) / 2 <= blocks) ++most;
    AttentionPlan plan{};
    plan.blocks = static_cast<unsigned>(blocks);
    if (blocks > 1 && most_key_tiles<Shape>(problem) > 1) {
      // A block is the first member of at most one shared tile.
      const int64_t tiles = between(problem.requests * problem.kv_heads * row_tiles, 1, blocks);
      const int64_t rows = tiles * between(int64_t{problem.max_nodes} * problem.group, 1, Shape::kRows);
      plan.combine_blocks = static_cast<unsigned>(between(rows, 1, int64_t{kCombineResident} * multiprocessors));
    }
    plan.workspace = blocks * (2 * Shape::kPart + (sizeof(SharedTile) + sizeof(int32_t)) / sizeof(float));
    plan.most_in_step = most;
    plan.multiprocessors = multiprocessors;
    return plan;
  });
}

inline void launch_attention(const AttentionProblem& problem, CodeType codes, const AttentionPlan& plan,
                             float* workspace, Stream stream) {
  with_attention_shape(problem, codes, [&](auto shape) {
    using Shape = decltype(shape);
    SharedTile* const tiles = reinterpret_cast<SharedTile*>(workspace + int64_t{2} * plan.blocks * Shape::kPart);
    const SharedWork work{workspace, tiles, reinterpret_cast<int32_t*>(tiles + plan.blocks), plan.most_in_step,
                          plan.multiprocessors};
    launch("attention_tree", attention_kernel_of<Shape>(),
           LaunchShape{{plan.blocks}, {kAttentionThreads}, Shape::kSharedBytes}, stream, problem, codes, work);
    if (plan.combine_blocks > 0) launch_combine<Shape>(problem, work, plan.combine_blocks, plan.blocks, stream);
  });
}

}  // namespace pass_ext::gpu
