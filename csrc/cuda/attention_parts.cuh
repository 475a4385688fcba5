// Merges the parts of a unit's result. A part holds, for each row, sums over some of its keys (AttentionShape):
//   maximum m, sum of weights 2^(s - m) times values, sum of weights as rounded, sum of weights
// Parts are added after weighing each by 2^(m - largest m). They come from the warps of a block, through shared memory,
// and from the blocks that share a unit, its members, through global memory. The last of up to kMergeGroup members to
// end merges them all. More members are merged in groups of neighbours, then the groups, slice of rows by slice of
// rows: the last group to reach a slice merges that slice of all groups, and each group starts with another slice.
// Additions follow the order of the keys, whichever block is last.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/attention.h"
#include "cuda/attention_schedule.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/block.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kSlices = 8;       // slices of a unit's rows, each merged by one warp
constexpr int kPartsAtOnce = 8;  // parts that a thread loads together

// A part has 8.5 KB at 16 rows of 128 and 34 KB at 64: reading 16 of the small ones costs less than a second level.
template <typename Shape>
constexpr int kMergeGroup = Shape::kRowWarps == 1 ? 16 : 8;

// The totals of one row: the last four floats of its line in a part, the fourth unused.
struct RowTotals {
  float maximum = -kLargest, rounded = 0.0f, exact = 0.0f;
};

PASS_EXT_DEVICE void store_totals(float* part_row, int dim, const RowTotals& totals) {
  store16(part_row + dim, {{bits_of(totals.maximum), bits_of(totals.rounded), bits_of(totals.exact), 0}});
}

// The place of merged rows: a part, which may be one of those that are merged, or, if null, the result.
struct MergeTarget {
  float* part;
};

// One warp merges slice `slice` of the parts of `rows` rows. `totals` is shared memory, [kRows].
template <typename Shape, int at_once, typename PartOf>
PASS_EXT_DEVICE void merge_slice(const AttentionProblem& problem, const Segment& segment, RowTotals* totals, int slice,
                                 int parts, const PartOf& part_of, const MergeTarget& target) {
  using T = typename Shape::T;
  constexpr int kSliceRows = Shape::kRows / kSlices;
  const int lane = static_cast<int>(lane_index()), first_row = slice * kSliceRows;
  const int rows = segment.rows - first_row < kSliceRows ? segment.rows - first_row : kSliceRows;
#pragma unroll 1
  for (int i = lane; i < rows * Shape::kChunks; i += 32) {
    const int row = first_row + i / Shape::kChunks, column = i % Shape::kChunks * 8;
    RowTotals total;
    float sums[8] = {};
#pragma unroll 1
    for (int first = 0; first < parts; first += at_once) {
      Bytes16 line[at_once][3];  // two with values, one with totals
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const int part = first + k < parts ? first + k : first;  // loads that depend on nothing need fewest registers
        const float* const from = part_of(part) + row * Shape::kPartStride;
        line[k][0] = load16(from + column);
        line[k][1] = load16(from + column + 4);
        line[k][2] = load16(from + Shape::kDim);
      }
      float highest = total.maximum;
#pragma unroll
      for (int k = 0; k < at_once; ++k)
        if (first + k < parts) highest = fmaxf(highest, float_of(line[k][2].word[0]));
      const float shrink = exp2_approximate(total.maximum - highest);
      total = {highest, total.rounded * shrink, total.exact * shrink};
#pragma unroll
      for (float& sum : sums) sum *= shrink;
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        if (first + k >= parts) continue;
        const float weight = exp2_approximate(float_of(line[k][2].word[0]) - highest);
        total.rounded = fused(weight, float_of(line[k][2].word[1]), total.rounded);
        total.exact = fused(weight, float_of(line[k][2].word[2]), total.exact);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[j] = fused(weight, float_of(line[k][j / 4].word[j % 4]), sums[j]);
      }
    }
    if (target.part != nullptr) {
      float* const to = target.part + row * Shape::kPartStride + column;
      store16(to, {{bits_of(sums[0]), bits_of(sums[1]), bits_of(sums[2]), bits_of(sums[3])}});
      store16(to + 4, {{bits_of(sums[4]), bits_of(sums[5]), bits_of(sums[6]), bits_of(sums[7])}});
    } else if (column < problem.head_dim) {
      const float inverse = total.rounded == 0.0f ? 0.0f : 1.0f / total.rounded;
      Bytes16 bytes;
#pragma unroll
      for (int j = 0; j < 4; ++j) bytes.word[j] = pack2<T>(sums[2 * j] * inverse, sums[2 * j + 1] * inverse);
      store16(static_cast<T*>(problem.out) + row_offset(problem, segment, row) * problem.head_dim + column, bytes);
    }
    if (column == 0) totals[row] = total;
  }
  sync_warp();  // the merged totals may overwrite those of a part: all lanes have read them
  if (lane < rows) {
    const int row = first_row + lane;
    const RowTotals total = totals[row];
    if (target.part != nullptr)
      store_totals(target.part + row * Shape::kPartStride, Shape::kDim, total);
    else
      problem.lse[row_offset(problem, segment, row)] = log_of_total(total.maximum, total.exact);
  }
  sync_warp();  // totals are free again
}

