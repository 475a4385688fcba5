// What rows of slots add to the sums of a block on the GPU. The problem and its formula: core/adapter.h.
//
// The hidden numbers of a row are outputs of a linear layer, and have the order of its sums: all warps of a block
// compute 16 of them for all rows at once. Rows whose slots have different adapters share a tile of 16: of its sums
// each row uses those of its own adapter.
//
// Each block computes the hidden numbers of its rows again, with `down` from the L2 cache: for an adapter of rank 8
// that all slots share, 16 `in` bytes beside the 32 `in` of its weights, and most of the waiting is that for these. On
// an H100 (64 bytes a clock from L2) the bytes are 0.1 us a launch for 576 numbers and 0.5 us for 4,096; barriers and
// loads in sequence make it 2 us or more by benchmarks/kernel_time, which counts every wait in full. Two to three
// launches of their own in its place take 2 to 3 us each. A tile more, for every 16 ranks or two such adapters more,
// takes as many bytes and barriers again. No GPU has measured it yet.
#pragma once

#include <cstdint>

#include "core/adapter.h"
#include "core/scalar.h"
#include "cuda/linear_sums.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// The rows of slots among up to 32 rows, of which lane n of a warp has row n.
struct SlotRows {
  int adapter = -1;      // of the lane's row; -1: a token, or a slot out of range
  int place = 0;         // of this adapter among those of the rows
  unsigned leaders = 0;  // a bit for the first row of each adapter; 0: no row has one

  PASS_EXT_DEVICE int adapters() const { return count_set_bits(leaders); }
};

// By a warp. A block whose rows are tokens reads their ids and nothing else.
PASS_EXT_DEVICE SlotRows slot_rows(const AdapterIds& ids, int64_t first_row, int count) {
  const int lane = static_cast<int>(lane_index());
  SlotRows rows;
  if (lane < count) rows.adapter = static_cast<int>(adapter_of_id(ids[first_row + lane], ids.adapters));
  if (!any(rows.adapter >= 0)) return rows;
  int first = lane;
  for (int n = count - 1; n >= 0; --n)
    if (shuffle(rows.adapter, n) == rows.adapter && n < first) first = n;
  rows.leaders = ballot(rows.adapter >= 0 && first == lane);
  rows.place = count_set_bits(rows.leaders & ((1u << first) - 1u));
  return rows;
}

// A row of `down`, by the number of its hidden numbers among all of the block: product by product, adapter by adapter.
struct HiddenNumber {
  int product, adapter, rank;  // adapter -1: there is none
};

// All lanes of a warp call it together.
template <int products, typename T>
PASS_EXT_DEVICE HiddenNumber hidden_number(const AdapterWeights<T>* const (&weights)[products], const SlotRows& rows,
                                           int index) {
  HiddenNumber number{0, -1, 0};
  int rank = static_cast<int>(weights[0]->rank);
  if constexpr (products == 2) {
    const int of_first = rows.adapters() * rank;
    if (index >= of_first) {
      index -= of_first;
      number.product = 1;
      rank = static_cast<int>(weights[1]->rank);
    }
  }
  const int place = rank > 0 ? index / rank : 32;
  unsigned leaders = rows.leaders;
  for (int skipped = 0; skipped < place && leaders; ++skipped) leaders &= leaders - 1;
  const int adapter = shuffle(rows.adapter, leaders ? first_set_bit(leaders) : 0);
  if (leaders) number.adapter = adapter;
  number.rank = index - place * rank;
  return number;
}

