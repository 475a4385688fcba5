// Parts of a result and their sum. A part holds, for each row, sums over some of its keys (AttentionShape):
//   maximum m, sum of weights 2^(s - m) times values, sum of weights as rounded, sum of weights
// Parts are added after weighing each by 2^(m - largest m), in an order that is always the same. Those of the warps of
// a block lie in shared memory; those of the blocks that share a tile of rows, its members, lie in global memory until
// attention_combine.cuh adds them.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/attention.h"
#include "cuda/attention_schedule.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// The totals of one row: the last four floats of its line in a part, the fourth unused.
struct RowTotals {
  float maximum = -kLargest, rounded = 0.0f, exact = 0.0f;
};

PASS_EXT_DEVICE void store_totals(float* part_row, int dim, const RowTotals& totals) {
  store16(part_row + dim, {{bits_of(totals.maximum), bits_of(totals.rounded), bits_of(totals.exact), 0}});
}

// What a sink leaves of row `row` of [rows, heads]. Called, because a thread writes several rows.
PASS_EXT_DEVICE_CALL float share_of_row(const float* sinks, int32_t heads, int64_t row, float maximum, float sum) {
  return share_beside_sink(sum, sink_of_row(sinks, heads, row, maximum));
}

// What makes the result of row `row` of [rows, heads] of its weighted values.
PASS_EXT_DEVICE float factor_of_row(const AttentionProblem& problem, int64_t row, const RowTotals& totals) {
  const float factor = totals.rounded == 0.0f ? 0.0f : 1.0f / totals.rounded;
  if (problem.sinks == nullptr) return factor;
  return factor * share_of_row(problem.sinks, problem.heads, row, totals.maximum, totals.exact);
}

// The totals and the weights of sums of all shares before (attention_places.cuh) and of one more. The first has none
// before it.
struct ShareWeights {
  RowTotals totals;
  float before, share;
};

PASS_EXT_DEVICE ShareWeights weights_of_share(const RowTotals& before, const RowTotals& share) {
  const float highest = larger(before.maximum, share.maximum);
  const float shrink = exp2_approximate(before.maximum - highest), weight = exp2_approximate(share.maximum - highest);
  return {{highest, fused(before.rounded, shrink, share.rounded * weight),
           fused(before.exact, shrink, share.exact * weight)},
          shrink,
          weight};
}

// Floats of a row in a part.
PASS_EXT_HOST_DEVICE int64_t part_stride(int32_t value_dim) { return value_dim + int64_t{4}; }

// Writes four columns of a result.
template <typename T>
PASS_EXT_DEVICE void store_columns(T* to, const float (&columns)[4], float factor) {
  float scaled[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) scaled[i] = columns[i] * factor;
  if constexpr (sizeof(T) == 4)
    store16(to, {{bits_of(scaled[0]), bits_of(scaled[1]), bits_of(scaled[2]), bits_of(scaled[3])}});
  else
    *reinterpret_cast<uint64_t*>(to) = pack2<T>(scaled[0], scaled[1]) | uint64_t{pack2<T>(scaled[2], scaled[3])} << 32;
}

// A thread's sum of parts: four columns of one row, and the row's totals.
struct RowSum {
  RowTotals totals;
  float columns[4] = {};

