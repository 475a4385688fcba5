// Gated adapters on the GPU, both products in one launch. The problem and its formula: core/adapter.h.
//
// A block computes a part of the outputs of one row, with the bits of the layer ops' adapters: the sums of
// cuda/linear_adapters.cuh. It computes the row's hidden numbers again for each part, because `down` then comes from
// the L2 cache and no second launch is needed. Blocks of tokens read their id and end. A slot out of range gets no
// adapter: an error message would need a synchronisation.
#pragma once

#include <cstdint>

#include "core/adapter.h"
#include "core/scalar.h"
#include "cuda/linear_adapters.cuh"
#include "cuda/linear_sums.cuh"
#include "cuda/numbers.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kAdapterThreads = kLinearThreads;

template <typename T, typename Id, bool wide>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kAdapterThreads, 2) adapter_kernel(AdapterRows<T, Id> problem) {
  begin_kernel();
  PASS_EXT_SHARED(float, sums, sum_bytes(8, 1) / int64_t{sizeof(float)});
  const int64_t row = block_index().x, in = problem.in, outputs = problem.outputs;
  const int64_t k = adapter_of_id(problem.ids[row], problem.adapters);
  if (k < 0) return;
  const int rank = static_cast<int>(problem.rank), lane = static_cast<int>(lane_index());
  const int64_t output = (int64_t{block_index().y} * kAdapterThreads + thread_rank()) * kNumbers;
  const T* up = problem.up + k * rank * outputs + output;
  float sum[kNumbers] = {};
#pragma unroll 1
  for (int first = 0; first < rank; first += kTileOutputs) {
    const T* down[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = first + lane / 4 + half * kHalfTile;
      down[half] = j < rank ? problem.down + (k * rank + j) * in : nullptr;
    }
    multiply_down<wide, 1>(sums, down, problem.x + row * problem.x_row, 0, 1, in);
#pragma unroll 4
    for (int j = first; j < rank && j < first + kTileOutputs && output < outputs; ++j) {
      float weight[kNumbers];
      load_numbers<wide>(weight, up + j * outputs, outputs - output);
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) sum[n] = fused(sums[j - first], weight[n], sum[n]);
    }
    sync_block();
  }
  if (output >= outputs) return;
  T* out = problem.out + row * problem.out_row + output;
  float value[kNumbers];
  load_numbers<wide>(value, out, outputs - output);
#pragma unroll
  for (int n = 0; n < kNumbers; ++n) value[n] = fused(problem.scale, sum[n], value[n]);
  store_numbers<wide>(out, value, outputs - output);
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
