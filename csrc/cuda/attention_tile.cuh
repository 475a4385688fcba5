// Tiles of K and V on their way through shared memory: sizes, a layout without bank conflicts, the addresses of rows
// that may lie anywhere, and copies that are under way while earlier tiles are computed with.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/attention.h"
#include "cuda/attention_schedule.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// Warps lie row_warps x kKeyWarps: each computes 16 rows and its share of every tile's keys. `dim` is head_dim, rounded
// up to one that has a kernel. Shared memory stays below the 99 KB that a block gets on every GPU from sm_80 on, and
// two blocks fit where there are 200 KB (sm_90, sm_100).
template <typename Element, int dim, int row_warps>
struct AttentionShape {
  using T = Element;
  static constexpr int kDim = dim;
  static constexpr int kRowWarps = row_warps;
  static constexpr int kKeyWarps = kAttentionWarps / row_warps;
  static constexpr int kRows = 16 * row_warps;
  static constexpr int kKeys = dim <= 128 ? 64 : 32;  // of a tile
  static constexpr int kWarpKeys = kKeys / kKeyWarps;
  static constexpr int kStages = dim <= 64 ? 4 : dim <= 128 ? 3 : 2;
  static constexpr int kChunks = dim / 8;                                   // of 16 bytes, in a row
  static constexpr int kRowThreads = dim <= 64 ? 8 : dim <= 128 ? 16 : 32;  // that copy a row: a chunk each, or none
  static constexpr int kRowsAtOnce = kAttentionThreads / kRowThreads;       // that a block copies
  static constexpr int kCopies = kKeys / kRowsAtOnce;                       // of a thread, for a tile of K or of V
  static constexpr bool kIsSwizzled = dim % 64 == 0;
  static constexpr bool kMayBeWider = dim == 96;               // than head_dim, which may be 80
  static constexpr int kStride = kIsSwizzled ? dim : dim + 8;  // of rows of a tile; unswizzled: an odd number of chunks
  static constexpr int kTile = kKeys * kStride;
  static constexpr bool kKeepsQueries = dim <= 128;  // in registers, which at 256 are full of results

  static constexpr int kRingBytes = kStages * 2 * kTile * static_cast<int>(sizeof(T));
  static constexpr int kQueryBytes = kKeepsQueries ? 0 : kRows * kStride * static_cast<int>(sizeof(T));
  static constexpr int kAddressBytes = 2 * 2 * kKeys * static_cast<int>(sizeof(T*));
  static constexpr int kSharedBytes = kRingBytes + kQueryBytes + kAddressBytes;
  static constexpr int kResidentBlocks = dim <= 64 ? 3 : 2;  // on one multiprocessor: what registers must allow

  // A part of a result: each row's sums, kDim floats, and behind them its totals (attention_parts.cuh).
  static constexpr int kPartStride = dim + 8;
  static constexpr int kPart = kRows * kPartStride;
  static_assert((kKeyWarps * kPart + 3 * kRows) * 4 <= kRingBytes + kQueryBytes, "parts take the ring's place");
};

// Where a 16-byte chunk of a row lies in a tile. Eight consecutive rows at one chunk, which is what load_matrices
// reads, lie in different banks.
template <typename Shape>
PASS_EXT_DEVICE unsigned chunk_offset(unsigned row, unsigned chunk) {
  return row * Shape::kStride + (Shape::kIsSwizzled ? chunk ^ (row & 7) : chunk) * 8;
}

// The dynamic shared memory of a block.
template <typename Shape>
struct SharedTiles {
  using T = typename Shape::T;

  PASS_EXT_DEVICE T* keys(int tile) const { return dynamic_shared<T>() + tile % Shape::kStages * 2 * Shape::kTile; }
  PASS_EXT_DEVICE T* values(int tile) const { return keys(tile) + Shape::kTile; }
  PASS_EXT_DEVICE T* queries() const { return dynamic_shared<T>() + Shape::kStages * 2 * Shape::kTile; }
  // Of the rows of a tile of K, then of V: null where there is nothing to read. Those that one thread copies stand side
  // by side, so that it loads two at a time: place_of_address.
  PASS_EXT_DEVICE const T** addresses(int tile) const {
    return reinterpret_cast<const T**>(dynamic_shared<char>() + Shape::kRingBytes + Shape::kQueryBytes) +
           tile % 2 * 2 * Shape::kKeys;
  }
  // Once the ring has run dry: the warps' parts of the result, and room for three floats a row.
  PASS_EXT_DEVICE float* parts() const { return dynamic_shared<float>(); }
  PASS_EXT_DEVICE float* behind_parts() const { return parts() + Shape::kKeyWarps * Shape::kPart; }
};