  // Adds parts first, first + step, ... below `parts`. line(part) is the row in a part: kDim floats, then the totals.
  // kAtOnce parts are on their way before the first is used.
  template <int kDim, int kAtOnce, typename Line>
  PASS_EXT_DEVICE void add(int first, int parts, int step, int column, const Line& line) {
#pragma unroll 1
    for (; first < parts; first += kAtOnce * step) {
      Bytes16 values[kAtOnce], ends[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        values[k] = {};
        ends[k] = {{bits_of(-kLargest), 0, 0, 0}};  // of a part that is not there, and adds nothing
        if (first + k * step >= parts) continue;
        const float* const from = line(first + k * step);
        values[k] = load16(from + column);
        ends[k] = load16(from + kDim);
      }
      float highest = totals.maximum;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) highest = fmaxf(highest, float_of(ends[k].word[0]));
      const float shrink = exp2_approximate(totals.maximum - highest);
      totals = {highest, totals.rounded * shrink, totals.exact * shrink};
#pragma unroll
      for (float& value : columns) value *= shrink;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const float weight = exp2_approximate(float_of(ends[k].word[0]) - highest);
        totals.rounded = fused(weight, float_of(ends[k].word[1]), totals.rounded);
        totals.exact = fused(weight, float_of(ends[k].word[2]), totals.exact);
#pragma unroll
        for (int j = 0; j < 4; ++j) columns[j] = fused(weight, float_of(values[k].word[j]), columns[j]);
      }
    }
  }

  // Stores the columns, and with the first of them the totals, in a row of a part.
  PASS_EXT_DEVICE void store(float* part_row, int dim, int column) const {
    store16(part_row + column, {{bits_of(columns[0]), bits_of(columns[1]), bits_of(columns[2]), bits_of(columns[3])}});
    if (column == 0) store_totals(part_row, dim, totals);
  }

  // Writes the columns of row `index` of out, and with the first of them its lse.
  template <typename T, bool is_one_width = true>
  PASS_EXT_DEVICE void write(const AttentionProblem& problem, int64_t index, int column) const {
    if (column == 0) problem.lse[index] = log_of_total(totals.maximum, totals.exact);
    if (column >= value_dim_of<is_one_width>(problem)) return;
    store_columns(static_cast<T*>(problem.out) + index * value_dim_of<is_one_width>(problem) + column, columns,
                  factor_of_row(problem, index, totals));
  }
};

// Adds the parts of the block's own warps, which are in shared memory, to one part, or, if that is null, to the result.
template <typename Shape>
PASS_EXT_DEVICE void merge_warps(const AttentionProblem& problem, const Segment& segment, float* part) {
  constexpr SharedTiles<Shape> shared{};
  constexpr int kColumns = Shape::kValueDim / 4;          // of 16 bytes
  constexpr int kAtOnce = Shape::kKeyWarps == 1 ? 4 : 2;  // of a thread
  const int items = segment.rows * kColumns;
#pragma unroll 1
  for (int begin = static_cast<int>(thread_rank()); begin < items; begin += kAtOnce * kAttentionThreads) {
    RowSum sums[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int item = begin + i * kAttentionThreads < items ? begin + i * kAttentionThreads : begin;
      const float* const first = shared.parts() + item / kColumns * Shape::kPartStride;
      sums[i].template add<Shape::kValueDim, Shape::kKeyWarps>(0, Shape::kKeyWarps, 1, item % kColumns * 4,
                                                               [&](int warp) { return first + warp * Shape::kPart; });
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int item = begin + i * kAttentionThreads, row = item / kColumns, column = item % kColumns * 4;
      if (item >= items) break;
      if (part != nullptr)
        sums[i].store(part + row * Shape::kPartStride, Shape::kValueDim, column);
      else
        sums[i].template write<typename Shape::T, Shape::kIsOneWidth>(problem, row_offset(problem, segment, row),
                                                                      column);
    }
  }
}

// The place of a block's part of the segment: the second if the segment is the first of its unit.
template <typename Shape>
PASS_EXT_DEVICE float* part_of_segment(const SharedWork& work, const Segment& segment) {
  return work.parts + (2 * block_index().x + (segment.begin == 0 ? 1 : 0)) * Shape::kPart;
}

// Notes for attention_combine.cuh that several blocks share the segment's tile of rows and this block is the first of
// them: a block is that for only one tile, the last of its share.
PASS_EXT_DEVICE void note_shared_tile(const SharedWork& work, const Team& team, const Segment& segment) {
  const int32_t last = team.team_of(segment.unit_begin + segment.tiles - 1);
  work.rows[block_index().x] = segment.rows;
  work.tiles[block_index().x] = {segment.request.first, segment.head, segment.first_row, last - team.index + 1,
                                 team.in_step};
}

}  // namespace pass_ext::gpu
