// Attention to listed keys on the GPU. One warp takes one row and head, 32 entries of the row's list at a time: for the
// scores a lane has one key, for the result some columns. Without matrix fragments: correct and simple, not fast.
#pragma once

#include <cstdint>

#include "core/attention_lists.h"
#include "cuda/attention_plain.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

struct ListedAttention {
  AttentionProblem problem;
  KeyLists lists;
};

// kColumns: of one lane.
template <typename T, int kColumns>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(32 * kPlainWarps)
    listed_attention_kernel(PASS_EXT_PARAMETER ListedAttention listed) {
  begin_kernel(listed);
  const AttentionProblem& problem = listed.problem;
  const int64_t index = int64_t{block_index().x} * kPlainWarps + warp_index();  // row and head
  if (index >= problem.rows * problem.heads) return;
  const int64_t row = index / problem.heads, owner = owner_of(problem, row);
  const int32_t lane = static_cast<int32_t>(lane_index());
  float sums[kColumns] = {}, highest = -kLargest, total = 0.0f;
  if (owner >= 0) {
    const AttentionRequest request = request_of<true>(problem, owner);
    const int32_t node = static_cast<int32_t>(row - request.first);
    const int32_t head = static_cast<int32_t>(index % problem.heads) / problem.group;
    const T* const q = static_cast<const T*>(problem.q) + index * problem.head_dim;
    for (int32_t first = 0; first < listed.lists.size; first += 32) {
      const int32_t entry = first + lane;
      const int32_t key = entry < listed.lists.size ? listed_key(problem, request, listed.lists, node, entry) : -1;
      float score = float_of(0xff800000u);
      if (key >= 0) {
        const T* const k = key_row<T>(problem, request, problem.k_cache, problem.k_new, key, head);
        float dot = 0.0f;
        if (k != nullptr)
          for (int32_t i = 0; i < problem.head_dim; ++i) dot = fused(to_float(q[i]), to_float(k[i]), dot);
        score = dot * problem.scale;
        if (problem.softcap > 0.0f) score = softcapped(score, problem.softcap);
        score *= kLog2E;
      }
      float new_highest = score > highest ? score : highest;
      for (int step = 16; step > 0; step /= 2) {
        const float other = shuffle_xor(new_highest, step);
        if (other > new_highest) new_highest = other;
      }
      const float shrink = exp2_approximate(highest - new_highest), weight = exp2_approximate(score - new_highest);
      highest = new_highest;
      total = fused(total, shrink, weight);  // the weights of this lane's keys
      float step_sums[kColumns] = {};        // added once: thousands of equal terms would all round the same way
      for (unsigned keys = ballot(key >= 0); keys != 0; keys &= keys - 1) {
        const int32_t i = first_set_bit(keys);
        const float p = shuffle(weight, i);
        const T* const v = key_row<T>(problem, request, problem.v_cache, problem.v_new, shuffle(key, i), head);
        if (v == nullptr) continue;
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
          if (lane + 32 * c < problem.value_dim) step_sums[c] = fused(p, to_float(v[lane + 32 * c]), step_sums[c]);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c] = fused(sums[c], shrink, step_sums[c]);
    }
    for (int step = 16; step > 0; step /= 2) total += shuffle_xor(total, step);
  }
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (lane + 32 * c < problem.value_dim)
      static_cast<T*>(problem.out)[index * problem.value_dim + lane + 32 * c] = from_float<T>(sums[c] * inverse);
  if (lane == 0) problem.lse[index] = log_of_total(highest, total);
}

inline void launch_listed_attention(const AttentionProblem& problem, const KeyLists& lists, Stream stream) {
  const int64_t blocks = (problem.rows * problem.heads + kPlainWarps - 1) / kPlainWarps;
  const auto run = [&](auto* kernel) {
    launch("attention_tree", kernel, LaunchShape{{blocks}, {32 * kPlainWarps}}, stream,
           ListedAttention{problem, lists});
  };
  constexpr int kFew = kLargestHeadDim / 32, kMost = kMostValueDim / 32;
  const bool is_narrow = problem.value_dim <= kLargestHeadDim;
  switch (problem.type) {
    case FloatType::bfloat16:
      return is_narrow ? run(listed_attention_kernel<bfloat16, kFew>) : run(listed_attention_kernel<bfloat16, kMost>);
    case FloatType::float16:
      return is_narrow ? run(listed_attention_kernel<float16, kFew>) : run(listed_attention_kernel<float16, kMost>);
    case FloatType::float32:
      return is_narrow ? run(listed_attention_kernel<float, kFew>) : run(listed_attention_kernel<float, kMost>);
  }
}

}  // namespace pass_ext::gpu
