// Merges the parts of a unit's result. A part holds, for each row, sums over some of its keys (AttentionShape):
//   maximum m, sum of weights 2^(s - m) times values, sum of weights as rounded, sum of weights
// Parts are added after weighing each by 2^(m - largest m). They come from the warps of a block, through shared memory,
// and from the blocks that share a unit, its members, through global memory.
//
// Each warp of a block hands over and merges its own slice of the unit's rows, and waits for no other warp: the last
// member to reach a slice merges that slice. More members than kMergedAtOnce are merged in groups of neighbours, then
// the groups. Groups and members of a group are about equally many, because the last warp of all reads both.
// Additions follow the order of the keys, whichever warp is last.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/attention.h"
#include "cuda/attention_schedule.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/block.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kSlices = kAttentionWarps;  // slices of a unit's rows
constexpr int kMostParts = 32;            // that a slice is merged from
static_assert(kMostBlocks <= kMostParts * kMostParts, "as many groups as members of a group, at the most");

// A part has 8.5 KB at 16 rows of 128 and 34 KB at 64: reading 16 of the small ones costs less than a second level.
template <typename Shape>
constexpr int kMergedAtOnce = Shape::kRowWarps == 1 ? 16 : 8;

// The members of a group, if a unit has so many members: the least number whose square is enough.
template <typename Shape>
PASS_EXT_DEVICE int32_t group_size_of(int32_t members) {
  if (members <= kMergedAtOnce<Shape>) return members;
  int32_t size = 3;
#pragma unroll 1
  while (size * size < members) ++size;
  return size;
}

// The totals of one row: the last four floats of its line in a part, the fourth unused.
struct RowTotals {
  float maximum = -kLargest, rounded = 0.0f, exact = 0.0f;
};

PASS_EXT_DEVICE void store_totals(float* part_row, int dim, const RowTotals& totals) {
  store16(part_row + dim, {{bits_of(totals.maximum), bits_of(totals.rounded), bits_of(totals.exact), 0}});
}

// Parts that are merged: the first, and the others at equal distances.
template <typename Shape>
struct PartPlaces {
  float* base;
  int32_t distance;  // floats
  int32_t first;     // of the first part behind `base`

  PASS_EXT_DEVICE float* at(int part) const { return base + (part == 0 ? first : part * distance); }
};

// The place of merged rows: a part, which may be one of those that are merged, or, if null, the result.
struct MergeTarget {
  float* part;
};

// Shared memory of a warp that merges.
template <typename Shape>
struct SliceScratch {
  static constexpr int kRows = Shape::kRows / kSlices;
  alignas(16) float weights[kMostParts][kRows];  // of a part's rows
  float factors[kRows];                          // of the rows' sums in the result
  int64_t offsets[kRows];                        // of the rows in the result
};

template <typename Shape>
PASS_EXT_DEVICE SliceScratch<Shape>& slice_scratch() {
  static_assert(kSlices * sizeof(SliceScratch<Shape>) <= Shape::kBytesBehindParts);
  return reinterpret_cast<SliceScratch<Shape>*>(SharedTiles<Shape>{}.behind_parts())[warp_index()];
}

// Computes the weights of `parts` parts for the rows of the warp's slice, and their totals. Lanes share a row: each
// takes every kLanes-th part. The totals are complete in all lanes of a row.
template <typename Shape>
PASS_EXT_DEVICE RowTotals weigh_parts(SliceScratch<Shape>& scratch, int first_row, int parts,
                                      const PartPlaces<Shape>& places) {
  constexpr int kSliceRows = SliceScratch<Shape>::kRows, kLanes = 32 / kSliceRows;
  constexpr int kAtOnce = kMergedAtOnce<Shape> / kLanes;  // parts of a lane
  const int row = static_cast<int>(lane_index()) % kSliceRows, place = static_cast<int>(lane_index()) / kSliceRows;
  const int offset = (first_row + row) * Shape::kPartStride + Shape::kDim;
  RowTotals total;
#pragma unroll 1
  for (int first = place; first < parts; first += kAtOnce * kLanes) {
    Bytes16 line[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int part = first + k * kLanes;
      line[k] = load16(places.at(part < parts ? part : first) + offset);  // a load for certain needs fewest registers
    }
    float highest = total.maximum;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (first + k * kLanes < parts) highest = fmaxf(highest, float_of(line[k].word[0]));
    const float shrink = exp2_approximate(total.maximum - highest);
    total = {highest, total.rounded * shrink, total.exact * shrink};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * kLanes >= parts) continue;
      const float maximum = float_of(line[k].word[0]), weight = exp2_approximate(maximum - highest);
      total.rounded = fused(weight, float_of(line[k].word[1]), total.rounded);
      total.exact = fused(weight, float_of(line[k].word[2]), total.exact);
      scratch.weights[first + k * kLanes][row] = maximum;
    }
  }
  float highest = total.maximum;
