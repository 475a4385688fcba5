// Gated adapters on the GPU, both products in one launch. The problem and its formula: core/adapter.h.
//
// A block computes a part of the outputs of one row. It computes the row's hidden numbers again for each part, because
// `down` then comes from the L2 cache and no second launch is needed. Blocks of tokens read their id and end. A slot
// out of range gets no adapter: an error message would need a synchronisation.
#pragma once

#include <cstdint>

#include "core/adapter.h"
#include "core/scalar.h"
#include "cuda/numbers.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kAdapterThreads = 256;
constexpr int kAdapterWarps = kAdapterThreads / 32;
constexpr int kRanksOfWarp = 4;  // at once, so that their loads overlap

template <typename T, typename Id, bool wide>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kAdapterThreads, 2) adapter_kernel(AdapterRows<T, Id> problem) {
  PASS_EXT_SHARED(float, hidden, kMaxAdapterRank);
  const int64_t row = block_index().x, in = problem.in, outputs = problem.outputs;
  const int64_t k = adapter_of_id(problem.ids[row], problem.adapters);
  if (k < 0) return;
  const int rank = static_cast<int>(problem.rank), lane = static_cast<int>(lane_index());
  const T* x = problem.x + row * problem.x_row;
  const T* down = problem.down + k * rank * in;
  for (int j = static_cast<int>(warp_index()); j < rank; j += kRanksOfWarp * kAdapterWarps) {
    float sum[kRanksOfWarp] = {};
    for (int64_t i = kNumbers * lane; i < in; i += 32 * kNumbers) {
      float value[kNumbers];
      load_numbers<wide>(value, x + i, in - i);
#pragma unroll
      for (int q = 0; q < kRanksOfWarp; ++q) {
        if (j + q * kAdapterWarps >= rank) continue;
        float weight[kNumbers];
        load_numbers<wide>(weight, down + (j + q * kAdapterWarps) * in + i, in - i);
#pragma unroll
        for (int n = 0; n < kNumbers; ++n) sum[q] = fused(value[n], weight[n], sum[q]);
      }
    }
#pragma unroll
    for (int q = 0; q < kRanksOfWarp; ++q) {
      for (int step = 16; step > 0; step /= 2) sum[q] += shuffle_xor(sum[q], step);
      if (lane == 0 && j + q * kAdapterWarps < rank) hidden[j + q * kAdapterWarps] = sum[q];
    }
  }
  sync_block();

  const int64_t first = (int64_t{block_index().y} * kAdapterThreads + thread_rank()) * kNumbers;
  if (first >= outputs) return;
  const T* up = problem.up + k * rank * outputs + first;
  float sum[kNumbers] = {}, value[kNumbers];
#pragma unroll 4
  for (int j = 0; j < rank; ++j) {
    float weight[kNumbers];
    load_numbers<wide>(weight, up + j * outputs, outputs - first);
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) sum[n] = fused(hidden[j], weight[n], sum[n]);
  }
  T* out = problem.out + row * problem.out_row + first;
  load_numbers<wide>(value, out, outputs - first);
#pragma unroll
  for (int n = 0; n < kNumbers; ++n) value[n] = fused(problem.scale, sum[n], value[n]);
  store_numbers<wide>(out, value, outputs - first);
}

template <typename T, typename Id>
void launch_adapter_rows(const AdapterRows<T, Id>& problem, Stream stream) {
  const bool wide = is_whole(problem.in) && is_whole(problem.outputs) && is_whole(problem.x_row) &&
                    is_whole(problem.out_row) && is_aligned16(problem.x) && is_aligned16(problem.down) &&
                    is_aligned16(problem.up) && is_aligned16(problem.out);
  constexpr int64_t kOutputsOfBlock = kAdapterThreads * kNumbers;
  launch(problem.op, wide ? adapter_kernel<T, Id, true> : adapter_kernel<T, Id, false>,
         LaunchShape{{problem.rows, (problem.outputs + kOutputsOfBlock - 1) / kOutputsOfBlock}, {kAdapterThreads}},
         stream, problem);
}

}  // namespace pass_ext::gpu
