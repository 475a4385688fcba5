// Attention on the GPU in bf16 and fp16. One persistent kernel, whatever the lengths are, streams tiles of K and V
// through shared memory and multiplies with matrix fragments. Tiles of keys and values in 8 bits become tiles of
// numbers there. Results of several blocks for the same rows are left to a second launch, attention_combine.cuh.
// Schedule: attention_schedule.cuh; tiles: attention_tile.cuh, attention_codes_tile.cuh; a warp's arithmetic:
// attention_warp.cuh; parts of results: attention_parts.cuh; fp32: attention_plain.cuh.
#pragma once

#include "core/attention.h"
#include "core/quantize.h"
#include "cuda/attention_codes.cuh"
#include "cuda/attention_codes_tile.cuh"
#include "cuda/attention_parts.cuh"
#include "cuda/attention_places.cuh"
#include "cuda/attention_schedule.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/attention_warp.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// Shared memory of a block besides tiles. Values that are the same for all threads lie here, because results and
// queries fill the registers.
struct AttentionScratch {
  ScheduleScratch schedule;
  int32_t has_non_finite;  // a masked tile of this segment had a value that is not finite
};

// Adds the non-finite values that masked tiles did without to the stored results of the rows that do see their keys.
// They go to the part of the warp that had the key, because a part that saw nothing counts nothing. Every masked tile
// is read once more, whatever is in it; rows are visited only if a column has a value that is not finite.
template <typename Shape>
PASS_EXT_DEVICE void restore_non_finite(const AttentionProblem& problem, CodeType codes, const Segment& segment) {
  using Stored = typename Shape::Stored;
  constexpr SharedTiles<Shape> shared{};
  uint64_t* const seen = reinterpret_cast<uint64_t*>(shared.behind_parts());            // [kRows]
  const Stored** const values = reinterpret_cast<const Stored**>(seen + Shape::kRows);  // [kKeys]; null: none
  const auto value = [&](int i, int column) -> float {
    const Stored* const from = values[i];
    if (from == nullptr) return 0.0f;
    if constexpr (Shape::kHasCodes)
      return scale_of_codes(from) * value_of_code(codes, from[kCodeHeader + column]);
    else
      return to_float(from[column]);
  };
#pragma unroll 1
  for (int tile = segment.begin; tile < segment.end; ++tile) {
    const int32_t first = segment.first_key + tile * Shape::kKeys;
    if (all_see<Shape::kHasChunks>(problem, segment.request, first, Shape::kKeys)) continue;
    const int thread = static_cast<int>(thread_rank());
    if (thread < segment.rows)
      seen[thread] = visible_keys<Shape::kHasChunks>(problem, segment.request,
                                                     (segment.first_row + thread) / problem.group, first);
    if (thread < Shape::kKeys)
      values[thread] =
          first + thread < segment.request.keys()
              ? key_row<Stored>(problem, segment.request, problem.v_cache, problem.v_new, first + thread, segment.head)
              : nullptr;
    sync_block();
#pragma unroll 1
    for (int column = thread; column < value_dim_of<Shape::kIsOneWidth>(problem); column += kAttentionThreads) {
      uint64_t non_finite = 0;  // keys whose value in this column is not finite
#pragma unroll(Shape::kHasCodes ? 2 : 8)
      for (int i = 0; i < Shape::kKeys; ++i) {
        const float number = value(i, column);
        if (!(number - number == 0.0f)) non_finite |= uint64_t{1} << i;
      }
      if (non_finite == 0) continue;
#pragma unroll 1
      for (int row = 0; row < segment.rows; ++row)
#pragma unroll 1
        for (uint64_t left = seen[row] & non_finite; left != 0; left &= left - 1) {
          const int i = lowest_bit(left);
          shared.parts()[i / Shape::kWarpKeys * Shape::kPart + row * Shape::kPartStride + column] += value(i, column);
        }
    }
    sync_block();  // seen is free again
  }
}

// Computes all tiles of a segment. True: the block's result is in its part. False: it is in shared memory, in
// Shape::kKeyWarps parts.
template <typename Shape>
PASS_EXT_DEVICE bool attend(const AttentionProblem& problem, CodeType codes, const SharedWork& work,
                            AttentionScratch& scratch) {
  const Segment& segment = scratch.schedule.segment;
  constexpr SharedTiles<Shape> shared{};
  constexpr int kAhead = Shape::kTilesAhead;
  const AddressedKey<Shape> address{problem, segment};
  const auto copy = [&](int tile) {
    if constexpr (Shape::kHasCodes)
      copy_codes<Shape>(problem, tile);
    else
      copy_tile<Shape>(problem, tile);
  };
  if (thread_rank() == 0) scratch.has_non_finite = 0;

  int64_t outer[kAhead + 1];
#pragma unroll
  for (int i = 0; i <= kAhead; ++i) outer[i] = address.find(segment.begin + i);
  Queries<Shape> queries;
  uint64_t first_word = 0;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    address.put(segment.begin + i, outer[i]);
    sync_block();
    if (segment.begin + i < segment.end) copy(segment.begin + i);
    if (i == 0) {  // behind the first keys, which take as long to come
      queries.load(problem, segment);
      first_word = load_first_word<Shape>(problem, segment);
    }
    copy_async_commit();
  }
  address.put(segment.begin + kAhead, outer[kAhead]);

  const bool has_rows = first_row_of_warp<Shape>() < segment.rows;
  RowState<Shape> state;
  state.clear();
