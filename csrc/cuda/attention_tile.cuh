// Tiles of K and V on their way through shared memory: sizes, a layout without bank conflicts, the addresses of rows
// that may lie anywhere, and copies that run while earlier tiles are multiplied.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/attention.h"
#include "cuda/attention_schedule.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// The widths of keys and of values that have kernels although they differ.
constexpr int32_t kWideKeyDim = 192, kNarrowValueDim = 128;

// Warps lie row_warps x kKeyWarps: each computes 16 rows and its share of every tile's keys. The widths are those of
// the problem, rounded up to a size that has a kernel. Shared memory stays below the 99 KB that a block gets on every
// GPU from sm_80 on, and two blocks fit into 200 KB (sm_90, sm_100).
template <typename Element, int key_dim, int value_dim, int row_warps>
struct TileShape {
  using T = Element;
  using Stored = Element;  // what keys and values are in memory
  static constexpr bool kHasCodes = false;
  static constexpr int kKeyDim = key_dim, kValueDim = value_dim;
  static constexpr bool kIsOneWidth = key_dim == value_dim;
  static constexpr int kRowWarps = row_warps;
  static constexpr int kKeyWarps = kAttentionWarps / row_warps;
  static constexpr int kRows = 16 * row_warps;
  static constexpr int kKeys = key_dim <= 128 ? 64 : 32;  // keys of a tile
  static constexpr int kWarpKeys = kKeys / kKeyWarps;
  static constexpr int kStages = key_dim <= 64 || !kIsOneWidth ? 4 : key_dim <= 128 ? 3 : 2;
  static constexpr int kTilesAhead = kStages - 1;  // on their way while another is multiplied
  static constexpr int kKeyChunks = key_dim / 8, kValueChunks = value_dim / 8;  // chunks of 16 bytes in a row
  // Per row: each copies a chunk, or none; of two widths every eighth.
  static constexpr int kRowThreads = key_dim <= 64 || !kIsOneWidth ? 8 : key_dim <= 128 ? 16 : 32;
  static constexpr int kRowsAtOnce = kAttentionThreads / kRowThreads;  // rows that a block copies at once
  static constexpr int kCopies = kKeys / kRowsAtOnce;                  // rows per thread of a tile of K or of V
  static constexpr bool kIsSwizzled = kIsOneWidth && key_dim % 64 == 0;
  static constexpr bool kHasChunks = false;
  static constexpr bool kMayBeWider = key_dim == 96;  // wider than head_dim, which may be 80
  // Between rows; unswizzled: an odd number of chunks.
  static constexpr int kKeyStride = kIsSwizzled ? key_dim : key_dim + 8;
  static constexpr int kValueStride = kIsSwizzled ? value_dim : value_dim + 8;
  static constexpr int kKeyTile = kKeys * kKeyStride, kValueTile = kKeys * kValueStride;
  static constexpr int kTiles = kKeyTile + kValueTile;
  static constexpr bool kKeepsQueries = value_dim <= 128;  // in registers; at 256 results fill them

  static constexpr int kRingBytes = kStages * kTiles * static_cast<int>(sizeof(T));
  static constexpr int kQueryBytes = kKeepsQueries ? 0 : kRows * kKeyStride * static_cast<int>(sizeof(T));
  static constexpr int kAddressBytes = 2 * 2 * kKeys * static_cast<int>(sizeof(T*));
  static constexpr int kSharedBytes = kRingBytes + kQueryBytes + kAddressBytes;
  static constexpr int kResidentBlocks = key_dim <= 64 ? 3 : 2;  // on one multiprocessor: registers must allow so many

  // A part of a result: each row's sums, kValueDim floats, and behind them its totals (attention_parts.cuh).
  static constexpr int kPartStride = value_dim + 8;
  static constexpr int kPart = kRows * kPartStride;
  static constexpr int kBytesBehindParts = kRingBytes + kQueryBytes - kKeyWarps * kPart * 4;
  static_assert(kBytesBehindParts >= 8 * (kRows + kKeys),
                "parts, and eight bytes a row and key, take the ring's place");
  static_assert(!kIsSwizzled || (512 % (kKeyStride * sizeof(T)) == 0 && (kRowsAtOnce % 8 == 0 || kRowsAtOnce == 4)),
                "TileChunks: the ring's rows lie at multiples of their size");
  static_assert(kIsSwizzled || kRowsAtOnce % 8 == 0, "copy_tile flips nothing");
  static_assert(kIsOneWidth || (kKeyChunks % kRowThreads == 0 && kValueChunks % kRowThreads == 0),
                "copy_tile: threads copy equally much");
};

