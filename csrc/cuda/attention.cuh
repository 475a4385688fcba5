// Attention on the GPU in bf16 and fp16: one persistent kernel that streams tiles of K and V through shared memory,
// multiplies with matrix fragments, and merges what several blocks found for the same rows, in one launch whatever the
// lengths are. Schedule: attention_schedule.cuh; tiles: attention_tile.cuh; a warp's arithmetic: attention_warp.cuh;
// merging: attention_parts.cuh; fp32: attention_plain.cuh. Called by cuda/attention.cu, and by the emulator in the
// tests.
#pragma once

#include "core/attention.h"
#include "cuda/attention_parts.cuh"
#include "cuda/attention_plan.cuh"
#include "cuda/attention_schedule.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/attention_warp.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// What the threads of a block tell each other besides tiles. What is the same for all of them is here rather than in
// their registers, which results and queries fill.
struct AttentionScratch {
  ScheduleScratch schedule;
  Segment segment;
  Shares shares;
  int32_t ticket;
  int32_t has_non_finite;  // whether a masked tile of this segment had a value that is not finite
};

// Adds to the stored results the non-finite values that remove_non_finite took out, for the rows that do see their
// keys: to the part of the warp that had the key, for a part that saw nothing counts nothing.
template <typename Shape>
PASS_EXT_DEVICE void restore_non_finite(const AttentionProblem& problem, const Segment& segment, float* parts) {
  using T = typename Shape::T;
  for (int column = static_cast<int>(thread_rank()); column < problem.head_dim; column += kAttentionThreads)
    for (int tile = segment.begin; tile < segment.end; ++tile) {
      const int32_t first = segment.first_key + tile * Shape::kKeys;
      if (all_see(problem, segment.request, first, Shape::kKeys)) continue;
      for (int row = 0; row < segment.rows; ++row) {
        const uint64_t seen = visible_keys(problem, segment.request, (segment.first_row + row) / problem.group, first);
#pragma unroll 1
        for (int i = 0; i < Shape::kKeys; ++i) {
          if (!(seen >> i & 1)) continue;
          const T* const from =
              key_row<T>(problem, segment.request, problem.v_cache, problem.v_new, first + i, segment.head);
          if (from != nullptr && !is_finite(from[column]))
            parts[i / Shape::kWarpKeys * Shape::kPart + row * Shape::kPartStride + column] += to_float(from[column]);
        }
      }
    }
}

// All tiles of a segment; the block's result is then in shared memory, in Shape::kKeyWarps parts.
template <typename Shape>
PASS_EXT_DEVICE void attend(const AttentionProblem& problem, AttentionScratch& scratch) {
  const Segment& segment = scratch.segment;
  constexpr SharedTiles<Shape> shared{};
  constexpr int kAhead = Shape::kStages - 1;  // tiles under way while one is computed with
  const AddressedKey<Shape> own_key{problem, segment};
  if (thread_rank() == 0) scratch.has_non_finite = 0;

  int64_t outer[Shape::kStages];
#pragma unroll
  for (int i = 0; i < Shape::kStages; ++i) outer[i] = own_key.find(segment.begin + i);
  Queries<Shape> queries;
  queries.load(problem, segment);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    own_key.put(segment.begin + i, outer[i]);
    sync_block();
    if (segment.begin + i < segment.end) copy_tile<Shape>(problem, segment.begin + i);
    copy_async_commit();
  }
  own_key.put(segment.begin + kAhead, outer[kAhead]);

  const bool has_rows = first_row_of_warp<Shape>() < segment.rows;
  RowState<Shape> state;
  state.clear();
  for (int tile = segment.begin; tile < segment.end; ++tile) {
    copy_async_wait<kAhead - 1>();
    sync_block();  // this tile has arrived, nobody needs the one before it, and the next addresses are there
    if (tile + kAhead < segment.end) copy_tile<Shape>(problem, tile + kAhead);
    copy_async_commit();
    const int64_t next_outer = own_key.find(tile + kAhead + 1);

    const int32_t first_key = segment.first_key + tile * Shape::kKeys;
    const bool is_masked = !all_see(problem, segment.request, first_key, Shape::kKeys);
    if (is_masked) {
      if (remove_non_finite<Shape>(shared.values(tile))) atomic_or(&scratch.has_non_finite, 1);
      sync_block();
    }
    if (has_rows) {
      Scores<Shape> scores;
      multiply_queries_keys<Shape>(scores, queries, shared.keys(tile));
      scale_scores<Shape>(scores, problem);
      if (is_masked) hide_keys<Shape>(scores, problem, segment, first_key);
      uint32_t weights[Shape::kWarpKeys / 8][2];
      state.add_weights(weights, scores);
      state.add_values(weights, shared.values(tile));
    }
    own_key.put(tile + kAhead + 1, next_outer);
  }
  copy_async_wait<0>();
  sync_block();  // the ring has run dry
  if (has_rows) state.store();
  sync_block();
  if (scratch.has_non_finite) {
    restore_non_finite<Shape>(problem, segment, shared.parts());
    sync_block();
  }
}

