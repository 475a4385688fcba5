// One warp's share of a tile: 16 rows times some of its keys. Scores by matrix fragments; the softmax of
// core/attention.h row by row as keys come; its weights rounded to T and multiplied by the values. Fragments: a lane
// holds elements (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of each 16 x 8 block of scores and results, g =
// lane / 4, t = lane % 4.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/attention.h"
#include "cuda/attention_codes_tile.cuh"
#include "cuda/attention_parts.cuh"
#include "cuda/attention_schedule.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

template <typename Shape>
PASS_EXT_DEVICE int first_row_of_warp() {
  return static_cast<int>(warp_index() % Shape::kRowWarps * 16);
}

template <typename Shape>
PASS_EXT_DEVICE unsigned first_key_of_warp() {
  return warp_index() / Shape::kRowWarps * Shape::kWarpKeys;
}

// The warp's 16 rows of q, as the left side of products.
template <typename Shape>
struct Queries {
  using T = typename Shape::T;
  static constexpr int kSteps = Shape::kKeyDim / 16;
  uint32_t registers[Shape::kKeepsQueries ? kSteps : 1][4];

  PASS_EXT_DEVICE void load(const AttentionProblem& problem, const Segment& segment) {
    const T* const q = static_cast<const T*>(problem.q);
    if constexpr (Shape::kKeepsQueries) {
      const int g = static_cast<int>(lane_index() / 4), t = static_cast<int>(lane_index() % 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row_of_warp<Shape>() + g + 8 * half;
        const bool is_there = row < segment.rows;
        const T* const from = q + (is_there ? row_offset(problem, segment, row) : 0) * problem.head_dim + 2 * t;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
          for (int k = 0; k < 2; ++k)
            registers[step][half + 2 * k] = is_there && 16 * step < problem.head_dim
                                                ? *reinterpret_cast<const uint32_t*>(from + 16 * step + 8 * k)
                                                : 0u;
      }
    } else {
      T* const tile = SharedTiles<Shape>{}.queries();
      for (int i = static_cast<int>(thread_rank()); i < Shape::kRows * Shape::kKeyChunks; i += kAttentionThreads) {
        const int row = i / Shape::kKeyChunks, chunk = i % Shape::kKeyChunks;
        const bool is_there = row < segment.rows;
        copy_async16(tile + chunk_offset<Shape, Shape::kKeyStride>(row, chunk),
                     is_there ? q + row_offset(problem, segment, row) * problem.head_dim + 8 * chunk : q, is_there);
      }
    }
  }

  PASS_EXT_DEVICE void get(int step, uint32_t (&fragment)[4]) const {
    if constexpr (Shape::kKeepsQueries) {
#pragma unroll
      for (int i = 0; i < 4; ++i) fragment[i] = registers[step][i];
    } else {
      const unsigned lane = lane_index(), row = first_row_of_warp<Shape>() + lane % 16;
      load_matrices<4>(
          fragment, SharedTiles<Shape>{}.queries() + chunk_offset<Shape, Shape::kKeyStride>(row, 2 * step + lane / 16));
    }
  }
};

// Scores of 16 rows and the warp's keys.
template <typename Shape>
using Scores = float[Shape::kWarpKeys / 8][4];

template <typename Shape>
PASS_EXT_DEVICE void multiply_queries_keys(Scores<Shape>& scores, const Queries<Shape>& queries,
                                           const typename Shape::T* keys) {
  using T = typename Shape::T;
  const unsigned lane = lane_index(), first = first_key_of_warp<Shape>();
#pragma unroll
  for (auto& block : scores)
#pragma unroll
    for (float& score : block) score = 0.0f;
  const TileChunks<Shape, Shape::kKeyStride> chunks(
      keys, first + (Shape::kWarpKeys == 8 ? 0 : lane / 16 * 8) + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int step = 0; step < Queries<Shape>::kSteps; ++step) {
    uint32_t q[4];
    queries.get(step, q);
    if constexpr (Shape::kWarpKeys == 8) {
      uint32_t k[2];
      load_matrices<2>(k, chunks.at(2 * step));
      multiply_m16n8k16<T>(scores[0], q, k);
    } else {
#pragma unroll
      for (int pair = 0; pair < Shape::kWarpKeys / 16; ++pair) {
        uint32_t k[4];
        load_matrices<4>(k, chunks.at(2 * step, 16 * pair));
        multiply_m16n8k16<T>(scores[2 * pair], q, {k[0], k[1]});
        multiply_m16n8k16<T>(scores[2 * pair + 1], q, {k[2], k[3]});
      }
    }
  }
}

