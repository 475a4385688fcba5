// Rows of a linear layer normed on the way into shared memory; and the sum of squares of a row by a warp.
#pragma once

#include <cstdint>

#include "core/step.h"
#include "cuda/numbers.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// A norm of the rows in front of the products; weight null: none. The normed rows of a block lie in its shared memory.
template <typename T>
struct InputNorm {
  const T* weight = nullptr;
  float eps = 0.0f;
  NormForm form{};
};

// The sum of squares of a row in the order that core/step.h defines; all lanes of the warp get it. Lane l has the
// partial sums 256 m + 8 l + n.
template <bool wide, typename T>
PASS_EXT_DEVICE float squares_of_row(const T* x, int64_t dim) {
  constexpr int kParts = kPartialSums / (32 * kNumbers);
  float partial[kParts][kNumbers] = {};
  for (int64_t first = int64_t{kNumbers} * lane_index(); first < dim; first += kPartialSums) {
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
      const int64_t i = first + m * 32 * kNumbers;
      if (i >= dim) continue;
      float value[kNumbers];
      load_numbers<wide>(value, x + i, dim - i);
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) partial[m][n] = fused(value[n], value[n], partial[m][n]);
    }
  }
#pragma unroll
  for (int half = kParts / 2; half > 0; half /= 2)
#pragma unroll
    for (int m = 0; m < half; ++m)
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) partial[m][n] += partial[m + half][n];
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) partial[0][n] += shuffle_xor(partial[0][n], step);
#pragma unroll
  for (int half = kNumbers / 2; half > 0; half /= 2)
#pragma unroll
    for (int n = 0; n < half; ++n) partial[0][n] += partial[0][n + half];
  return partial[0][0];
}

template <typename T>
PASS_EXT_DEVICE float weighted_by(NormForm form, float normal, float weight) {
  switch (form) {
    case NormForm::llama: return weighted<T, NormForm::llama>(normal, weight);
    case NormForm::olmo2: return weighted<T, NormForm::olmo2>(normal, weight);
    default: return weighted<T, NormForm::gemma>(normal, weight);
  }
}

// Elements between normed rows in shared memory: eight lanes that read 16 bytes of two rows meet different banks.
template <typename T>
PASS_EXT_HOST_DEVICE int64_t normed_stride(int64_t in) {
  constexpr int64_t kLine = 128 / sizeof(T);
  return (in + kLine - 1) / kLine * kLine + kLine / 2;
}

// Writes the row, normed, to shared memory; by a warp.
template <bool wide, typename T>
PASS_EXT_DEVICE void norm_row(T* to, const T* x, const InputNorm<T>& norm, int64_t in) {
  const float inverse = inverse_rms(squares_of_row<wide>(x, in), in, norm.eps);
#pragma unroll 1
  for (int64_t i = int64_t{kNumbers} * lane_index(); i < in; i += 32 * kNumbers) {
    float value[kNumbers], weight[kNumbers];
    load_numbers<wide>(value, x + i, in - i);
    load_numbers<wide>(weight, norm.weight + i, in - i);
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) value[n] = weighted_by<T>(norm.form, value[n] * inverse, weight[n]);
    store_numbers<wide>(to + i, value, in - i);
  }
}

}  // namespace pass_ext::gpu
