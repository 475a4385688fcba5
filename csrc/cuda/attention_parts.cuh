// From parts of a unit's result to the result. A part holds, for each row, sums over some of its keys (AttentionShape):
//   maximum m, sum of weights 2^(s - m) times values, sum of weights as rounded, sum of weights
// and several make one by weighing each by 2^(m - largest m). Parts come from the warps of a block, through shared
// memory, and from the blocks that share a unit, through global memory, merged by whichever block comes last: first in
// groups of kGroup neighbours, then the groups. The order of additions is that of the keys, whoever comes last.
// Called by cuda/attention.cuh.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/attention.h"
#include "cuda/attention_plan.cuh"
#include "cuda/attention_schedule.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kGroup = 8;

// Of one row: the last four floats of its line in a part, the fourth unused.
struct RowTotals {
  float maximum = -kLargest, rounded = 0.0f, exact = 0.0f;
};

PASS_EXT_DEVICE void store_totals(float* part_row, int dim, const RowTotals& totals) {
  store16(part_row + dim, {{bits_of(totals.maximum), bits_of(totals.rounded), bits_of(totals.exact), 0}});
}

// The parts of `rows` rows made one: take_chunk(row, column, sums of 8 columns, RowTotals), then, when nobody reads
// parts any more, take_totals(row, RowTotals) once for each row. A thread has the loads of `at_once` parts under way
// together. `totals` is shared memory, [kRows].
template <typename Shape, int at_once, typename PartOf, typename TakeChunk, typename TakeTotals>
PASS_EXT_DEVICE void merge_parts(RowTotals* totals, int rows, int parts, const PartOf& part_of,
                                 const TakeChunk& take_chunk, const TakeTotals& take_totals) {
#pragma unroll 1
  for (int i = static_cast<int>(thread_rank()); i < rows * Shape::kChunks; i += kAttentionThreads) {
    const int row = i / Shape::kChunks, column = i % Shape::kChunks * 8;
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
    take_chunk(row, column, sums, total);
    if (column == 0) totals[row] = total;
  }
  sync_block();
  const int row = static_cast<int>(thread_rank());
  if (row < rows) take_totals(row, totals[row]);
}

// Parts into one part at `target`, which may be one of them.
template <typename Shape, int at_once, typename PartOf>
PASS_EXT_DEVICE void merge_into_part(float* target, RowTotals* totals, int rows, int parts, const PartOf& part_of) {
  merge_parts<Shape, at_once>(
      totals, rows, parts, part_of,
      [&](int row, int column, const float (&sums)[8], const RowTotals&) {
        float* const to = target + row * Shape::kPartStride + column;
        store16(to, {{bits_of(sums[0]), bits_of(sums[1]), bits_of(sums[2]), bits_of(sums[3])}});
        store16(to + 4, {{bits_of(sums[4]), bits_of(sums[5]), bits_of(sums[6]), bits_of(sums[7])}});
      },
      [&](int row, const RowTotals& total) { store_totals(target + row * Shape::kPartStride, Shape::kDim, total); });
}

// Parts into the rows of the result.
template <typename Shape, int at_once, typename PartOf>
PASS_EXT_DEVICE void merge_into_result(const AttentionProblem& problem, const Segment& segment, RowTotals* totals,
                                       int parts, const PartOf& part_of) {
  using T = typename Shape::T;
  merge_parts<Shape, at_once>(
      totals, segment.rows, parts, part_of,
      [&](int row, int column, const float (&sums)[8], const RowTotals& total) {
        if (column >= problem.head_dim) return;
        const float inverse = total.rounded == 0.0f ? 0.0f : 1.0f / total.rounded;
        Bytes16 bytes;
#pragma unroll
        for (int j = 0; j < 4; ++j) bytes.word[j] = pack2<T>(sums[2 * j] * inverse, sums[2 * j + 1] * inverse);
        store16(static_cast<T*>(problem.out) + row_offset(problem, segment, row) * problem.head_dim + column, bytes);
      },
      [&](int row, const RowTotals& total) {
        problem.lse[row_offset(problem, segment, row)] = log_of_total(total.maximum, total.exact);
      });
}

// Whether this block is the last of `expected` to come here; if so it sees what the others wrote before they came, and
// the counter is zero again. `ticket` is shared memory.
PASS_EXT_DEVICE bool is_last(int32_t* counter, int32_t expected, int32_t* ticket) {
  sync_block();
  if (thread_rank() == 0) {
    fence_device();
    *ticket = atomic_add(counter, 1);
    if (*ticket + 1 == expected) atomic_exchange(counter, 0);
  }
  sync_block();
  const bool last = *ticket + 1 == expected;
  if (last) fence_device();
  return last;
}

// After this block has stored its part of a unit that several blocks share: merges what is complete.
// The unit's members are blocks `first` to `last`. Each has its part in its slot 2 i, for the unit is the first thing
// in its share, but for the first member, to which it is the last thing: slot 2 i + 1. Counters: of the groups at 2
// first + 1; of the members of a group at 2 i, i its first member. No other unit counts there: block i may also be the
// last member of the unit before, but the first of several in a group there it is not.
template <typename Shape>
PASS_EXT_DEVICE void merge_shared_unit(const AttentionProblem& problem, const Segment& segment, const SharedWork& work,
                                       int64_t first, int64_t last, int64_t own, RowTotals* totals, int32_t* ticket) {
  const auto part_of = [&](int64_t member) {
    return work.parts + (2 * (first + member) + (member == 0 ? 1 : 0)) * Shape::kPart;
  };
  const int members = static_cast<int>(last - first + 1), groups = (members + kGroup - 1) / kGroup;
  const int group_first = static_cast<int>(own - first) / kGroup * kGroup;
  const int group_size = members - group_first < kGroup ? members - group_first : kGroup;
  if (group_size > 1) {
    const auto member_of_group = [&](int k) { return part_of(group_first + k); };
    if (!is_last(work.counters + 2 * (first + group_first), group_size, ticket)) return;
    if (groups == 1) return merge_into_result<Shape, kGroup>(problem, segment, totals, group_size, member_of_group);
    merge_into_part<Shape, kGroup>(part_of(group_first), totals, segment.rows, group_size, member_of_group);
  }
  if (!is_last(work.counters + 2 * first + 1, groups, ticket)) return;
  merge_into_result<Shape, kGroup>(problem, segment, totals, groups,
                                   [&](int group) { return part_of(group * kGroup); });
}

}  // namespace pass_ext::gpu