// The factors of codes (decode_codes) of the two columns of a block of scores that a lane holds.
struct alignas(8) ColumnFactors {
  float of[2];
};

// `first`: the factor of the tile's first key.
template <typename Shape>
PASS_EXT_DEVICE ColumnFactors column_factors(const float* first, int block) {
  return *reinterpret_cast<const ColumnFactors*>(first + first_key_of_warp<Shape>() + 8 * block +
                                                 2 * (lane_index() % 4));
}

// Scales scores to logarithms of base 2.
template <typename Shape>
PASS_EXT_DEVICE void scale_scores(Scores<Shape>& scores, const AttentionProblem& problem) {
  const float scale = problem.softcap > 0.0f ? problem.scale : problem.scale * kLog2E;
#pragma unroll
  for (int block = 0; block < Shape::kWarpKeys / 8; ++block) {
    ColumnFactors factor{{scale, scale}};
    if constexpr (Shape::kHasCodes) factor = column_factors<Shape>(SharedCodes<Shape>{}.factors(), block);
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[block][i] *= factor.of[i % 2];
  }
  if (!(problem.softcap > 0.0f)) return;
  // Block by block the same code, while the blocks go round: two divisions for each score, written out, would be a
  // fifth of the kernel.
#pragma unroll 1
  for (int turn = 0; turn < Shape::kWarpKeys / 8; ++turn) {
    float capped[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) capped[i] = softcapped(scores[0][i], problem.softcap) * kLog2E;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int block = 1; block < Shape::kWarpKeys / 8; ++block) scores[block - 1][i] = scores[block][i];
      scores[Shape::kWarpKeys / 8 - 1][i] = capped[i];
    }
  }
}

// The row whose bits a lane reads: of the two rows that four lanes share, lane t reads row g + 8 (t % 2). Each lane
// then takes the bits of both rows from them.
template <typename Shape>
PASS_EXT_DEVICE int row_to_read() {
  const int lane = static_cast<int>(lane_index());
  return first_row_of_warp<Shape>() + lane / 4 + 8 * (lane % 2);
}

// Word 0 of that row's bits, which holds all bits of up to 64 nodes. It is loaded with q, long before the keys that it
// hides.
template <typename Shape>
PASS_EXT_DEVICE uint64_t load_first_word(const AttentionProblem& problem, const Segment& segment) {
  const int row = row_to_read<Shape>();
  if (row >= segment.rows) return 0;
  return visible_word(problem, segment.request, (segment.first_row + row) / problem.group, 0);
}

// Sets the scores of keys that their row does not see to -inf.
template <typename Shape>
PASS_EXT_DEVICE void hide_keys(Scores<Shape>& scores, const AttentionProblem& problem, const Segment& segment,
                               int32_t first_key, uint64_t first_word) {
  const int lane = static_cast<int>(lane_index()), row = row_to_read<Shape>();
  uint64_t row_bits = 0;
  if (row < segment.rows) {
    const int32_t node = (segment.first_row + row) / problem.group;
    row_bits = visible_keys<Shape::kHasChunks>(problem, segment.request, node, first_key, [&](int32_t i) {
      return i == 0 ? first_word : visible_word(problem, segment.request, node, i);
    });
  }
  const int shift = static_cast<int>(first_key_of_warp<Shape>()) + 2 * (lane % 4);
  const uint64_t seen[2] = {shuffle(row_bits, lane / 4 * 4) >> shift, shuffle(row_bits, lane / 4 * 4 + 1) >> shift};
#pragma unroll
  for (int block = 0; block < Shape::kWarpKeys / 8; ++block)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(seen[i / 2] >> (8 * block + i % 2) & 1)) scores[block][i] = float_of(0xff800000u);
}

// The sums of a warp's 16 rows so far. `rounded` adds the weights that multiplied values, and divides them in the end;
// `exact` adds them before rounding, for the lse. Of codes the rounding has no total of its own, and `exact` divides.
// Each lane has added its own columns only.
template <typename Shape>
struct RowState {
  struct alignas(8) Pair {  // one store
    float low, high;
  };

  float out[Shape::kValueDim / 8][4];
  float maximum[2], rounded[2], exact[2];