#pragma unroll 1
  for (int tile = segment.begin; tile < segment.end; ++tile) {
    copy_async_wait<kAhead - 1>();
    sync_block();  // this tile has arrived, the one before it is free, and the next addresses are stored
    const int32_t first_key = segment.first_key + tile * Shape::kKeys;
    const bool is_masked = !all_see<Shape::kHasChunks>(problem, segment.request, first_key, Shape::kKeys);
    if constexpr (Shape::kHasCodes) {
      decode_codes<Shape>(problem, codes, tile, is_masked, &scratch.has_non_finite);
      sync_block();  // the numbers are there, and the place of their codes is free
    }
    if (tile + kAhead < segment.end) copy(tile + kAhead);
    copy_async_commit();
    const int64_t next_outer = address.find(tile + kAhead + 1);

    if (is_masked && !(Shape::kHasCodes && codes == CodeType::int8)) {  // codes of int8 are finite
      if (remove_non_finite<Shape>(shared.values(tile))) atomic_or(&scratch.has_non_finite, 1);
      sync_block();
    }
    if (has_rows) {
      Scores<Shape> scores;
      multiply_queries_keys<Shape>(scores, queries, shared.keys(tile));
      scale_scores<Shape>(scores, problem);
      if (is_masked) hide_keys<Shape>(scores, problem, segment, first_key, first_word);
      uint32_t weights[Shape::kWarpKeys / 8][2];
      state.add_weights(weights, scores);
      state.add_values(weights, shared.values(tile));
    }
    address.put(tile + kAhead + 1, next_outer);
  }
  copy_async_wait<0>();
  sync_block();  // the ring is empty
  const bool is_stored = Shape::kKeyWarps == 1 && !segment.is_whole() && !scratch.has_non_finite;
  if (has_rows) {
    if constexpr (Shape::kHasCodes) state.scale(1.0f / weight_unit(codes));
    state.store(is_stored ? part_of_segment<Shape>(work, segment)
                          : shared.parts() + warp_index() / Shape::kRowWarps * Shape::kPart);
  }
  if (is_stored) return true;
  sync_block();
  if (scratch.has_non_finite) restore_non_finite<Shape>(problem, codes, segment);
  return false;
}

// Writes the rows of q that no request owns: before the first bound, behind the last, and those of a request beyond
// max_nodes.
template <typename Shape>
PASS_EXT_DEVICE void write_unowned_rows(const AttentionProblem& problem) {
  using T = typename Shape::T;
  const int64_t grid = grid_size().x, block = block_index().x;
  const auto clear_row = [&](int64_t row) {
    T* const out = static_cast<T*>(problem.out) + row * problem.heads * value_dim_of<Shape::kIsOneWidth>(problem);
    const int64_t elements = int64_t{problem.heads} * value_dim_of<Shape::kIsOneWidth>(problem);
#pragma unroll 1
    for (int64_t i = 8 * thread_rank(); i < elements; i += 8 * kAttentionThreads) store16(out + i, Bytes16{});
#pragma unroll 1
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
// `attend`, and be chosen where with_attention_shape chooses; schedule and parts stay.
template <typename Shape>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kAttentionThreads, Shape::kResidentBlocks)
    attention_kernel(PASS_EXT_PARAMETER AttentionProblem problem, CodeType codes, SharedWork work) {
  begin_kernel(problem);
  PASS_EXT_SHARED(AttentionScratch, scratches, 1);
  AttentionScratch& scratch = scratches[0];
  const Segment& segment = scratch.schedule.segment;
  const int32_t most = Shape::kRowWarps == 1 ? 1 : work.most_in_step;
  RequestSteps first_steps;
  const Team team = join_team<Shape>(problem, scratch.schedule, most, work.multiprocessors, first_steps);
  if (thread_rank() == 0) work.rows[block_index().x] = 0;  // until note_shared_tile
  const int32_t share_end = team.in_step == 0 ? 0 : team.begin(team.index + 1);
#pragma unroll 1
  for (int32_t step = team.in_step == 0 ? 0 : team.begin(team.index); step < share_end;) {
    find_segment<Shape>(problem, scratch.schedule, team, first_steps, step, most);
    if (segment.rows > 0) {
      const bool is_stored = attend<Shape>(problem, codes, work, scratch), is_whole = segment.is_whole();
      if (!is_stored) merge_warps<Shape>(problem, segment, is_whole ? nullptr : part_of_segment<Shape>(work, segment));
      if (!is_whole && segment.begin == 0 && thread_rank() == 0) note_shared_tile(work, team, segment);
    }
    step = segment.unit_begin + segment.end;
    sync_block();  // shared memory is free again
  }
  write_unowned_rows<Shape>(problem);
}

template <typename Shape>
AttentionKernel* attention_kernel_of() {
  return attention_kernel<Shape>;
}

}  // namespace pass_ext::gpu
