// The sums of linear layers for few rows on the GPU: 16 outputs times 8 or 16 rows, 32 numbers along `in` at a time.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/scalar.h"
#include "cuda/numbers.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kLinearThreads = 256;
constexpr int kLinearWarps = kLinearThreads / 32;
constexpr int kTileOutputs = 16;
constexpr int kHalfTile = kTileOutputs / 2;
constexpr int kUnit = 4 * kNumbers;           // numbers along `in` that a warp multiplies at once
constexpr int kSumStride = kTileOutputs + 4;  // of sums in shared memory: the lanes of a warp write to different banks

// fp32 needs the registers of a multiprocessor for one block.
template <typename T>
constexpr bool kIsFloat32 = sizeof(T) == sizeof(float);

// ---- eight numbers as they lie in memory ----

template <typename T>
struct Eight {
  Bytes16 part[sizeof(T) / 2];
};

PASS_EXT_DEVICE uint32_t raw_bits(bfloat16 value) { return value.bits; }
PASS_EXT_DEVICE uint32_t raw_bits(float16 value) { return value.bits; }
PASS_EXT_DEVICE uint32_t raw_bits(float value) { return bits_of(value); }

// Numbers behind `count` are 0. `streams`: the launch only reads them, and once.
template <bool wide, bool streams, typename T>
PASS_EXT_DEVICE Eight<T> load_eight(const T* from, int64_t count) {
  constexpr int kInPart = 16 / sizeof(T), kInWord = 4 / sizeof(T);
  Eight<T> eight{};
  if (count <= 0) return eight;
#pragma unroll
  for (int p = 0; p < kNumbers / kInPart; ++p) {
    if constexpr (wide) {
      eight.part[p] = streams ? load16_streaming(from + p * kInPart) : load16(from + p * kInPart);
    } else {
#pragma unroll
      for (int i = 0; i < kInPart; ++i)
        if (p * kInPart + i < count)
          eight.part[p].word[i / kInWord] |= raw_bits(from[p * kInPart + i]) << i % kInWord * 16;
    }
  }
  return eight;
}

template <typename T>
PASS_EXT_DEVICE float number_of(const Eight<T>& eight, int i) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return float_of(eight.part[i / 4].word[i % 4]);
  } else {
    const uint32_t pair = eight.part[0].word[i / 2];
    return i % 2 == 0 ? unpack_low<T>(pair) : unpack_high<T>(pair);
  }
}

// ---- a warp's sums: 16 outputs times the rows of the block ----

// 16-bit floats, by the matrix unit. A lane gives, for the rows of x as for the outputs, numbers 8 t to 8 t + 7 of a
// unit, t = lane % 4; which of them the unit takes for which of its own does not matter, as both sides agree.
template <typename T, int row_tiles>
struct TileSums {
  static constexpr int kLoads = row_tiles;  // rows of x that a lane reads
  float sum[row_tiles][4] = {};

  static PASS_EXT_DEVICE int row_of_load(int load) { return 8 * load + static_cast<int>(lane_index()) / 4; }

  PASS_EXT_DEVICE void add(int load, const Eight<T> (&weight)[2], const Eight<T>& x) {
#pragma unroll
    for (int word = 0; word < 4; word += 2) {
      const uint32_t a[4] = {weight[0].part[0].word[word], weight[1].part[0].word[word],
                             weight[0].part[0].word[word + 1], weight[1].part[0].word[word + 1]};
      const uint32_t b[2] = {x.part[0].word[word], x.part[0].word[word + 1]};
      multiply_m16n8k16<T>(sum[load], a, b);
    }
  }

  PASS_EXT_DEVICE void store(float* to) const {
    const int g = static_cast<int>(lane_index()) / 4, t = static_cast<int>(lane_index()) % 4;
#pragma unroll
    for (int tile = 0; tile < row_tiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) to[(8 * tile + 2 * t + i % 2) * kSumStride + g + i / 2 * kHalfTile] = sum[tile][i];
  }
};

// fp32, exact products: a lane adds up its numbers of two outputs for all rows.
template <int row_tiles>
struct TileSums<float, row_tiles> {
  static constexpr int kLoads = 8 * row_tiles;
  float sum[kLoads][2] = {};

  static PASS_EXT_DEVICE int row_of_load(int load) { return load; }

  PASS_EXT_DEVICE void add(int load, const Eight<float> (&weight)[2], const Eight<float>& x) {
#pragma unroll
    for (int which = 0; which < 2; ++which)
#pragma unroll
      for (int i = 0; i < kNumbers; ++i)
        sum[load][which] = fused(number_of(weight[which], i), number_of(x, i), sum[load][which]);
  }

  PASS_EXT_DEVICE void store(float* to) const {
    const int g = static_cast<int>(lane_index()) / 4, t = static_cast<int>(lane_index()) % 4;
#pragma unroll
    for (int row = 0; row < kLoads; ++row)
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        float total = sum[row][which];
        total += shuffle_xor(total, 1);
        total += shuffle_xor(total, 2);
        if (row % 4 == t) to[row * kSumStride + g + which * kHalfTile] = total;
      }
  }
};

// The sum of the warps' numbers, in their order, `apart` numbers apart.
template <int apart>
PASS_EXT_DEVICE float total_of_warps(const float* sums) {
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kLinearWarps; ++warp) total += sums[warp * apart];
  return total;
}

// Bytes of the warps' sums of a block; a multiple of 128.
PASS_EXT_HOST_DEVICE constexpr int64_t sum_bytes(int64_t rows, int weights) {
  return kLinearWarps * weights * rows * kSumStride * int64_t{sizeof(float)};
}

}  // namespace pass_ext::gpu
