// Norm, rotary embedding and gate on the GPU, one launch each. The problems and the order of sums: core/step.h; the
// formulas: core/step-inl.h. A thread works on eight neighbouring numbers, read in units of 16 bytes if all addresses
// allow it (`wide`).
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/step.h"
#include "cuda/numbers.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kStepThreads = 128;

// ---- norm: a block per row ----

static_assert(kStepThreads * kNumbers == kPartialSums, "each thread adds to eight partial sums");
constexpr int kNormsAtOnce = 4;  // loads of a thread on their way: a few rows leave every other warp of a GPU idle

// The sum of the partial sums, added as core/step.h defines; thread t has numbers 8 t to 8 t + 7 of them. All threads
// of the block get it.
PASS_EXT_DEVICE float sum_of_partial_sums(const float (&partial)[kNumbers]) {
  PASS_EXT_SHARED(float, all, kPartialSums);
  PASS_EXT_SHARED(float, folded, kStepThreads);
  const int thread = static_cast<int>(thread_rank());
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) all[kNumbers * thread + i] = partial[i];
  sync_block();
  float sum[kNumbers];
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) sum[i] = all[thread + kStepThreads * i];
#pragma unroll
  for (int half = kNumbers / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
  folded[thread] = sum[0];
  sync_block();
  const int lane = static_cast<int>(lane_index());
  float value = (folded[lane] + folded[lane + 64]) + (folded[lane + 32] + folded[lane + 96]);
  for (int step = 16; step > 0; step /= 2) value += shuffle_xor(value, step);
  return value;
}

template <typename T, bool wide, NormForm form>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kStepThreads, 4) norm_kernel(StepNorm<T> problem) {
  begin_kernel();
  const int64_t row = block_index().x, dim = problem.dim, first = int64_t{kNumbers} * thread_rank();
  const T* x = problem.x[row];
  float partial[kNumbers] = {};
  for (int64_t base = first; base < dim; base += kNormsAtOnce * kPartialSums) {
    float value[kNormsAtOnce][kNumbers], residual[kNormsAtOnce][kNumbers];
#pragma unroll
    for (int a = 0; a < kNormsAtOnce; ++a) {
      const int64_t i = base + a * kPartialSums;
      if (i >= dim) break;
      load_numbers<wide>(value[a], x + i, dim - i);
      if (problem.sum) load_numbers<wide>(residual[a], problem.residual[row] + i, dim - i);
    }
#pragma unroll
    for (int a = 0; a < kNormsAtOnce; ++a) {
      const int64_t i = base + a * kPartialSums;
      if (i >= dim) break;
      if (problem.sum) {
#pragma unroll
        for (int k = 0; k < kNumbers; ++k) value[a][k] = rounded<T>(value[a][k] + residual[a][k]);
        store_numbers<wide>(problem.sum + row * dim + i, value[a], dim - i);
      }
#pragma unroll
      for (int k = 0; k < kNumbers; ++k) partial[k] = fused(value[a][k], value[a][k], partial[k]);
    }
  }
  const float inverse = inverse_rms(sum_of_partial_sums(partial), dim, problem.eps);
  if (problem.sum) x = problem.sum + row * dim;  // a thread reads what it wrote itself
  for (int64_t base = first; base < dim; base += kNormsAtOnce * kPartialSums) {
    float value[kNormsAtOnce][kNumbers], weight[kNormsAtOnce][kNumbers];
#pragma unroll
    for (int a = 0; a < kNormsAtOnce; ++a) {
      const int64_t i = base + a * kPartialSums;
      if (i >= dim) break;
      load_numbers<wide>(value[a], x + i, dim - i);
      load_numbers<wide>(weight[a], problem.weight + i, dim - i);
    }
#pragma unroll
    for (int a = 0; a < kNormsAtOnce; ++a) {
      const int64_t i = base + a * kPartialSums;
      if (i >= dim) break;
#pragma unroll
      for (int k = 0; k < kNumbers; ++k) value[a][k] = weighted<T, form>(value[a][k] * inverse, weight[a][k]);
      store_numbers<wide>(problem.out + row * dim + i, value[a], dim - i);
    }
  }
}

template <typename T>
bool has_wide_rows(const RowGroups<T>& rows) {
  return is_aligned16(rows.data) && is_whole(rows.group_distance) && is_whole(rows.row_distance);
}

template <typename T, bool wide>
void launch_norm(const StepNorm<T>& problem, Stream stream) {
  const auto kernel = problem.form == NormForm::llama   ? norm_kernel<T, wide, NormForm::llama>
                      : problem.form == NormForm::olmo2 ? norm_kernel<T, wide, NormForm::olmo2>
                                                        : norm_kernel<T, wide, NormForm::gemma>;
  launch(problem.op, kernel, LaunchShape{{problem.rows}, {kStepThreads}}, stream, problem);
}

template <typename T>
void launch_step(const StepNorm<T>& problem, Stream stream) {
  const bool wide = is_whole(problem.dim) && has_wide_rows(problem.x) && is_aligned16(problem.weight) &&
                    is_aligned16(problem.out) &&
                    (!problem.sum || (has_wide_rows(problem.residual) && is_aligned16(problem.sum)));
  wide ? launch_norm<T, true>(problem, stream) : launch_norm<T, false>(problem, stream);
}

// ---- rotary embedding: a thread rotates eight pairs of a head, or copies eight numbers behind them ----

