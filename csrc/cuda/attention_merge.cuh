// attention_merge on the GPU: merges two results for the same rows over disjoint keys with the weights of
// core/attention.h. A thread computes 16 bytes of a row if rows are multiples of that, else one element.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kMergeThreads = 256;

// A side of weight 0 does not count and may hold anything.
PASS_EXT_DEVICE float add_sides(const MergeWeights& weights, float a, float b) {
  return (weights.a == 0.0f ? 0.0f : weights.a * a) + (weights.b == 0.0f ? 0.0f : weights.b * b);
}

template <typename T, bool wide>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kMergeThreads) merge_kernel(MergeProblem problem) {
  begin_kernel();
  constexpr int kElements = wide ? 16 / sizeof(T) : 1;
  const int64_t chunks = problem.head_dim / kElements;  // chunks of a row
  const int64_t index = int64_t{block_index().x} * kMergeThreads + thread_index().x;
  // Rows without columns still have an lse.
  const int64_t row = chunks == 0 ? index : index / chunks;
  if (row >= problem.rows) return;
  const MergeWeights weights = weights_of(problem, row);
  if (chunks == 0 || index % chunks == 0) problem.lse[row] = weights.lse;
  if (chunks == 0) return;
  const T* const a = static_cast<const T*>(problem.out_a) + index * kElements;
  const T* const b = static_cast<const T*>(problem.out_b) + index * kElements;
  T* const out = static_cast<T*>(problem.out) + index * kElements;
  if constexpr (!wide) {
    *out = from_float<T>(add_sides(weights, to_float(*a), to_float(*b)));
  } else {
    const Bytes16 bytes_a = load16(a), bytes_b = load16(b);
    Bytes16 bytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t x = bytes_a.word[i], y = bytes_b.word[i];
      if constexpr (sizeof(T) == 4)
        bytes.word[i] = bits_of(add_sides(weights, float_of(x), float_of(y)));
      else
        bytes.word[i] = pack2<T>(add_sides(weights, unpack_low<T>(x), unpack_low<T>(y)),
                                 add_sides(weights, unpack_high<T>(x), unpack_high<T>(y)));
    }
    store16(out, bytes);
  }
}

template <typename T>
void launch_merge_of(const MergeProblem& problem, Stream stream) {
  const auto is_aligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; };
  const bool wide = problem.head_dim * sizeof(T) % 16 == 0 && is_aligned(problem.out_a) && is_aligned(problem.out_b) &&
                    is_aligned(problem.out);
  const int64_t chunks = problem.head_dim / (wide ? 16 / static_cast<int64_t>(sizeof(T)) : 1);
  const int64_t blocks = (problem.rows * (chunks == 0 ? 1 : chunks) + kMergeThreads - 1) / kMergeThreads;
  launch("attention_merge", wide ? merge_kernel<T, true> : merge_kernel<T, false>,
         LaunchShape{{blocks}, {kMergeThreads}}, stream, problem);
}

inline void launch_merge(const MergeProblem& problem, Stream stream) {
  if (problem.rows == 0) return;
  switch (problem.type) {
    case FloatType::bfloat16: return launch_merge_of<bfloat16>(problem, stream);
    case FloatType::float16: return launch_merge_of<float16>(problem, stream);
    case FloatType::float32: return launch_merge_of<float>(problem, stream);
  }
}

}  // namespace pass_ext::gpu