  PASS_EXT_DEVICE void clear() {
#pragma unroll
    for (auto& block : out)
#pragma unroll
      for (float& value : block) value = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum[half] = -kLargest;
      rounded[half] = exact[half] = 0.0f;
    }
  }

  // Turns scores into weights, packed in pairs: weights[block][half] of row g + 8 half. Scales all sums so far to the
  // new maximum. Weights of codes are packed times the factors of their values.
  PASS_EXT_DEVICE void add_weights(uint32_t (&weights)[Shape::kWarpKeys / 8][2], const Scores<Shape>& scores) {
    using T = typename Shape::T;
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = maximum[half];  // fmaxf ignores NaN; a score that is NaN still makes its row's sums NaN
#pragma unroll
      for (int block = 0; block < Shape::kWarpKeys / 8; ++block)
        highest = fmaxf(fmaxf(highest, scores[block][2 * half]), scores[block][2 * half + 1]);
      highest = fmaxf(highest, shuffle_xor(highest, 1));
      highest = fmaxf(highest, shuffle_xor(highest, 2));
      shrink[half] = exp2_approximate(maximum[half] - highest);
      maximum[half] = highest;
      rounded[half] *= shrink[half];  // of codes it stays 0
      exact[half] *= shrink[half];
    }
#pragma unroll
    for (int block = 0; block < Shape::kWarpKeys / 8; ++block) {
      ColumnFactors factor{};
      if constexpr (Shape::kHasCodes)
        factor = column_factors<Shape>(SharedCodes<Shape>{}.factors() + Shape::kKeys, block);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = exp2_approximate(scores[block][2 * half] - maximum[half]);
        const float high = exp2_approximate(scores[block][2 * half + 1] - maximum[half]);
        const uint32_t pair =
            Shape::kHasCodes ? pack2<T>(low * factor.of[0], high * factor.of[1]) : pack2<T>(low, high);
        weights[block][half] = pair;
        exact[half] += low + high;
        if constexpr (!Shape::kHasCodes) rounded[half] += unpack_low<T>(pair) + unpack_high<T>(pair);
      }
    }
    if (!any(shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
    for (auto& block : out)
#pragma unroll
      for (int i = 0; i < 4; ++i) block[i] *= shrink[i / 2];
  }

  PASS_EXT_DEVICE void add_values(const uint32_t (&weights)[Shape::kWarpKeys / 8][2], const typename Shape::T* values) {
    using T = typename Shape::T;
    const unsigned lane = lane_index(), first = first_key_of_warp<Shape>();
    if constexpr (Shape::kWarpKeys == 8) {  // half a product: the weights of the other eight keys are 0
      const uint32_t p[4] = {weights[0][0], weights[0][1], 0, 0};
      const TileChunks<Shape, Shape::kValueStride> chunks(values, first + lane % 8, lane / 8);
#pragma unroll
      for (int chunk = 0; chunk < Shape::kValueChunks; chunk += 4) {
        uint32_t v[4];
        load_matrices<4, true>(v, chunks.at(chunk));
#pragma unroll
        for (int i = 0; i < 4; ++i) multiply_m16n8k16<T>(out[chunk + i], p, {v[i], 0u});
      }
    } else {
      const TileChunks<Shape, Shape::kValueStride> chunks(values, first + lane % 16, lane / 16);
#pragma unroll
      for (int step = 0; step < Shape::kWarpKeys / 16; ++step) {
        const uint32_t p[4] = {weights[2 * step][0], weights[2 * step][1], weights[2 * step + 1][0],
                               weights[2 * step + 1][1]};
#pragma unroll
        for (int chunk = 0; chunk < Shape::kValueChunks; chunk += 2) {
          uint32_t v[4];
          load_matrices<4, true>(v, chunks.at(chunk, 16 * step));
          multiply_m16n8k16<T>(out[chunk], p, {v[0], v[1]});
          multiply_m16n8k16<T>(out[chunk + 1], p, {v[2], v[3]});
        }
      }
    }
  }

  PASS_EXT_DEVICE void scale(float factor) {
#pragma unroll
    for (auto& block : out)
#pragma unroll
      for (float& value : block) value *= factor;
  }

  // Stores the rows in a part of the segment's result, in shared or global memory.
  PASS_EXT_DEVICE void store(float* part) {
    const int g = static_cast<int>(lane_index() / 4), t = static_cast<int>(lane_index() % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const row = part + (first_row_of_warp<Shape>() + g + 8 * half) * Shape::kPartStride;
#pragma unroll
      for (int block = 0; block < Shape::kValueDim / 8; ++block)
        *reinterpret_cast<Pair*>(row + 8 * block + 2 * t) = {out[block][2 * half], out[block][2 * half + 1]};
      for (int step = 1; step < 4; step *= 2) {
        rounded[half] += shuffle_xor(rounded[half], step);
        exact[half] += shuffle_xor(exact[half], step);
      }
      if (t == 0)
        store_totals(row, Shape::kValueDim,
                     {maximum[half], Shape::kHasCodes ? exact[half] : rounded[half], exact[half]});
    }
  }
};

}  // namespace pass_ext::gpu