// Keys and values of one width.
template <typename Element, int dim, int row_warps>
struct AttentionShape : TileShape<Element, dim, dim, row_warps> {};

// Keys of kWideKeyDim and values of kNarrowValueDim numbers.
template <typename Element, int row_warps>
struct TwoWidthsShape : TileShape<Element, kWideKeyDim, kNarrowValueDim, row_warps> {};

// The width of values and results of the problem. With one width kernels read one field.
template <bool is_one_width>
PASS_EXT_DEVICE int32_t value_dim_of(const AttentionProblem& problem) {
  return is_one_width ? problem.head_dim : problem.value_dim;
}

// The same for problems with chunks (AttentionProblem::chunk), whose kernels others do without.
template <typename Element, int row_warps>
struct ChunkedShape : AttentionShape<Element, 128, row_warps> {
  static constexpr bool kHasChunks = true;
};

// The offset of a 16-byte chunk of a row in a tile. Eight consecutive rows at one chunk, which load_matrices reads
// together, lie in different banks. stride: Shape::kKeyStride or kValueStride.
template <typename Shape, int stride>
PASS_EXT_DEVICE unsigned chunk_offset(unsigned row, unsigned chunk) {
  return row * stride + (Shape::kIsSwizzled ? chunk ^ (row & 7) : chunk) * 8;
}

// The chunks of its row, 16 bytes each, that a lane reads or writes, and those of rows below it. A swizzled tile lies
// at a multiple of a row's size, so that a constant flips the bits of one address to that of another chunk.
template <typename Shape, int stride>
struct TileChunks {
  SharedAddress own;

  PASS_EXT_DEVICE TileChunks(const typename Shape::T* tile, unsigned row, unsigned chunk)
      : own(shared_address(tile + chunk_offset<Shape, stride>(row, chunk))) {}

  // Chunk `own` + `chunk`, which have no bit in common, `rows` below; of a swizzled tile a multiple of 8 below.
  PASS_EXT_DEVICE SharedAddress at(unsigned chunk, unsigned rows = 0) const {
    constexpr unsigned kRowBytes = stride * sizeof(typename Shape::T);
    return (Shape::kIsSwizzled ? own ^ chunk * 16 : own + chunk * 16) + rows * kRowBytes;
  }
};

// The dynamic shared memory of a block.
template <typename Shape>
struct SharedTiles {
  using T = typename Shape::T;

  PASS_EXT_DEVICE T* keys(int tile) const { return dynamic_shared<T>() + tile % Shape::kStages * Shape::kTiles; }
  PASS_EXT_DEVICE T* values(int tile) const { return keys(tile) + Shape::kKeyTile; }
  PASS_EXT_DEVICE T* queries() const { return dynamic_shared<T>() + Shape::kStages * Shape::kTiles; }
  // Addresses of the rows of a tile of K, then of V; null: there is nothing to read. Of numbers the addresses of one
  // thread's rows stand side by side, so that it loads two at a time: place_of_address.
  PASS_EXT_DEVICE const typename Shape::Stored** addresses(int tile) const {
    return reinterpret_cast<const typename Shape::Stored**>(dynamic_shared<char>() + Shape::kRingBytes +
                                                            Shape::kQueryBytes) +
           tile % 2 * 2 * Shape::kKeys;
  }
  // For use after the ring is empty: the warps' parts of the result, and kBytesBehindParts.
  PASS_EXT_DEVICE float* parts() const { return dynamic_shared<float>(); }
  PASS_EXT_DEVICE float* behind_parts() const { return parts() + Shape::kKeyWarps * Shape::kPart; }
};

template <typename Shape>
PASS_EXT_DEVICE unsigned place_of_address(unsigned row) {
  if constexpr (Shape::kHasCodes) return row;
  return row % Shape::kRowsAtOnce * Shape::kCopies + row / Shape::kRowsAtOnce;
}

// The key whose row address, in K or in V, this thread provides for each tile.
template <typename Shape>
struct AddressedKey {
  const AttentionProblem& problem;
  const Segment& segment;

  PASS_EXT_DEVICE bool takes_part() const { return thread_rank() < 2 * Shape::kKeys; }
  PASS_EXT_DEVICE int32_t key(int tile) const {
    return segment.first_key + tile * Shape::kKeys + static_cast<int32_t>(thread_rank() % Shape::kKeys);
  }

  // Reads the block table. Start it early: the address depends on it. `tile` may lie behind the segment.
  PASS_EXT_DEVICE int64_t find(int tile) const {
    if (!takes_part() || tile >= segment.end || key(tile) >= segment.request.keys()) return 0;
    return outer_of(problem, segment.request, key(tile));
  }