// The units of a head: pairs first, then copies.
template <typename T, typename S>
PASS_EXT_HOST_DEVICE int64_t pair_units(const StepRotary<T, S>& problem) {
  return (problem.rotated / 2 + kNumbers - 1) / kNumbers;
}
template <typename T, typename S>
PASS_EXT_HOST_DEVICE int64_t units_of_head(const StepRotary<T, S>& problem) {
  return pair_units(problem) + (problem.dim - problem.rotated + kNumbers - 1) / kNumbers;
}

template <typename T, typename S, bool wide>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kStepThreads) rotary_kernel(StepRotary<T, S> problem) {
  begin_kernel();
  constexpr bool in_fp32 = sizeof(S) == sizeof(float);
  const int64_t units = units_of_head(problem), heads = problem.q.heads + problem.k.heads;
  const int64_t index = int64_t{block_index().x} * kStepThreads + thread_rank();
  if (index >= problem.rows * heads * units) return;
  const int64_t unit = index % units, row = index / units / heads;
  int64_t head = index / units % heads;
  const bool is_query = head < problem.q.heads;
  const RotaryHeads<T>& source = is_query ? problem.q : problem.k;
  if (!is_query) head -= problem.q.heads;
  const T* from = source.data + row * source.row_distance + head * source.head_distance;
  T* to = source.out + (row * source.heads + head) * problem.dim;

  const int64_t half = problem.rotated / 2, pairs = pair_units(problem);
  if (unit >= pairs) {
    const int64_t i = problem.rotated + (unit - pairs) * kNumbers;
    float value[kNumbers];
    load_numbers<wide>(value, from + i, problem.dim - i);
    store_numbers<wide>(to + i, value, problem.dim - i);
    return;
  }
  const int64_t i = unit * kNumbers, j = i + half, count = half - i;
  const S *cos = problem.cos + row * problem.cos_distance, *sin = problem.sin + row * problem.sin_distance;
  float first[kNumbers], second[kNumbers], cosine[kNumbers], sine[kNumbers], value[kNumbers];
  load_numbers<wide>(first, from + i, count);
  load_numbers<wide>(second, from + j, count);
  load_numbers<wide>(cosine, cos + i, count);
  load_numbers<wide>(sine, sin + i, count);
#pragma unroll
  for (int k = 0; k < kNumbers; ++k) value[k] = rotated_first<T, in_fp32>(first[k], second[k], cosine[k], sine[k]);
  store_numbers<wide>(to + i, value, count);
  load_numbers<wide>(cosine, cos + j, count);
  load_numbers<wide>(sine, sin + j, count);
#pragma unroll
  for (int k = 0; k < kNumbers; ++k) value[k] = rotated_second<T, in_fp32>(first[k], second[k], cosine[k], sine[k]);
  store_numbers<wide>(to + j, value, count);
}

template <typename T>
bool has_wide_rows(const RotaryHeads<T>& heads) {
  return is_aligned16(heads.data) && is_aligned16(heads.out) && is_whole(heads.row_distance) &&
         is_whole(heads.head_distance);
}

template <typename T, typename S>
void launch_step(const StepRotary<T, S>& problem, Stream stream) {
  const bool wide = is_whole(problem.dim) && is_whole(problem.rotated / 2) && has_wide_rows(problem.q) &&
                    has_wide_rows(problem.k) && is_aligned16(problem.cos) && is_aligned16(problem.sin) &&
                    is_whole(problem.cos_distance) && is_whole(problem.sin_distance);
  const int64_t threads = problem.rows * (problem.q.heads + problem.k.heads) * units_of_head(problem);
  launch(problem.op, wide ? rotary_kernel<T, S, true> : rotary_kernel<T, S, false>,
         LaunchShape{{(threads + kStepThreads - 1) / kStepThreads}, {kStepThreads}}, stream, problem);
}

// ---- gate: a thread computes eight numbers of a row ----

template <typename T, bool wide, Activation activation>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kStepThreads) gate_kernel(StepGate<T> problem) {
  begin_kernel();
  const int64_t units = (problem.dim + kNumbers - 1) / kNumbers;
  const int64_t index = int64_t{block_index().x} * kStepThreads + thread_rank();
  if (index >= problem.rows * units) return;
  const int64_t row = index / units, i = index % units * kNumbers, count = problem.dim - i;
  float gate[kNumbers], up[kNumbers];
  load_numbers<wide>(gate, problem.gate[row] + i, count);
  load_numbers<wide>(up, problem.up[row] + i, count);
#pragma unroll
  for (int k = 0; k < kNumbers; ++k) gate[k] = gated<T, activation>(gate[k], up[k]);
  store_numbers<wide>(problem.out + row * problem.dim + i, gate, count);
}

template <typename T, bool wide>
void launch_gate(const StepGate<T>& problem, Stream stream) {
  const int64_t threads = problem.rows * ((problem.dim + kNumbers - 1) / kNumbers);
  launch(problem.op,
         problem.activation == Activation::silu ? gate_kernel<T, wide, Activation::silu>
                                                : gate_kernel<T, wide, Activation::gelu_tanh>,
         LaunchShape{{(threads + kStepThreads - 1) / kStepThreads}, {kStepThreads}}, stream, problem);
}

template <typename T>
void launch_step(const StepGate<T>& problem, Stream stream) {
  const bool wide =
      is_whole(problem.dim) && has_wide_rows(problem.gate) && has_wide_rows(problem.up) && is_aligned16(problem.out);
  wide ? launch_gate<T, true>(problem, stream) : launch_gate<T, false>(problem, stream);
}

}  // namespace pass_ext::gpu