// Rows of q that no request owns: before the first bound, behind the last, and those of a request beyond max_nodes.
template <typename T>
PASS_EXT_DEVICE void write_rows_of_nobody(const AttentionProblem& problem) {
  const int64_t grid = grid_size().x, block = block_index().x;
  const auto clear_row = [&](int64_t row) {
    T* const out = static_cast<T*>(problem.out) + row * problem.heads * problem.head_dim;
    const int64_t elements = int64_t{problem.heads} * problem.head_dim;
    for (int64_t i = 8 * thread_rank(); i < elements; i += 8 * kAttentionThreads) store16(out + i, Bytes16{});
    for (int64_t i = thread_rank(); i < problem.heads; i += kAttentionThreads)
      problem.lse[row * problem.heads + i] = float_of(0xff800000u);
  };
  const int64_t begin = between(problem.cu_nodes[0], 0, problem.rows);
  const int64_t end = between(problem.cu_nodes[problem.requests], begin, problem.rows);
  for (int64_t row = block; row < begin; row += grid) clear_row(row);
  for (int64_t row = end + block; row < problem.rows; row += grid) clear_row(row);
  for (int64_t b = block; b < problem.requests; b += grid) {
    const AttentionRequest request = request_of(problem, b);
    const int64_t next = between(problem.cu_nodes[b + 1], 0, problem.rows);
    for (int64_t row = int64_t{request.first} + request.nodes; row < next; ++row) clear_row(row);
  }
}

// A variant for sm_90 and later whose tiles come by TMA and are multiplied by wgmma (64 rows a warpgroup) would replace
// `attend`, and be chosen where with_attention_shape chooses; schedule and merging stay.
template <typename Shape>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kAttentionThreads, Shape::kResidentBlocks)
    attention_kernel(PASS_EXT_PARAMETER AttentionProblem problem, SharedWork work) {
  PASS_EXT_SHARED(AttentionScratch, scratches, 1);
  AttentionScratch& scratch = scratches[0];
  constexpr SharedTiles<Shape> shared{};
  const Segment& segment = scratch.segment;
  const Shares& shares = scratch.shares;
  const int64_t work_of_all = count_work<Shape>(problem, scratch.schedule);
  if (thread_rank() == 0) scratch.shares = shares_of(work_of_all, grid_size().x);
  sync_block();
  const int64_t block = block_index().x;
  for (int64_t position = shares.begin(block); position < shares.begin(block + 1);) {
    find_request<Shape>(problem, scratch.schedule, position);
    if (thread_rank() == 0)
      scratch.segment = segment_at<Shape>(problem, scratch.schedule, position, shares.begin(block + 1));
    sync_block();
    attend<Shape>(problem, scratch);
    RowTotals* const totals = reinterpret_cast<RowTotals*>(shared.behind_parts());
    const auto warp_part = [&](int k) { return shared.parts() + k * Shape::kPart; };
    if (segment.is_whole()) {
      merge_into_result<Shape, Shape::kKeyWarps>(problem, segment, totals, Shape::kKeyWarps, warp_part);
    } else {
      float* const own = work.parts + (2 * block + (segment.begin == 0 ? 1 : 0)) * Shape::kPart;
      merge_into_part<Shape, Shape::kKeyWarps>(own, totals, segment.rows, Shape::kKeyWarps, warp_part);
      merge_shared_unit<Shape>(problem, segment, work, shares.block_of(segment.unit_begin),
                               shares.block_of(segment.unit_begin + segment.tiles - 1), block, totals, &scratch.ticket);
    }
    position = segment.unit_begin + segment.end;
    sync_block();  // shared memory is free again
  }
  write_rows_of_nobody<typename Shape::T>(problem);
}

template <typename Shape>
AttentionKernel* attention_kernel_of() {
  return attention_kernel<Shape>;
}

}  // namespace pass_ext::gpu
