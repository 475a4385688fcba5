// Tiles of K and V in 8 bits (core/quantize.h) on their way through shared memory: copies of codes, which run while
// earlier tiles are multiplied, and the tile of numbers that a tile of codes becomes: values of codes without their
// scales, which 16 bits hold exactly, in the layout of attention_tile.cuh. The scale of a key multiplies its score,
// that of a value its weight:
//   out = sum of p (2^k scale) value of code / (2^k sum of p)
// where 2^k keeps the weights of values near the values' own size, so that fp16 holds them.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "core/quantize.h"
#include "cuda/attention_codes.cuh"
#include "cuda/attention_schedule.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// Shared memory: one tile of numbers, queries, addresses, and behind them a ring of tiles of codes.
template <typename Numbers>
struct CodesShape : Numbers {
  using T = typename Numbers::T;
  using Stored = uint8_t;
  static constexpr bool kHasCodes = true;
  static constexpr int kStages = 1;  // tiles of numbers
  static constexpr int kCodeStages = Numbers::kKeyDim <= 128 ? 3 : 2;
  static constexpr int kTilesAhead = kCodeStages;
  static constexpr int kCodeChunks = Numbers::kKeyDim / 16;                             // chunks of 16 codes in a row
  static constexpr int kCodeCopies = Numbers::kKeys * kCodeChunks / kAttentionThreads;  // of a thread, for K or for V
  static constexpr int kTileCodes = Numbers::kKeys * Numbers::kKeyDim;

  static constexpr int kRingBytes = Numbers::kTiles * static_cast<int>(sizeof(T));
  static constexpr int kCodesAt = kRingBytes + Numbers::kQueryBytes + Numbers::kAddressBytes;
  static constexpr int kScalesAt = kCodesAt + kCodeStages * 2 * kTileCodes;
  static constexpr int kFactorsAt = kScalesAt + kCodeStages * 2 * Numbers::kKeys * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = kFactorsAt + 2 * Numbers::kKeys * static_cast<int>(sizeof(float));
  static_assert(Numbers::kIsOneWidth, "K and V have tiles of one layout");
  static_assert(kSharedBytes >= Numbers::kKeyWarps * Numbers::kPart * 4 + 8 * (Numbers::kRows + Numbers::kKeys),
                "parts, and eight bytes a row and key, fit in front");
  static_assert(kSharedBytes <= 99 * 1024 - 1024, "every GPU from sm_80 on has so much, and 1 KB besides");
  static_assert(2 * Numbers::kKeys <= kAttentionThreads, "a thread has one address and one scale");
  static_assert(Numbers::kKeys * kCodeChunks % kAttentionThreads == 0, "threads copy equally much");
};

// The parts of shared memory that shapes of codes add to SharedTiles.
template <typename Shape>
struct SharedCodes {
  PASS_EXT_DEVICE uint8_t* codes(int tile) const {  // of K, then of V, row by row
    return dynamic_shared<uint8_t>() + Shape::kCodesAt + tile % Shape::kCodeStages * 2 * Shape::kTileCodes;
  }
  PASS_EXT_DEVICE float* scales(int tile) const {  // as they come: of K, then of V
    return reinterpret_cast<float*>(dynamic_shared<uint8_t>() + Shape::kScalesAt) +
           tile % Shape::kCodeStages * 2 * Shape::kKeys;
  }
  PASS_EXT_DEVICE float* factors() const {  // of scores, then of weights; of the tile of numbers
    return reinterpret_cast<float*>(dynamic_shared<uint8_t>() + Shape::kFactorsAt);
  }
};