// sums[n * kSumStride + r] = down[r] x[n], for the 16 rows of `down`: each lane has rows lane / 4 and
// 8 behind it, null: there is none.
// All threads of the block call it together; a barrier must come before the next call.
template <bool wide, int row_tiles, typename T>
PASS_EXT_DEVICE void multiply_down(float* sums, const T* const (&down)[2], const T* x, int64_t x_row, int count,
                                   int64_t in) {
  using Sums = TileSums<T, row_tiles>;
  constexpr int kRows = 8 * row_tiles, kAhead = kIsFloat32<T> ? 1 : 2;
  const int warp = static_cast<int>(warp_index());
  const int64_t units = (in + kUnit - 1) / kUnit, of_lane = lane_index() % 4 * kNumbers;
  Sums sum;
#pragma unroll 1
  for (int64_t first = warp; first < units; first += kAhead * kLinearWarps) {
    Eight<T> weight[kAhead][2];
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t k = (first + a * kLinearWarps) * kUnit + of_lane;
        weight[a][half] = down[half] ? load_eight<wide, false>(down[half] + k, in - k) : Eight<T>{};
      }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (first + a * kLinearWarps >= units) break;
      const int64_t k = (first + a * kLinearWarps) * kUnit + of_lane;
#pragma unroll
      for (int i = 0; i < Sums::kLoads; ++i) {
        const int n = Sums::row_of_load(i);
        if (kIsFloat32<T> && n >= count) break;  // the same rows for all lanes
        sum.add(i, weight[a], n < count ? load_eight<wide, false>(x + n * x_row + k, in - k) : Eight<T>{});
      }
    }
  }
  sum.store(sums + warp * kRows * kSumStride);
  sync_block();
  for (int index = static_cast<int>(thread_rank()); index < kTileOutputs * kRows; index += kLinearThreads) {
    const int place = index / kTileOutputs * kSumStride + index % kTileOutputs;
    sums[place] = total_of_warps<kRows * kSumStride>(sums + place);
  }
  sync_block();
}

// What a row's adapters add to one or two outputs of a thread, not yet scaled: two of one product, or one of each of
// two.
struct AddedOutputs {
  float sum[2] = {};
  int there = 0;  // bits: which of them
};

// All threads of the block call it together, with the numbers that its warps' sums will take as `sums`. Each has row
// `n`, and outputs of it, -1: none; x: the block's `count` rows.
template <bool wide, int row_tiles, int products, typename T>
PASS_EXT_DEVICE AddedOutputs add_adapters(float* sums, const AdapterWeights<T>* const (&weights)[products],
                                          const SlotRows& rows, int n, const int (&output)[2], int64_t outputs,
                                          const T* x, int64_t x_row, int count, int64_t in) {
  const int adapter = shuffle(rows.adapter, n), place = shuffle(rows.place, n), lane = static_cast<int>(lane_index());
  const int adapters = rows.adapters(), of_first = adapters * static_cast<int>(weights[0]->rank);
  const int total = of_first + (products == 2 ? adapters * static_cast<int>(weights[products - 1]->rank) : 0);
  AddedOutputs added;
#pragma unroll 1
  for (int first = 0; first < total; first += kTileOutputs) {
    const T* down[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const HiddenNumber number = hidden_number(weights, rows, first + lane / 4 + half * kHalfTile);
      const AdapterWeights<T>& of_number = products == 2 && number.product == 1 ? *weights[products - 1] : *weights[0];
      down[half] = number.adapter < 0 ? nullptr : of_number.down + (number.adapter * of_number.rank + number.rank) * in;
    }
    multiply_down<wide, row_tiles>(sums, down, x, x_row, count, in);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const AdapterWeights<T>& of_output = *weights[products == 2 ? i : 0];
      const int rank = static_cast<int>(of_output.rank),
                begin = (products == 2 && i == 1 ? of_first : 0) + place * rank;
      if (adapter < 0 || rank == 0 || output[i] < 0) continue;
      added.there |= 1 << i;
      const int from = begin > first ? begin : first, end = first + kTileOutputs;
      const T* up = of_output.up + (int64_t{adapter} * rank + from - begin) * outputs + output[i];
#pragma unroll 4
      for (int j = from; j < end && j < begin + rank; ++j, up += outputs)
        added.sum[i] = fused(sums[n * kSumStride + j - first], to_float(*up), added.sum[i]);
    }
    sync_block();
  }
  return added;
}

}  // namespace pass_ext::gpu
