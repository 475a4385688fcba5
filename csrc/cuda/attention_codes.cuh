// Attention on the GPU to keys and values in 8 bits (core/quantize.h), in bf16 and fp16. As cuda/attention.cuh, but
// what comes from memory are tiles of codes. A block turns each into a tile of numbers without their scales, which is
// exact in 16 bits, and multiplies that with the same fragments. The scale of a key multiplies its score, that of a
// value its weight:
//   out = sum of p (2^k scale) value of code / (2^k sum of p)
// where 2^k keeps the weights of values near the values' own size, so that fp16 holds them.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "core/quantize.h"
#include "cuda/attention.cuh"
#include "cuda/attention_codes_tile.cuh"
#include "cuda/attention_parts.cuh"
#include "cuda/attention_schedule.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/attention_warp.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// The factors of the two columns of a block of scores that a lane holds: of the warp's keys.
struct alignas(8) ColumnFactors {
  float of[2];
};

template <typename Shape>
PASS_EXT_DEVICE ColumnFactors column_factors(const float* factors, int block) {
  return *reinterpret_cast<const ColumnFactors*>(factors + first_key_of_warp<Shape>() + 8 * block +
                                                 2 * (lane_index() % 4));
}

// Scales sums of codes to logarithms of base 2.
template <typename Shape>
PASS_EXT_DEVICE void scale_coded_scores(Scores<Shape>& scores, const AttentionProblem& problem, const float* factors) {
#pragma unroll
  for (int block = 0; block < Shape::kWarpKeys / 8; ++block) {
    const ColumnFactors factor = column_factors<Shape>(factors, block);
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[block][i] *= factor.of[i % 2];
  }
  if (!(problem.softcap > 0.0f)) return;
#pragma unroll
  for (auto& block : scores)
#pragma unroll
    for (float& score : block) score = softcapped(score, problem.softcap) * kLog2E;
}