// Starts the copies of a tile of K and V and of their scales; missing keys, and columns beyond head_dim, become zeros.
template <typename Shape>
PASS_EXT_DEVICE void copy_codes(const AttentionProblem& problem, int tile) {
  constexpr SharedCodes<Shape> shared{};
  const uint8_t* const* const addresses = SharedTiles<Shape>{}.addresses(tile);
  const int thread = static_cast<int>(thread_rank());
  // Loads all addresses before the first copy: the compiler moves no load across a copy, so each load would wait.
  const uint8_t* from[2][Shape::kCodeCopies];
#pragma unroll
  for (int which = 0; which < 2; ++which)
#pragma unroll
    for (int i = 0; i < Shape::kCodeCopies; ++i)
      from[which][i] = addresses[which * Shape::kKeys + (thread + i * kAttentionThreads) / Shape::kCodeChunks];
  const uint8_t* const row = thread < 2 * Shape::kKeys ? addresses[thread] : nullptr;
  uint8_t* const to = shared.codes(tile);
#pragma unroll
  for (int which = 0; which < 2; ++which)
#pragma unroll
    for (int i = 0; i < Shape::kCodeCopies; ++i) {
      const int place = thread + i * kAttentionThreads, column = place % Shape::kCodeChunks * 16;
      const bool is_there = from[which][i] != nullptr && (!Shape::kMayBeWider || column < problem.head_dim);
      copy_async16(to + which * Shape::kTileCodes + place * 16,
                   is_there ? from[which][i] + kCodeHeader + column : static_cast<const uint8_t*>(problem.k_cache.data),
                   is_there);
    }
  if (thread < 2 * Shape::kKeys)
    copy_async4(shared.scales(tile) + thread, row != nullptr ? row : static_cast<const uint8_t*>(problem.k_cache.data),
                row != nullptr);
}

// Turns one tile of codes, of K or of V, into a tile of numbers.
template <typename Shape, CodeType type>
PASS_EXT_DEVICE void decode_tile_of(typename Shape::T* to, const uint8_t* codes) {
  using T = typename Shape::T;
#pragma unroll 1
  for (int i = 0; i < Shape::kCodeCopies; ++i) {
    const unsigned place = thread_rank() + i * kAttentionThreads;
    const unsigned row = place / Shape::kCodeChunks, chunk = place % Shape::kCodeChunks;
    const unsigned first = first_half_of(chunk);
    Bytes16 halves[2];
    numbers_of_codes<T, type>(halves, in_order(load16(codes + place * 16), first));
#pragma unroll
    for (unsigned turn = 0; turn < 2; ++turn)
      store16(to + chunk_offset<Shape, Shape::kKeyStride>(row, 2 * chunk + (turn ^ first)), halves[turn]);
  }
}

// Turns a tile of codes that has arrived into numbers and factors. A masked tile's scales of values that are not finite
// become 0, because a hidden key's weight of 0 times NaN would be NaN; then `has_non_finite` is set.
template <typename Shape>
PASS_EXT_DEVICE void decode_codes(const AttentionProblem& problem, CodeType codes, int tile, bool is_masked,
                                  int32_t* has_non_finite) {
  constexpr SharedTiles<Shape> numbers{};
  constexpr SharedCodes<Shape> shared{};
  const int thread = static_cast<int>(thread_rank());
  if (thread < 2 * Shape::kKeys) {
    const bool is_value = thread >= Shape::kKeys;
    const float scale = shared.scales(tile)[thread];
    float factor = scale * (is_value                 ? weight_unit(codes)
                            : problem.softcap > 0.0f ? problem.scale
                                                     : problem.scale * kLog2E);
    if (is_value && is_masked && !(scale - scale == 0.0f)) {
      factor = 0.0f;
      atomic_or(has_non_finite, 1);
    }
    shared.factors()[thread] = factor;
  }
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    typename Shape::T* const to = which == 0 ? numbers.keys(0) : numbers.values(0);
    const uint8_t* const from = shared.codes(tile) + which * Shape::kTileCodes;
    if (codes == CodeType::int8)
      decode_tile_of<Shape, CodeType::int8>(to, from);
    else if (codes == CodeType::float8_e4m3)
      decode_tile_of<Shape, CodeType::float8_e4m3>(to, from);
    else
      decode_tile_of<Shape, CodeType::float8_e5m2>(to, from);
  }
}

}  // namespace pass_ext::gpu