#pragma unroll
  for (int distance = kSliceRows; distance < 32; distance *= 2)
    highest = fmaxf(highest, shuffle_xor(highest, distance));
  const float shrink = exp2_approximate(total.maximum - highest);
  total = {highest, total.rounded * shrink, total.exact * shrink};
#pragma unroll
  for (int distance = kSliceRows; distance < 32; distance *= 2) {
    total.rounded += shuffle_xor(total.rounded, distance);
    total.exact += shuffle_xor(total.exact, distance);
  }
#pragma unroll 1
  for (int part = place; part < parts; part += kLanes)
    scratch.weights[part][row] = exp2_approximate(scratch.weights[part][row] - highest);
  return total;
}

// One warp merges its slice of `parts` parts, all rows of it: those behind the segment's last are there, and not
// written to the result. A lane owns 16 bytes of several rows, at fixed distances in every part, and has 16 loads on
// their way before it uses any.
template <typename Shape>
PASS_EXT_DEVICE void merge_slice(const AttentionProblem& problem, const Segment& segment, int parts,
                                 const PartPlaces<Shape>& places, const MergeTarget& target) {
  using T = typename Shape::T;
  constexpr int kSliceRows = SliceScratch<Shape>::kRows, kColumns = Shape::kDim / 4;  // of 16 bytes
  constexpr int kRowsAtOnce = kColumns <= 16 ? 2 : 1, kRowLanes = 32 / kRowsAtOnce;   // rows side by side
  constexpr int kRowItems = (kColumns + 31) / 32;                                     // of a lane in a row
  constexpr int kAllItems = kSliceRows / kRowsAtOnce * kRowItems, kItems = kAllItems < 16 ? kAllItems : 16;
  constexpr int kAtOnce = 16 / kItems;  // parts
  static_assert(kColumns % kRowLanes == 0 || kColumns == 24);
  const int lane = static_cast<int>(lane_index()), first_row = static_cast<int>(warp_index()) * kSliceRows;
  const int rows = segment.rows - first_row;
  if (rows <= 0) return;
  SliceScratch<Shape>& scratch = slice_scratch<Shape>();
  const RowTotals total = weigh_parts<Shape>(scratch, first_row, parts, places);
  sync_warp();  // all lanes have read the totals of the parts: the merged ones may overwrite them
  if (lane < kSliceRows) {
    if (target.part != nullptr) {
      store_totals(target.part + (first_row + lane) * Shape::kPartStride, Shape::kDim, total);
    } else if (lane < rows) {
      const int64_t index = row_offset(problem, segment, first_row + lane);
      scratch.offsets[lane] = index * problem.head_dim;
      scratch.factors[lane] = total.rounded == 0.0f ? 0.0f : 1.0f / total.rounded;
      problem.lse[index] = log_of_total(total.maximum, total.exact);
    }
  }
  sync_warp();
  if (kColumns % kRowLanes == 0 || lane < kColumns) {
    const int row_of_lane = lane / kRowLanes, column_of_lane = lane % kRowLanes * 4;
#pragma unroll 1
    for (int begin = 0; begin < kAllItems; begin += kItems) {
      const int begin_row = begin / kRowItems * kRowsAtOnce + row_of_lane;
      const int offset = (first_row + begin_row) * Shape::kPartStride + column_of_lane;
      const auto row_of = [](int item) { return item / kRowItems * kRowsAtOnce; };  // behind begin_row
      const auto column_of = [](int item) { return item % kRowItems * 128; };       // behind column_of_lane
      float sums[kItems][4] = {};
#pragma unroll 1
      for (int first = 0; first < parts; first += kAtOnce) {
        Bytes16 line[kAtOnce][kItems];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const float* const from = places.at(first + k < parts ? first + k : first) + offset;
#pragma unroll
          for (int i = 0; i < kItems; ++i) line[k][i] = load16(from + row_of(i) * Shape::kPartStride + column_of(i));
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if (first + k >= parts) continue;
#pragma unroll
          for (int i = 0; i < kItems; ++i) {
            const float weight = scratch.weights[first + k][begin_row + row_of(i)];
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][j] = fused(weight, float_of(line[k][i].word[j]), sums[i][j]);
          }
        }
      }
      if (target.part != nullptr) {
#pragma unroll
        for (int i = 0; i < kItems; ++i)
          store16(target.part + offset + row_of(i) * Shape::kPartStride + column_of(i),
                  {{bits_of(sums[i][0]), bits_of(sums[i][1]), bits_of(sums[i][2]), bits_of(sums[i][3])}});
      } else {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const int row = begin_row + row_of(i), column = column_of_lane + column_of(i);
          if (row >= rows || column >= problem.head_dim) continue;
          const float factor = scratch.factors[row];
          T* const to = static_cast<T*>(problem.out) + scratch.offsets[row] + column;
          *reinterpret_cast<uint64_t*>(to) = pack2<T>(sums[i][0] * factor, sums[i][1] * factor) |
                                             uint64_t{pack2<T>(sums[i][2] * factor, sums[i][3] * factor)} << 32;
        }
      }
    }
  }
  sync_warp();  // the scratch is free again
}

