// What the host decides about attention in bf16 and fp16: which kernel, how many blocks, how much they share.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/attention.h"
#include "cuda/attention_schedule.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// What blocks share: parts [2 grid] in global memory, of which block i has slots 2 i and 2 i + 1, and counters [2
// grid], zero before and after every launch.
struct SharedWork {
  float* parts;
  int32_t* counters;
};

using AttentionKernel = void(AttentionProblem, SharedWork);

// Defined where the kernel is compiled: attention.cuh, in one of the attention_*.cu.
template <typename Shape>
AttentionKernel* attention_kernel_of();

// use(AttentionShape) for what the problem needs: by dtype, head size and rows that share a key head. fp32 has none.
template <typename Use>
decltype(auto) with_attention_shape(const AttentionProblem& problem, const Use& use) {
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
  int64_t counters;  // int32, zero: two for each block
};

// A grid of at most `most_blocks`, what fits on the GPU at once, and not more than shapes alone say can have work.
inline AttentionPlan plan_attention(const AttentionProblem& problem, int64_t most_blocks) {
  return with_attention_shape(problem, [&](auto shape) -> AttentionPlan {
    using Shape = decltype(shape);
    const int64_t units = problem.requests * problem.kv_heads *
                          ((int64_t{problem.max_nodes} * problem.group + Shape::kRows - 1) / Shape::kRows);
    const int64_t tiles = (problem.slots + problem.max_nodes + Shape::kKeys - 1) / Shape::kKeys;
    const int64_t blocks = between(units * tiles / kLeastTilesOfBlock, 1, most_blocks);
    return {static_cast<unsigned>(blocks), 2 * blocks * Shape::kPart, 2 * blocks};
  });
}

inline void launch_attention(const AttentionProblem& problem, const AttentionPlan& plan, const SharedWork& work,
                             Stream stream) {
  with_attention_shape(problem, [&](auto shape) {
    using Shape = decltype(shape);
    launch("attention_tree", attention_kernel_of<Shape>(),
           LaunchShape{{plan.blocks}, {kAttentionThreads}, Shape::kSharedBytes}, stream, problem, work);
  });
}

}  // namespace pass_ext::gpu
