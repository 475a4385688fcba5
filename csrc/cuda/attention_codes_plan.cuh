// The host's launch of attention to keys and values in 8 bits, attention_codes.cuh. A tile of codes becomes the tile of
// numbers that the kernel of the same shape multiplies, so rows, keys, schedule, parts and their combination are those
// of attention_plan.cuh.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "core/attention_lists.h"
#include "core/quantize.h"
#include "cuda/attention_codes_tile.cuh"
#include "cuda/attention_combine.cuh"
#include "cuda/attention_plain.cuh"
#include "cuda/attention_plan.cuh"
#include "cuda/attention_schedule.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// True if attention_plain.cuh computes the problem: no kernel with matrix fragments does, or its sums have no one
// order.
inline bool is_plain(const AttentionProblem& problem, CodeType codes, const KeyLists& lists, bool batch_invariant) {
  const bool has_codes_shape = problem.chunk < 0 && problem.head_dim == problem.value_dim;
  return batch_invariant || lists.keys || is_plain(problem) || (codes != CodeType::none && !has_codes_shape);
}

// use(CodesShape), for problems that are not plain.
template <typename Use>
void with_codes_shape(const AttentionProblem& problem, const Use& use) {
  with_attention_shape(problem, [&](auto shape) {
    if constexpr (!decltype(shape)::kHasChunks && decltype(shape)::kIsOneWidth) use(CodesShape<decltype(shape)>{});
  });
}

// plan: plan_attention's.
inline void launch_codes_attention(const AttentionProblem& problem, CodeType codes, const AttentionPlan& plan,
                                   float* workspace, Stream stream) {
  with_codes_shape(problem, [&](auto shape) {
    using Shape = decltype(shape);
    SharedTile* const tiles = reinterpret_cast<SharedTile*>(workspace + int64_t{2} * plan.blocks * Shape::kPart);
    const SharedWork work{workspace, tiles, reinterpret_cast<int32_t*>(tiles + plan.blocks), plan.most_in_step,
                          plan.multiprocessors};
    launch("attention_tree", codes_kernel_of<Shape>(),
           LaunchShape{{plan.blocks}, {kAttentionThreads}, Shape::kSharedBytes}, stream, problem, codes, work);
    if (plan.combine_blocks > 0) launch_combine<Shape>(problem, work, plan.combine_blocks, plan.blocks, stream);
  });
}

}  // namespace pass_ext::gpu
