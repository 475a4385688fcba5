// The launch that adds a row's shares (attention_places.cuh) where several blocks took them: parts in global memory,
// rows of value_dim sums and their RowTotals. One after the other, as a block adds shares that it takes itself
// (weights_of_share), so that a row has the same bits whoever computes them.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "cuda/attention_parts.cuh"
#include "cuda/attention_tasks.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// Adds the parts of a row and head. A thread has four columns. `parts`: [most_parts, heads, part_stride].
template <typename T>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kMostValueDim / 4)
    add_parts_kernel(PASS_EXT_PARAMETER AttentionProblem problem, const RowTasks* rows, const float* parts) {
  begin_kernel(problem);
  constexpr int kAtOnce = 8;  // parts on their way
  const int32_t index = static_cast<int32_t>(block_index().x), heads = problem.heads;
  const int column = 4 * static_cast<int>(thread_rank());
  const RowTasks row = rows[index / heads];
  if (!row.is_left()) return;
  RowTotals totals;
  float sums[4] = {};
  bool has_before = false;
  const int64_t stride = heads * part_stride(problem.value_dim);
  const float* part = parts + row.part * stride + index % heads * part_stride(problem.value_dim);
#pragma unroll 1
  for (int32_t first = row.has_first_part() ? row.cut - 1 : row.cut; first < row.last; first += kAtOnce) {
    Bytes16 columns[kAtOnce], ends[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, part += stride) {
      if (first + i >= row.last) break;
      columns[i] = load16(part + column);
      ends[i] = load16(part + problem.value_dim);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= row.last) break;
      const RowTotals share = {float_of(ends[i].word[0]), float_of(ends[i].word[1]), float_of(ends[i].word[2])};
      const ShareWeights weights = weights_of_share(totals, share);
      totals = has_before ? weights.totals : share;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float sum = float_of(columns[i].word[j]);
        sums[j] = has_before ? fused(sums[j], weights.before, sum * weights.share) : sum;
      }
      has_before = true;
    }
  }
  store_columns(static_cast<T*>(problem.out) + int64_t{index} * problem.value_dim + column, sums,
                factor_of_row(problem, index, totals));
  if (thread_rank() == 0) problem.lse[index] = log_of_total(totals.maximum, totals.exact);
}

inline void launch_add_parts(const AttentionProblem& problem, const AttentionTasks& tasks, const float* parts,
                             Stream stream) {
  const auto run = [&](auto* kernel) {
    launch("attention_tree (combine)", kernel,
           LaunchShape{{problem.rows * problem.heads}, {static_cast<unsigned>(problem.value_dim / 4)}}, stream, problem,
           tasks.rows, parts);
  };
  switch (problem.type) {
    case FloatType::bfloat16: return run(add_parts_kernel<bfloat16>);
    case FloatType::float16: return run(add_parts_kernel<float16>);
    case FloatType::float32: return run(add_parts_kernel<float>);
  }
}

}  // namespace pass_ext::gpu
