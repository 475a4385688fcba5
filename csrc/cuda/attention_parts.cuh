// From parts of a unit's result to the result. A part holds, for each row, sums over some of its keys (AttentionShape):
//   maximum m, sum of weights 2^(s - m) times values, sum of weights as rounded, sum of weights
// and several make one by weighing each by 2^(m - largest m). Parts come from the warps of a block, through shared
// memory, and from the blocks that share a unit, through global memory, merged by whichever block comes last: first in
// groups of kGroup neighbours, then the groups. The order of additions is that of the keys, whoever comes last.
// Called by cuda/attention.cuh.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "cuda/attention_schedule.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int64_t kGroup = 8;

// 2^(maximum - highest): what a part with one maximum weighs in a sum with another.
PASS_EXT_DEVICE float weight_of(const float* part_row, int dim, float highest) {
  return exp2_approximate(part_row[dim] - highest);
}

// totals [3][kRows] in shared memory: of each row the maximum and both sums over all parts.
template <typename Shape, typename PartOf>
PASS_EXT_DEVICE void merge_totals(float* totals, int rows, int64_t parts, const PartOf& part_of) {
  constexpr int kDim = Shape::kDim;
  const int row = static_cast<int>(thread_rank());
  if (row < rows) {
    float highest = -kLargest, rounded = 0.0f, exact = 0.0f;
    for (int64_t k = 0; k < parts; ++k) {
      const float maximum = part_of(k)[row * Shape::kPartStride + kDim];
      if (maximum > highest) highest = maximum;
    }
    for (int64_t k = 0; k < parts; ++k) {
      const float* const part = part_of(k) + row * Shape::kPartStride;
      const float weight = weight_of(part, kDim, highest);
      rounded = fused(weight, part[kDim + 1], rounded);
      exact = fused(weight, part[kDim + 2], exact);
    }
    totals[row] = highest;
    totals[Shape::kRows + row] = rounded;
    totals[2 * Shape::kRows + row] = exact;
  }
  sync_block();
}

// The parts of `rows` rows made one: take_chunk(row, column, sums of 8 columns), then take_totals(row) for each row, by
// which time nobody reads parts any more.
template <typename Shape, typename PartOf, typename TakeChunk, typename TakeTotals>
PASS_EXT_DEVICE void merge_parts(const float* totals, int rows, int64_t parts, const PartOf& part_of,
                                 const TakeChunk& take_chunk, const TakeTotals& take_totals) {
  for (int i = static_cast<int>(thread_rank()); i < rows * Shape::kChunks; i += kAttentionThreads) {
    const int row = i / Shape::kChunks, column = i % Shape::kChunks * 8;
    const float highest = totals[row];
    float sums[8] = {};
#pragma unroll 4
    for (int64_t k = 0; k < parts; ++k) {
      const float* const part = part_of(k) + row * Shape::kPartStride;
      const float weight = weight_of(part, Shape::kDim, highest);
      const Bytes16 low = load16(part + column), high = load16(part + column + 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[j] = fused(weight, float_of(low.word[j]), sums[j]);
        sums[4 + j] = fused(weight, float_of(high.word[j]), sums[4 + j]);
      }
    }
    take_chunk(row, column, sums);
  }
  sync_block();
  if (static_cast<int>(thread_rank()) < rows) take_totals(static_cast<int>(thread_rank()));
}

PASS_EXT_DEVICE void store_floats(float* to, const float (&values)[8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Bytes16 bytes;
#pragma unroll
    for (int j = 0; j < 4; ++j) bytes.word[j] = bits_of(values[4 * half + j]);
    store16(to + 4 * half, bytes);
  }
}

// Parts into one part at `target`, which may be one of them.
template <typename Shape, typename PartOf>
PASS_EXT_DEVICE void merge_into_part(float* target, float* totals, int rows, int64_t parts, const PartOf& part_of) {
  merge_totals<Shape>(totals, rows, parts, part_of);
  merge_parts<Shape>(
      totals, rows, parts, part_of,
      [&](int row, int column, const float (&sums)[8]) {
        store_floats(target + row * Shape::kPartStride + column, sums);
      },
      [&](int row) {
        for (int i = 0; i < 3; ++i) target[row * Shape::kPartStride + Shape::kDim + i] = totals[i * Shape::kRows + row];
      });
}

// Parts into the rows of the result.
template <typename Shape, typename PartOf>
PASS_EXT_DEVICE void merge_into_result(const AttentionProblem& problem, const Segment& segment, float* totals,
                                       int64_t parts, const PartOf& part_of) {
  using T = typename Shape::T;
  const float *const rounded = totals + Shape::kRows, *const exact = totals + 2 * Shape::kRows;
  merge_totals<Shape>(totals, segment.rows, parts, part_of);
  merge_parts<Shape>(
      totals, segment.rows, parts, part_of,
      [&](int row, int column, const float (&sums)[8]) {
        if (column >= problem.head_dim) return;
        const float inverse = rounded[row] == 0.0f ? 0.0f : 1.0f / rounded[row];
        Bytes16 bytes;
#pragma unroll
        for (int j = 0; j < 4; ++j) bytes.word[j] = pack2<T>(sums[2 * j] * inverse, sums[2 * j + 1] * inverse);
        store16(static_cast<T*>(problem.out) + row_offset(problem, segment, row) * problem.head_dim + column, bytes);
      },
      [&](int row) { problem.lse[row_offset(problem, segment, row)] = log_of_total(totals[row], exact[row]); });
}

// What blocks share: parts [2 grid] in global memory, of which block i has slots 2 i and 2 i + 1, and counters [2
// grid], zero before and after every launch.
struct SharedWork {
  float* parts;
  int32_t* counters;
};

// Whether this block is the last of `expected` to come here; if so it sees what the others wrote before they came, and
// the counter is zero again. `ticket` is shared memory.
PASS_EXT_DEVICE bool is_last(int32_t* counter, int64_t expected, int32_t* ticket) {
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
                                       int64_t first, int64_t last, int64_t own, float* totals, int32_t* ticket) {
  const auto slot_of = [&](int64_t member) { return 2 * (first + member) + (member == 0 ? 1 : 0); };
  const auto part_of = [&](int64_t member) { return work.parts + slot_of(member) * Shape::kPart; };
  const int64_t members = last - first + 1, groups = (members + kGroup - 1) / kGroup;
  const int64_t group_first = (own - first) / kGroup * kGroup;
  const int64_t group_size = members - group_first < kGroup ? members - group_first : kGroup;
  const auto member_of_group = [&](int64_t k) { return part_of(group_first + k); };
  if (group_size > 1) {
    if (!is_last(work.counters + 2 * (first + group_first), group_size, ticket)) return;
    if (groups == 1) return merge_into_result<Shape>(problem, segment, totals, group_size, member_of_group);
    merge_into_part<Shape>(part_of(group_first), totals, segment.rows, group_size, member_of_group);
  }
  if (!is_last(work.counters + 2 * first + 1, groups, ticket)) return;
  merge_into_result<Shape>(problem, segment, totals, groups, [&](int64_t group) { return part_of(group * kGroup); });
}

}  // namespace pass_ext::gpu
