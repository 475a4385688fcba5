// The work between a model's matrix products, over the packed rows of a step: the problems as raw pointers, and the sum
// of squares in one order for every device. The formulas of one number: core/step-inl.h.
//   step_rms_norm   s = x + residual;  out = s / sqrt(mean(s^2) + eps) times the weight
//   step_rotary     (a, b) -> (a cos - b sin, b cos + a sin) for the pairs (i, i + D'/2) of every head
//   step_gate       out = silu(gate) up, or gelu_tanh(gate) up
#pragma once

#include <cmath>
#include <cstdint>

#include "core/half.h"
#include "core/platform.h"
#include "core/scalar.h"

namespace pass_ext {

// How the norm multiplies by the weight w, n being the row divided by its root mean square: llama w round(n), olmo2
// round(w n), gemma round((1 + w) n). The names are of models in transformers; pass_ext.ops.step.NORM_FORMS in this
// order.
enum class NormForm : int32_t { llama, olmo2, gemma };
constexpr int64_t kNormForms = 3;

// pass_ext.ops.step.ACTIVATIONS in this order.
enum class Activation : int32_t { silu, gelu_tanh };
constexpr int64_t kActivations = 2;

// Rows in groups: those of a group lie evenly apart, and so do the groups. The heads of the queries in a joined product
// lie so. Distances in elements.
template <typename T>
struct RowGroups {
  const T* data;
  int64_t rows_in_group, group_distance, row_distance;

  PASS_EXT_HOST_DEVICE const T* operator[](int64_t row) const {
    return data + row / rows_in_group * group_distance + row % rows_in_group * row_distance;
  }
};

template <typename T>
struct StepNorm {
  static constexpr const char* op = "step_rms_norm";
  RowGroups<T> x, residual;
  const T* weight;  // [dim]
  T* out;           // [rows, dim]
  T* sum;           // [rows, dim], x + residual; null without a residual
  int64_t rows, dim;
  float eps;
  NormForm form;
};

// Queries or keys, [rows, heads, dim], and their result, contiguous.
template <typename T>
struct RotaryHeads {
  const T* data;
  T* out;
  int64_t heads, row_distance, head_distance;
};

// S: the type of cosines and sines, T or float.
template <typename T, typename S>
struct StepRotary {
  static constexpr const char* op = "step_rotary";
  RotaryHeads<T> q, k;
  const S *cos, *sin;  // [rows, rotated]
  int64_t cos_distance, sin_distance;
  int64_t rows, dim;
  int64_t rotated;  // the first numbers of a head, an even count; the others stay
};

template <typename T>
struct StepGate {
  static constexpr const char* op = "step_gate";
  RowGroups<T> gate, up;
  T* out;  // [rows, dim]
  int64_t rows, dim;
  Activation activation;
};

// The sum of squares of a row has one order: number i is added to partial sum i % kPartialSums, in the order of i and
// fused; then the upper half of the partial sums is added to the lower half until one is left.
constexpr int kPartialSums = 1024;

PASS_EXT_HOST_DEVICE float inverse_rms(float sum_of_squares, int64_t dim, float eps) {
  return 1.0f / sqrtf(sum_of_squares / static_cast<float>(dim) + eps);
}

template <typename T>
PASS_EXT_HOST_DEVICE float rounded(float value) {
  return to_float(from_float<T>(value));
}

#include "core/step-inl.h"

}  // namespace pass_ext
