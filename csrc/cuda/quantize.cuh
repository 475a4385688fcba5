// Rows of numbers as rows in 8 bits on the GPU, in one launch, a warp per row: once over the row for its scale, once
// for the codes. The form of a row: core/quantize.h. A lane works on eight neighbouring numbers, read in units of 16
// bytes if all addresses allow it (`wide`).
#pragma once

#include <cstdint>

#include "core/quantize.h"
#include "cuda/numbers.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kQuantizeWarps = 4;  // rows of a block
constexpr int kWarpNumbers = 32 * kNumbers;

template <typename T, bool wide>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kQuantizeWarps * 32) quantize_kernel(QuantizeRows<T> problem) {
  begin_kernel();
  const int64_t row = int64_t{block_index().x} * kQuantizeWarps + warp_index(), dim = problem.dim;
  if (row >= problem.rows) return;
  const T* const from = problem.from[row];
  uint8_t* const to = problem.to + row * (kCodeHeader + dim);
  const unsigned lane = lane_index();
  const int64_t first = int64_t{kNumbers} * lane;
  float value[kNumbers];

  uint32_t highest = 0;  // of sizes as bits
  for (int64_t i = first; i < dim; i += kWarpNumbers) {
    load_numbers<wide>(value, from + i, dim - i);
#pragma unroll
    for (int k = 0; k < kNumbers; ++k) {
      const uint32_t size = bits_of(value[k]) & 0x7fffffffu;
      highest = size > highest ? size : highest;
    }
  }
  const float most = most_of_codes(problem.codes), scale = scale_for(reduce_max(highest), most);
  if (lane < kCodeHeader) to[lane] = static_cast<uint8_t>(lane < sizeof scale ? bits_of(scale) >> 8 * lane : 0);

  uint8_t* const codes = to + kCodeHeader;
  for (int64_t i = first; i < dim; i += kWarpNumbers) {
    load_numbers<wide>(value, from + i, dim - i);
    uint64_t eight = 0;
#pragma unroll
    for (int k = 0; k < kNumbers; ++k) eight |= uint64_t{code_of(problem.codes, value[k] / scale, most)} << 8 * k;
    if constexpr (wide) {
      *reinterpret_cast<uint64_t*>(codes + i) = eight;
    } else {
      for (int k = 0; k < kNumbers && i + k < dim; ++k) codes[i + k] = static_cast<uint8_t>(eight >> 8 * k);
    }
  }
}

template <typename T>
void launch_quantize_rows(const QuantizeRows<T>& problem, Stream stream) {
  const bool wide = is_whole(problem.dim) && is_aligned16(problem.from.data) && is_whole(problem.from.group_distance) &&
                    is_whole(problem.from.row_distance) && is_aligned16(problem.to);
  launch("quantize_rows", wide ? quantize_kernel<T, true> : quantize_kernel<T, false>,
         LaunchShape{{(problem.rows + kQuantizeWarps - 1) / kQuantizeWarps}, {kQuantizeWarps * 32}}, stream, problem);
}

}  // namespace pass_ext::gpu