// RowState::add_weights for values that are codes: what is packed are weights times the factors of values. Their
// rounding has no total of its own, so `rounded` adds what `exact` does.
template <typename Shape>
PASS_EXT_DEVICE void add_coded_weights(RowState<Shape>& state, uint32_t (&weights)[Shape::kWarpKeys / 8][2],
                                       const Scores<Shape>& scores, const float* factors) {
  using T = typename Shape::T;
  float shrink[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float highest = state.maximum[half];  // fmaxf ignores NaN; a score that is NaN still makes its row's sums NaN
#pragma unroll
    for (int block = 0; block < Shape::kWarpKeys / 8; ++block)
      highest = fmaxf(fmaxf(highest, scores[block][2 * half]), scores[block][2 * half + 1]);
    highest = fmaxf(highest, shuffle_xor(highest, 1));
    highest = fmaxf(highest, shuffle_xor(highest, 2));
    shrink[half] = exp2_approximate(state.maximum[half] - highest);
    state.maximum[half] = highest;
    state.exact[half] *= shrink[half];
  }
#pragma unroll
  for (int block = 0; block < Shape::kWarpKeys / 8; ++block) {
    const ColumnFactors factor = column_factors<Shape>(factors, block);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float low = exp2_approximate(scores[block][2 * half] - state.maximum[half]);
      const float high = exp2_approximate(scores[block][2 * half + 1] - state.maximum[half]);
      weights[block][half] = pack2<T>(low * factor.of[0], high * factor.of[1]);
      state.exact[half] += low + high;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) state.rounded[half] = state.exact[half];
  if (!any(shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
  for (auto& block : state.out)
#pragma unroll
    for (int i = 0; i < 4; ++i) block[i] *= shrink[i / 2];
}

// Adds the values that are not finite, which masked tiles did without, to the stored results of the rows that do see
// their keys, as restore_non_finite does.
template <typename Shape>
PASS_EXT_DEVICE void restore_non_finite_codes(const AttentionProblem& problem, CodeType codes, const Segment& segment) {
  constexpr SharedTiles<Shape> shared{};
  uint64_t* const seen = reinterpret_cast<uint64_t*>(shared.behind_parts());  // [kRows]
  const auto value = [&](int32_t key, int column) -> float {
    const uint8_t* const row =
        key < segment.request.keys()
            ? key_row<uint8_t>(problem, segment.request, problem.v_cache, problem.v_new, key, segment.head)
            : nullptr;
    return row == nullptr ? 0.0f : scale_of_codes(row) * value_of_code(codes, row[kCodeHeader + column]);
  };
#pragma unroll 1
  for (int tile = segment.begin; tile < segment.end; ++tile) {
    const int32_t first = segment.first_key + tile * Shape::kKeys;
    if (all_see<Shape::kHasChunks>(problem, segment.request, first, Shape::kKeys)) continue;
    for (int row = static_cast<int>(thread_rank()); row < segment.rows; row += kAttentionThreads)
      seen[row] =
          visible_keys<Shape::kHasChunks>(problem, segment.request, (segment.first_row + row) / problem.group, first);
    sync_block();
#pragma unroll 1
    for (int column = static_cast<int>(thread_rank()); column < problem.head_dim; column += kAttentionThreads)
#pragma unroll 1
      for (int i = 0; i < Shape::kKeys; ++i) {
        const float number = value(first + i, column);
        if (number - number == 0.0f) continue;
#pragma unroll 1
        for (int row = 0; row < segment.rows; ++row)
          if (seen[row] >> i & 1)
            shared.parts()[i / Shape::kWarpKeys * Shape::kPart + row * Shape::kPartStride + column] += number;
      }
    sync_block();  // seen is free again
  }
}

// Computes all tiles of a segment, as `attend` does. True: the block's result is in its part. False: it is in shared
// memory, in Shape::kKeyWarps parts.
template <typename Shape>
PASS_EXT_DEVICE bool attend_to_codes(const AttentionProblem& problem, CodeType codes, const SharedWork& work,
                                     AttentionScratch& scratch) {
  const Segment& segment = scratch.schedule.segment;
  constexpr SharedTiles<Shape> shared{};
  constexpr int kAhead = Shape::kCodeStages;  // tiles of codes in flight while another is multiplied
  const AddressedCodes<Shape> address{problem, segment};
  const float* const factors = SharedCodes<Shape>{}.factors();
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
    if (segment.begin + i < segment.end) copy_codes<Shape>(problem, segment.begin + i);
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
    sync_block();  // this tile has arrived, the one before it is multiplied, and the next addresses are stored
    const int32_t first_key = segment.first_key + tile * Shape::kKeys;
    const bool is_masked = !all_see<Shape::kHasChunks>(problem, segment.request, first_key, Shape::kKeys);
    decode_codes<Shape>(problem, codes, tile, is_masked, &scratch.has_non_finite);
    sync_block();  // the numbers are there, and the place of their codes is free
    if (tile + kAhead < segment.end) copy_codes<Shape>(problem, tile + kAhead);
    copy_async_commit();
    const int64_t next_outer = address.find(tile + kAhead + 1);

    if (is_masked && codes != CodeType::int8) {  // codes of int8 are finite
      if (remove_non_finite<Shape>(shared.values(0))) atomic_or(&scratch.has_non_finite, 1);
      sync_block();
    }
    if (has_rows) {
      Scores<Shape> scores;
      multiply_queries_keys<Shape>(scores, queries, shared.keys(0));
      scale_coded_scores<Shape>(scores, problem, factors);
      if (is_masked) hide_keys<Shape>(scores, problem, segment, first_key, first_word);
      uint32_t weights[Shape::kWarpKeys / 8][2];
      add_coded_weights<Shape>(state, weights, scores, factors + Shape::kKeys);
      state.add_values(weights, shared.values(0));
    }
    address.put(tile + kAhead + 1, next_outer);
  }
  copy_async_wait<0>();
  sync_block();  // nothing is read any more
  const bool is_stored = Shape::kKeyWarps == 1 && !segment.is_whole() && !scratch.has_non_finite;
  if (has_rows) {
    const float unit = 1.0f / weight_unit(codes);
#pragma unroll
    for (auto& block : state.out)
#pragma unroll
      for (float& sum : block) sum *= unit;
    state.store(is_stored ? part_of_segment<Shape>(work, segment)
                          : shared.parts() + warp_index() / Shape::kRowWarps * Shape::kPart);
  }
  if (is_stored) return true;
  sync_block();
  if (scratch.has_non_finite) restore_non_finite_codes<Shape>(problem, codes, segment);
  return false;
}

template <typename Shape>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kAttentionThreads, Shape::kResidentBlocks)
    attention_codes_kernel(PASS_EXT_PARAMETER AttentionProblem problem, CodeType codes, SharedWork work) {
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
      const bool is_stored = attend_to_codes<Shape>(problem, codes, work, scratch), is_whole = segment.is_whole();
      if (!is_stored) merge_warps<Shape>(problem, segment, is_whole ? nullptr : part_of_segment<Shape>(work, segment));
      if (!is_whole && segment.begin == 0 && thread_rank() == 0) note_shared_tile(work, team, segment);
    }
    step = segment.unit_begin + segment.end;
    sync_block();  // shared memory is free again
  }
  write_unowned_rows<Shape>(problem);
}

template <typename Shape>
CodesKernel* codes_kernel_of() {
  return attention_codes_kernel<Shape>;
}

}  // namespace pass_ext::gpu