  // Stores the address in shared memory.
  PASS_EXT_DEVICE void put(int tile, int64_t outer) const {
    using Stored = typename Shape::Stored;
    if (!takes_part() || tile >= segment.end) return;
    const bool is_value = thread_rank() >= Shape::kKeys;
    const Stored* row = nullptr;
    if (key(tile) < segment.request.keys())
      row = row_in<Stored>(problem, segment.request, is_value ? problem.v_cache : problem.k_cache,
                           is_value ? problem.v_new : problem.k_new, outer, key(tile), segment.head);
    SharedTiles<Shape>{}.addresses(
        tile)[(is_value ? Shape::kKeys : 0) + place_of_address<Shape>(thread_rank() % Shape::kKeys)] = row;
  }
};

// Starts the copies of a thread's rows of K, or of V: chunks `chunk`, `chunk` + kRowThreads and so on of each.
template <typename Shape, int chunks, int stride>
PASS_EXT_DEVICE void copy_rows(typename Shape::T* tile, const typename Shape::T* const (&from)[Shape::kCopies],
                               unsigned first, unsigned chunk) {
  const TileChunks<Shape, stride> own(tile, first, chunk);
#pragma unroll
  for (int i = 0; i < Shape::kCopies; ++i)
#pragma unroll
    for (unsigned part = 0; part < chunks; part += Shape::kRowThreads)
      copy_async16(own.at(part, i * Shape::kRowsAtOnce), from[i] + (chunk + part) * 8, from[i] != nullptr);
}

// Starts the copies of a tile of K and V; missing keys, and columns beyond head_dim, become zeros.
template <typename Shape>
PASS_EXT_DEVICE void copy_tile(const AttentionProblem& problem, int tile) {
  using T = typename Shape::T;
  constexpr SharedTiles<Shape> shared{};
  const unsigned chunk = thread_rank() % Shape::kRowThreads, first = thread_rank() / Shape::kRowThreads;
  if (chunk >= Shape::kKeyChunks) return;
  const bool has_column = !Shape::kMayBeWider || static_cast<int32_t>(chunk) * 8 < problem.head_dim;
  // Loads all addresses before the first copy: the compiler moves no load across a copy, so each load would wait.
  const T* from[2][Shape::kCopies];
#pragma unroll
  for (int which = 0; which < 2; ++which)
#pragma unroll
    for (int i = 0; i < Shape::kCopies; i += 2) {
      const Bytes16 pair = load16(shared.addresses(tile) + which * Shape::kKeys + first * Shape::kCopies + i);
      memcpy(&from[which][i], &pair, sizeof pair);
    }
  if constexpr (!Shape::kIsOneWidth) {
    copy_rows<Shape, Shape::kKeyChunks, Shape::kKeyStride>(shared.keys(tile), from[0], first, chunk);
    copy_rows<Shape, Shape::kValueChunks, Shape::kValueStride>(shared.values(tile), from[1], first, chunk);
    return;
  }
  const TileChunks<Shape, Shape::kKeyStride> keys(shared.keys(tile), first, chunk);
#pragma unroll
  for (int which = 0; which < 2; ++which)
#pragma unroll
    for (int i = 0; i < Shape::kCopies; ++i) {
      constexpr unsigned kFlips = Shape::kRowsAtOnce % 8;  // 0 or 4: of every second row of the lane
      const unsigned rows = which * Shape::kKeys + i * Shape::kRowsAtOnce;
      copy_async16(keys.at(i % 2 * kFlips, rows), from[which][i] + chunk * 8, has_column && from[which][i] != nullptr);
    }
}

// True if a 16-bit float is neither infinite nor NaN.
PASS_EXT_DEVICE bool is_finite(bfloat16 value) { return (value.bits & 0x7f80) != 0x7f80; }
PASS_EXT_DEVICE bool is_finite(float16 value) { return (value.bits & 0x7c00) != 0x7c00; }

// Replaces values of a tile that are not finite by 0, because a hidden key's weight of 0 times NaN would be NaN.
// Returns true if this thread found any.
template <typename Shape>
PASS_EXT_DEVICE bool remove_non_finite(typename Shape::T* values) {
  using T = typename Shape::T;
  bool has_any = false;
#pragma unroll 1
  for (unsigned i = thread_rank(); i < Shape::kKeys * Shape::kValueChunks; i += kAttentionThreads) {
    T* const chunk =
        values + chunk_offset<Shape, Shape::kValueStride>(i / Shape::kValueChunks, i % Shape::kValueChunks);
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
    has_any |= !is_clean;
  }
  return has_any;
}

}  // namespace pass_ext::gpu
