// Attention to keys and values in 8 bits without matrix fragments: queries in fp32, widths and chunks for which no
// kernel with them is compiled, and lists of keys. One warp takes one row and head, 32 keys at a time, as in
// attention_plain.cuh and attention_lists.cuh; sums are of codes, and a key's scale multiplies its score and its
// weight.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "core/attention_lists.h"
#include "core/quantized.h"
#include "cuda/attention_plain.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// kColumns: of one lane. has_lists: keys are those of the row's list.
template <typename T, int kColumns, bool has_lists>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(32 * kPlainWarps)
    plain_codes_kernel(PASS_EXT_PARAMETER AttentionProblem problem, CodeType codes, KeyLists lists) {
  begin_kernel(problem);
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
    const int32_t end = has_lists ? lists.size : request.keys();
#pragma unroll 1
    for (int32_t first = has_lists ? 0 : request.begin / 64 * 64; first < end; first += 32) {
      int32_t key = first + lane;
      if (key >= end)
        key = -1;
      else if (has_lists)
        key = listed_key(problem, request, lists, node, key);
      else if (!(visible_keys<true>(problem, request, node, first) >> lane & 1))
        key = -1;
      const bool is_seen = key >= 0;
      float score = float_of(0xff800000u);
      if (is_seen) {
        const uint8_t* const k = key_row<uint8_t>(problem, request, problem.k_cache, problem.k_new, key, head);
        float dot = 0.0f;
        if (k != nullptr) {
#pragma unroll 1
          for (int32_t i = 0; i < problem.head_dim; ++i)
            dot = fused(to_float(q[i]), value_of_code(codes, k[kCodeHeader + i]), dot);
          dot *= scale_of_codes(k);
        }
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
#pragma unroll 1
      for (unsigned keys = ballot(is_seen); keys != 0; keys &= keys - 1) {
        const int32_t i = first_set_bit(keys);
        const float p = shuffle(weight, i);
        const uint8_t* const v =
            key_row<uint8_t>(problem, request, problem.v_cache, problem.v_new, shuffle(key, i), head);
        if (v == nullptr) continue;
        const float factor = p * scale_of_codes(v);
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
          if (lane + 32 * c < problem.value_dim)
            step_sums[c] = fused(factor, value_of_code(codes, v[kCodeHeader + lane + 32 * c]), step_sums[c]);
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

inline void launch_plain_codes_attention(const AttentionProblem& problem, CodeType codes, const KeyLists& lists,
                                         Stream stream) {
  const int64_t blocks = (problem.rows * problem.heads + kPlainWarps - 1) / kPlainWarps;
  const auto run = [&](auto* kernel) {
    launch("attention_tree", kernel, LaunchShape{{blocks}, {32 * kPlainWarps}}, stream, problem, codes, lists);
  };
  constexpr int kMost = kMostValueDim / 32;
  const auto run_of = [&](auto element) {
    using T = decltype(element);
    lists.keys ? run(plain_codes_kernel<T, kMost, true>) : run(plain_codes_kernel<T, kMost, false>);
  };
  switch (problem.type) {
    case FloatType::bfloat16: return run_of(bfloat16{});
    case FloatType::float16: return run_of(float16{});
    case FloatType::float32: return run_of(0.0f);
  }
}

}  // namespace pass_ext::gpu
