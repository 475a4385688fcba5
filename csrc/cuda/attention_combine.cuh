// Adds the parts that blocks of attention_kernel left for the same rows. Row by row, over the members i of its tile:
//   m = max m_i      out = sum of 2^(m_i - m) values_i / sum of 2^(m_i - m) rounded_i
//   lse = ln(2^m sum of 2^(m_i - m) exact_i)
// A second launch, because hundreds of blocks read all parts together in the time in which the last block of every unit
// would read a few of them through the port of its own multiprocessor. A block takes one row at a time: its threads
// read 16 bytes of some parts each, and their sums are added in shared memory. Members are added in a fixed order.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "cuda/attention_parts.cuh"
#include "cuda/attention_schedule.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kCombineThreads = 128;
constexpr int kCombineWarps = kCombineThreads / 32;
constexpr int kCombineResident = 4;  // blocks on a multiprocessor, which 128 registers allow
// Parts of a thread on their way: 36 of a row of 128 columns. 264 blocks leave a row 33 parts if there are eight key
// heads.
constexpr int kCombineAtOnce = 9;
constexpr int kCountsOfThread = kMostBlocks / kCombineThreads;

template <int kDim>
struct CombineScratch {
  static constexpr int kColumns = kDim / 4;                   // of 16 bytes
  static constexpr int kGroups = kCombineThreads / kColumns;  // threads of a column, each with its members
  alignas(16) float lines[kGroups][kDim + 4];                 // their sums, as rows of parts
  int32_t sums[kCombineWarps];
  int32_t block, row;  // the shared tile's first member, and the row at work
};

// `problem`: its head_dim is that of values; `blocks`: the grid of attention_kernel; `part`: the floats of a part.
template <typename T, int kDim>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kCombineThreads, kCombineResident)
    attention_combine_kernel(PASS_EXT_PARAMETER AttentionProblem problem, SharedWork work, int32_t blocks,
                             int32_t part) {
  begin_kernel(problem);
  using Scratch = CombineScratch<kDim>;
  PASS_EXT_SHARED(Scratch, scratches, 1);
  Scratch& scratch = scratches[0];
  constexpr int kStride = AttentionShape<T, kDim, 1>::kPartStride;
  const int thread = static_cast<int>(thread_rank());

  // The rows of all shared tiles are numbered in the order of their first members.
  int32_t counts[kCountsOfThread], count = 0;
#pragma unroll
  for (int k = 0; k < kCountsOfThread; ++k) {
    const int32_t block = thread * kCountsOfThread + k;
    counts[k] = block < blocks ? work.rows[block] : 0;
  }
#pragma unroll
  for (int k = 0; k < kCountsOfThread; ++k) count += counts[k];
  int32_t up_to = count;  // rows up to this thread's tiles: first within its warp, then from the very first
#pragma unroll
  for (unsigned distance = 1; distance < 32; distance *= 2) {
    const int32_t other = shuffle_up(up_to, distance);
    if (lane_index() >= distance) up_to += other;
  }
  if (lane_index() == 31) scratch.sums[warp_index()] = up_to;
  sync_block();
  int32_t rows = 0;
#pragma unroll
  for (unsigned warp = 0; warp < kCombineWarps; ++warp) {
    if (warp < warp_index()) up_to += scratch.sums[warp];
    rows += scratch.sums[warp];
  }

  const int group = thread / Scratch::kColumns, column = thread % Scratch::kColumns * 4;
#pragma unroll 1
  for (int32_t index = static_cast<int32_t>(block_index().x); index < rows;
       index += static_cast<int32_t>(grid_size().x)) {
    int32_t row = index - (up_to - count);
    if (row >= 0 && row < count) {
      int k = 0;
#pragma unroll
      for (int next = 0; next + 1 < kCountsOfThread; ++next)
        if (k == next && row >= counts[next]) {
          row -= counts[next];
          ++k;
        }
      scratch.block = thread * kCountsOfThread + k;
      scratch.row = row;
    }
    sync_block();  // the row is known, and the sums of the row before it are read
    const SharedTile tile = work.tiles[scratch.block];
    row = scratch.row;
    if (group < Scratch::kGroups) {
      const float* const base = work.parts + int64_t{2} * scratch.block * part + row * kStride;
      RowSum sum;
      sum.template add<kDim, kCombineAtOnce>(group, tile.members, Scratch::kGroups, column, [&](int member) {
        return base + (member == 0 ? part : member * tile.in_step * 2 * part);
      });
      sum.store(scratch.lines[group], kDim, column);
    }
    sync_block();
    if (thread < Scratch::kColumns) {
      RowSum sum;
      sum.template add<kDim, 4>(0, Scratch::kGroups, 1, column, [&](int place) { return scratch.lines[place]; });
      sum.template write<T>(problem, row_offset(problem, tile.first_node, tile.head, tile.first_row + row), column);
    }
  }
}

// Adds the parts of the grid of `blocks` blocks that computed the problem by kernels of Shape.
template <typename Shape>
void launch_combine(const AttentionProblem& problem, const SharedWork& work, unsigned combine_blocks, unsigned blocks,
                    Stream stream) {
  AttentionProblem of_values = problem;
  of_values.head_dim = problem.value_dim;
  launch("attention_tree (combine)", attention_combine_kernel<typename Shape::T, Shape::kValueDim>,
         LaunchShape{{combine_blocks}, {kCombineThreads}}, stream, of_values, work, static_cast<int32_t>(blocks),
         int32_t{Shape::kPart});
}

}  // namespace pass_ext::gpu