// Merges the parts of the block's own warps, which are in shared memory.
template <typename Shape>
PASS_EXT_DEVICE void merge_warps(const AttentionProblem& problem, const Segment& segment, RowTotals* totals,
                                 const MergeTarget& target) {
  const auto part_of = [](int k) { return SharedTiles<Shape>{}.parts() + k * Shape::kPart; };
#pragma unroll 1
  for (int slice = static_cast<int>(warp_index()); slice < kSlices; slice += kAttentionWarps)
    merge_slice<Shape, Shape::kKeyWarps>(problem, segment, totals, slice, Shape::kKeyWarps, part_of, target);
}

// As block_comes_last, for the reads and writes of one warp.
PASS_EXT_DEVICE bool warp_comes_last(int32_t* counter, int32_t expected) {
  sync_warp();
  int last = 0;
  if (lane_index() == 0) last = comes_last(counter, expected);
  sync_warp();
  return shuffle(last, 0) != 0;
}

// Merges what is complete after this block has stored its part of a unit that several blocks share. The unit's members
// are teams `first` to `last`. A member's part lies at place 2 i of its block i, because the unit is the first in its
// share. The first member's lies at 2 i + 1, because to it the unit is the last. The counter of the members of a group
// is 2 i, i the block of the group's first member. No other unit counts there: that block may also be the last member
// of the unit before, but there it is not the first of several in a group. The counters of groups, one for each slice,
// are 2 i + 1 of the first kSlices members. No other unit counts there: in a unit with several groups none of these is
// the last member, and a block is a member but not the last in only one of its units.
template <typename Shape>
PASS_EXT_DEVICE void merge_members(const AttentionProblem& problem, const Segment& segment, const SharedWork& work,
                                   const Team& team, int32_t first, int32_t last, RowTotals* totals, int32_t* answer) {
  constexpr int kGroup = kMergeGroup<Shape>;
  static_assert(kGroup >= kSlices, "more than one group: at least kSlices members before the last");
  const auto part_of = [&](int32_t member) {
    return work.parts + (2 * team.block_of(first + member) + (member == 0 ? 1 : 0)) * Shape::kPart;
  };
  const int32_t members = last - first + 1, groups = (members + kGroup - 1) / kGroup;
  const int32_t group = (team.index - first) / kGroup, group_first = group * kGroup;
  const int32_t group_size = members - group_first < kGroup ? members - group_first : kGroup;
  if (group_size > 1) {
    if (!block_comes_last(work.counters + 2 * team.block_of(first + group_first), group_size, answer)) return;
  } else {
    sync_block();  // a warp passes on slices of the part that other warps have written
  }
#pragma unroll 1
  for (int i = static_cast<int>(warp_index()); i < kSlices; i += kAttentionWarps) {
    const int slice = (i + group) % kSlices;
    bool is_of_groups = false;
#pragma unroll 1
    for (;;) {
      const bool is_final = is_of_groups || groups == 1;
      const int32_t begin = is_of_groups ? 0 : group_first, stride = is_of_groups ? kGroup : 1;
      if (is_final || group_size > 1)
        merge_slice<Shape, kPartsAtOnce>(problem, segment, totals, slice, is_of_groups ? groups : group_size,
                                         [&](int k) { return part_of(begin + k * stride); },
                                         {is_final ? nullptr : part_of(group_first)});
      if (is_final || !warp_comes_last(work.counters + 2 * team.block_of(first + slice) + 1, groups)) break;
      is_of_groups = true;
    }
  }
}

}  // namespace pass_ext::gpu
