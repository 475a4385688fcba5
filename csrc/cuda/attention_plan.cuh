// The host's plan of attention in bf16 and fp16: the kernel, the number of blocks, and the memory that they share.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "core/attention.h"
#include "cuda/attention_schedule.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// use(AttentionShape) for the problem's dtype, head size and number of rows that share a key head. fp32 has none.
template <typename Use>
decltype(auto) with_attention_shape(const AttentionProblem& problem, const Use& use) {
  static_assert(kLargestHeadDim <= 256, "the widest kernel takes every head size");
  const bool is_one_tile = int64_t{problem.max_nodes} * problem.group <= 16;
  const auto with_dim = [&](auto element, auto dim) -> decltype(auto) {
    using T = decltype(element);
    constexpr int kDim = decltype(dim)::value;
    return is_one_tile ? use(AttentionShape<T, kDim, 1>{}) : use(AttentionShape<T, kDim, 4>{});
  };
  const auto with_type = [&](auto element) -> decltype(auto) {
    return problem.head_dim <= 64    ? with_dim(element, std::integral_constant<int, 64>{})
           : problem.head_dim <= 96  ? with_dim(element, std::integral_constant<int, 96>{})
           : problem.head_dim <= 128 ? with_dim(element, std::integral_constant<int, 128>{})
                                     : with_dim(element, std::integral_constant<int, 256>{});
  };
  return problem.type == FloatType::bfloat16 ? with_type(bfloat16{}) : with_type(float16{});
}

struct AttentionPlan {
  unsigned blocks;
  int64_t parts;     // floats
  int64_t counters;  // int32, zero
  int32_t most_in_step, multiprocessors;
};

// The key tiles of all requests and key heads, as far as shapes say; kernels count them in int32.
template <typename Shape>
int64_t most_steps(const AttentionProblem& problem) {
  const int64_t rows = int64_t{problem.max_nodes} * problem.group;
  const int64_t tiles = (problem.slots + problem.max_nodes + Shape::kKeys - 1) / Shape::kKeys;
  return problem.requests * problem.kv_heads * ((rows + Shape::kRows - 1) / Shape::kRows) * tiles;
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
inline AttentionPlan plan_attention(const AttentionProblem& problem, int64_t most_blocks, int32_t multiprocessors) {
  return with_attention_shape(problem, [&](auto shape) -> AttentionPlan {
    using Shape = decltype(shape);
    check_steps<Shape>(problem);
    const int64_t tiles_of_rows = (int64_t{problem.max_nodes} * problem.group + Shape::kRows - 1) / Shape::kRows;
    const int64_t blocks = between(most_steps<Shape>(problem) / kLeastTilesOfBlock, 1, most_blocks);
    int32_t most = 1;
    while (most < kMostInStep && most < tiles_of_rows && (most + 1) * (most + 2) / 2 <= blocks) ++most;
    return {static_cast<unsigned>(blocks), 2 * blocks * Shape::kPart, kCountersOfBlock * blocks, most, multiprocessors};
  });
}

inline void launch_attention(const AttentionProblem& problem, const AttentionPlan& plan, const SharedWork& work,
                             Stream stream) {
  SharedWork shared = work;
  shared.most_in_step = plan.most_in_step;
  shared.multiprocessors = plan.multiprocessors;
  with_attention_shape(problem, [&](auto shape) {
    using Shape = decltype(shape);
    launch("attention_tree", attention_kernel_of<Shape>(),
           LaunchShape{{plan.blocks}, {kAttentionThreads}, Shape::kSharedBytes}, stream, problem, shared);
  });
}

}  // namespace pass_ext::gpu