template <typename Shape>
PASS_EXT_DEVICE unsigned place_of_address(unsigned row) {
  return row % Shape::kRowsAtOnce * Shape::kCopies + row / Shape::kRowsAtOnce;
}

// What this thread contributes to the addresses of each tile: one key's row, of K or of V.
template <typename Shape>
struct AddressedKey {
  const AttentionProblem& problem;
  const Segment& segment;

  PASS_EXT_DEVICE bool takes_part() const { return thread_rank() < 2 * Shape::kKeys; }
  PASS_EXT_DEVICE int32_t key(int tile) const {
    return segment.first_key + tile * Shape::kKeys + static_cast<int32_t>(thread_rank() % Shape::kKeys);
  }

  // The look-up, to be started early. `tile` may lie behind the segment.
  PASS_EXT_DEVICE int64_t find(int tile) const {
    if (!takes_part() || tile >= segment.end || key(tile) >= segment.request.keys()) return 0;
    return outer_of(problem, segment.request, key(tile));
  }

  // What comes of it, into shared memory.
  PASS_EXT_DEVICE void put(int tile, int64_t outer) const {
    using T = typename Shape::T;
    if (!takes_part() || tile >= segment.end) return;
    const bool is_value = thread_rank() >= Shape::kKeys;
    const T* row = nullptr;
    if (key(tile) < segment.request.keys())
      row = row_in<T>(problem, segment.request, is_value ? problem.v_cache : problem.k_cache,
                      is_value ? problem.v_new : problem.k_new, outer, key(tile), segment.head);
    SharedTiles<Shape>{}.addresses(
        tile)[(is_value ? Shape::kKeys : 0) + place_of_address<Shape>(thread_rank() % Shape::kKeys)] = row;
  }
};

// Starts the copies of a tile of K and V; missing keys, and columns beyond head_dim, become zeros.
template <typename Shape>
PASS_EXT_DEVICE void copy_tile(const AttentionProblem& problem, int tile) {
  using T = typename Shape::T;
  constexpr SharedTiles<Shape> shared{};
  const unsigned chunk = thread_rank() % Shape::kRowThreads, first = thread_rank() / Shape::kRowThreads;
  if (chunk >= Shape::kChunks) return;
  const bool has_column = !Shape::kMayBeWider || static_cast<int32_t>(chunk) * 8 < problem.head_dim;
  // All addresses before the first copy: the compiler moves no load across a copy, and each would wait for its own.
  const T* from[2][Shape::kCopies];
#pragma unroll
  for (int which = 0; which < 2; ++which)
#pragma unroll
    for (int i = 0; i < Shape::kCopies; i += 2) {
      const Bytes16 pair = load16(shared.addresses(tile) + which * Shape::kKeys + first * Shape::kCopies + i);
      memcpy(&from[which][i], &pair, sizeof pair);
    }
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    T* const target = which == 0 ? shared.keys(tile) : shared.values(tile);
#pragma unroll
    for (int i = 0; i < Shape::kCopies; ++i) {
      const bool is_there = has_column && from[which][i] != nullptr;
      const void* const source = is_there ? static_cast<const void*>(from[which][i] + chunk * 8) : problem.q;  // any
      copy_async16(target + chunk_offset<Shape>(i * Shape::kRowsAtOnce + first, chunk), source, is_there);
    }
  }
}

// Whether a 16-bit float is infinite or NaN.
PASS_EXT_DEVICE bool is_finite(bfloat16 value) { return (value.bits & 0x7f80) != 0x7f80; }
PASS_EXT_DEVICE bool is_finite(float16 value) { return (value.bits & 0x7c00) != 0x7c00; }

// Makes the values of a tile finite, because a hidden key's weight of 0 times NaN would be NaN: what is not becomes 0.
// Whether there was any.
template <typename Shape>
PASS_EXT_DEVICE bool remove_non_finite(typename Shape::T* values) {
  using T = typename Shape::T;
  bool found = false;
#pragma unroll 1
  for (unsigned i = thread_rank(); i < Shape::kKeys * Shape::kChunks; i += kAttentionThreads) {
    T* const chunk = values + chunk_offset<Shape>(i / Shape::kChunks, i % Shape::kChunks);
    Bytes16 bytes = load16(chunk);
    bool is_clean = true;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int shift = k % 2 * 16;
      if (is_finite(T{static_cast<uint16_t>(bytes.word[k / 2] >> shift)})) continue;
      bytes.word[k / 2] &= ~(0xffffu << shift);
      is_clean = false;
    }
    if (!is_clean) store16(chunk, bytes);
    found |= !is_clean;
  }
  return found;
}

}  // namespace pass_ext::gpu