// Merges the parts of the block's own warps, which are in shared memory.
template <typename Shape>
PASS_EXT_DEVICE void merge_warps(const AttentionProblem& problem, const Segment& segment, const MergeTarget& target) {
  merge_slice<Shape>(problem, segment, Shape::kKeyWarps, {SharedTiles<Shape>{}.parts(), Shape::kPart, 0}, target);
}

// For whole warps, as comes_last: for the reads and writes of all lanes.
PASS_EXT_DEVICE bool warp_comes_last(int32_t* counter, int32_t expected) {
  sync_warp();
  int last = 0;
  if (lane_index() == 0) last = comes_last(counter, expected);
  sync_warp();
  return shuffle(last, 0) != 0;
}

// The place of a block's part of the segment: the second if the segment is the first of its unit.
template <typename Shape>
PASS_EXT_DEVICE float* part_of_segment(const SharedWork& work, const Segment& segment) {
  return work.parts + (2 * block_index().x + (segment.begin == 0 ? 1 : 0)) * Shape::kPart;
}

// Merges what is complete after this warp has stored its slice of the part of a unit that several blocks share. The
// unit's members are teams `first` to `last`. A member's part lies at place 2 i of its block i, because the unit is the
// first in its share. The first member's lies at 2 i + 1, because to it the unit is the last. The counters of a block
// (kCountersOfBlock) are one for each slice, of the members of the group that begins with the block, and one for each
// slice of the groups of the unit that begins with it. No other unit counts there: the block may also be the last
// member of the unit before, but there it is not the first of several in a group, and a block is a member but not the
// last in only one of its units.
template <typename Shape>
PASS_EXT_DEVICE void merge_members(const AttentionProblem& problem, const Segment& segment, const SharedWork& work,
                                   const Team& team, int32_t first, int32_t last) {
  static_assert(kCountersOfBlock == 2 * kSlices);
  const int slice = static_cast<int>(warp_index());
  if (slice * SliceScratch<Shape>::kRows >= segment.rows) return;
  const int32_t members = last - first + 1, size = group_size_of<Shape>(members), groups = (members + size - 1) / size;
  const int32_t group = (team.index - first) / size, group_first = group * size;
  const int32_t group_members = members - group_first < size ? members - group_first : size;
  const int64_t first_block = team.block_of(first), group_block = team.block_of(first + group_first);
#pragma unroll 1
  for (bool is_of_groups = group_members == 1;; is_of_groups = true) {
    const bool is_final = is_of_groups || groups == 1;
    const int64_t block = is_of_groups ? first_block : group_block;
    const int32_t parts = is_of_groups ? groups : group_members;
    if (!warp_comes_last(work.counters + kCountersOfBlock * block + (is_of_groups ? kSlices : 0) + slice, parts))
      return;
    const PartPlaces<Shape> line{work.parts + 2 * block * Shape::kPart,
                                 (is_of_groups ? size : 1) * team.in_step * 2 * Shape::kPart,
                                 block == first_block ? Shape::kPart : 0};
    merge_slice<Shape>(problem, segment, parts, line, {is_final ? nullptr : line.at(0)});
    if (is_final) return;
  }
}

}  // namespace pass_ext::gpu
