// Attention by the heads of a group: shapes, and slices of keys and values on their way through shared memory. A warp
// copies its own slices, of 32 keys at a time. Codes of 8 bits (core/quantize.h) become numbers where they are
// multiplied: of its two tiles a warp then has one for numbers, and two tiles of codes, with the scales of their rows,
// in the place of the other.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "core/attention_lists.h"
#include "core/quantize.h"
#include "cuda/attention_codes.cuh"
#include "cuda/attention_parts.cuh"
#include "cuda/attention_places.cuh"
#include "cuda/attention_tasks.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = 32 * kGroupWarps;
constexpr int kGroupKeys = 32;  // of a tile: a key to a lane

constexpr int32_t kGroupUnit = 2;  // of shares: to add one up costs as much as to read 256 keys

// What a block computes at a time: rows of its tile are heads of one row of q.
struct GroupItem {
  PlacedRow row;
  int32_t head;  // the first
  int count;     // of heads
};

// Widths, and the rows of a block, which are heads. A warp has a slice of every key and of every value: an equal part
// of the numbers that both have, and of those that keys have besides. StoredElement: of keys and values in memory,
// uint8_t for codes.
template <typename Element, int key_dim, int value_dim, int row_tiles, typename StoredElement = Element>
struct GroupShape {
  using T = Element;
  using Stored = StoredElement;
  static constexpr bool kHasCodes = sizeof(Stored) == 1;
  static constexpr int kKeyDim = key_dim, kValueDim = value_dim;
  static constexpr int kRowTiles = row_tiles, kRows = 16 * row_tiles;
  static constexpr int kKeyChunks = key_dim / 8 / kGroupWarps;      // of 16 bytes, of a slice of a key
  static constexpr int kValueChunks = value_dim / 8 / kGroupWarps;  // of a value; the first ones of a key
  static constexpr int kSteps = kKeyChunks / 2;                     // products for a score
  static constexpr int kStride = 8 * (kKeyChunks + 1);              // odd chunks: rows at one chunk in different banks
  static constexpr int kTile = kGroupKeys * kStride;                // a warp's slices of a tile
  static constexpr int kPartStride = value_dim + 4;                 // a row's sums, and its RowTotals
  static constexpr int kUnit = 16 / static_cast<int>(sizeof(Stored));  // numbers of 16 bytes as they come
  static constexpr int kKeyUnits = key_dim / kUnit / kGroupWarps, kValueUnits = value_dim / kUnit / kGroupWarps;
  static constexpr int kArrivalStride = kHasCodes ? 16 * kKeyUnits : 2 * kStride;  // bytes of a slice as it comes
  static constexpr int kArrivalTile = kGroupKeys * kArrivalStride;
  static_assert(key_dim % (16 * kGroupWarps) == 0 && value_dim % (16 * kGroupWarps) == 0 && value_dim <= key_dim,
                "slices are whole fragments");
  static_assert(!kHasCodes || 2 * kArrivalTile + 4 * kGroupKeys * 4 <= 2 * kTile, "two tiles of codes, and scales");

  // The block's memory behind the tiles, of which each warp has two.
  struct Scratch {
    float scores[kGroupWarps][kRows][kGroupKeys + 4];  // the slices' parts of them
    alignas(16) T weights[kRows][kGroupKeys + 8];
    float shrink[kRows];                                 // of the sums of a share, at a tile
    RowTotals sums[kRows];                               // of all shares
    float weight_before[kRows], weight_of_share[kRows];  // of their sums, and of those of one more
    Task task;
    GroupItem item;  // here, and not in registers, which sums and queries fill
  };
  static constexpr int kTilesBytes = kGroupWarps * 2 * kTile * static_cast<int>(sizeof(T));
  static constexpr int kSharedBytes = kTilesBytes + static_cast<int>(sizeof(Scratch));
  static constexpr int kResidentBlocks = value_dim <= 128 ? 4 : value_dim <= 256 ? 3 : 2;  // as registers allow
  static_assert(kSharedBytes <= 99 * 1024, "every GPU from sm_80 on has so much");
};

struct GroupAttention {
  AttentionProblem problem;
  KeyLists lists;
  bool has_latents;  // values are the first numbers of the keys, in the same memory
  CodeType codes;
  AttentionTasks tasks;
  float* parts;        // [most_parts, heads, kPartStride]
  float* sums_before;  // [blocks, kRows * kValueDim]: each block's, of the shares before, as its threads have them
};

using GroupKernel = void(GroupAttention);

// Defined where the kernels are compiled: attention_group.cuh, in one of the attention_group_*.cu.
template <typename Shape>
GroupKernel* group_kernel_of();

template <typename Shape>
PASS_EXT_DEVICE typename Shape::Scratch& group_scratch() {
  return *reinterpret_cast<typename Shape::Scratch*>(dynamic_shared<unsigned char>() + Shape::kTilesBytes);
}

// One of the warp's two tiles: its slices of kGroupKeys keys or values.
template <typename Shape>
PASS_EXT_DEVICE typename Shape::T* slices_of_warp(int which) {
  return dynamic_shared<typename Shape::T>() + (2 * static_cast<int>(warp_index()) + which) * Shape::kTile;
}

// Where the copies of one of two tiles go.
template <typename Shape>
PASS_EXT_DEVICE unsigned char* arrivals_of_warp(int which) {
  if constexpr (Shape::kHasCodes)
    return reinterpret_cast<unsigned char*>(slices_of_warp<Shape>(1)) + which * Shape::kArrivalTile;
  else
    return reinterpret_cast<unsigned char*>(slices_of_warp<Shape>(which));
}

// The scales of a tile's keys, or of its values; the first warp copies them. `turn`: tiles take turns.
template <typename Shape>
PASS_EXT_DEVICE float* scales_of_tile(int turn, bool are_values) {
  unsigned char* const first = dynamic_shared<unsigned char>() + 2 * Shape::kTile + 2 * Shape::kArrivalTile;
  return reinterpret_cast<float*>(first) + (2 * turn + (are_values ? 1 : 0)) * kGroupKeys;
}

// The column of a key at which a chunk of the warp's slice begins, of so many numbers.
template <typename Shape, int numbers = 8>
PASS_EXT_DEVICE int column_of_chunk(int chunk) {
  constexpr int kValueChunks = Shape::kValueDim / numbers / kGroupWarps;
  constexpr int kOwnChunks = Shape::kKeyDim / numbers / kGroupWarps - kValueChunks;  // that values do not have
  const int warp = static_cast<int>(warp_index());
  return chunk < kValueChunks ? numbers * (warp * kValueChunks + chunk)
                              : Shape::kValueDim + numbers * (warp * kOwnChunks + chunk - kValueChunks);
}

// The key of a lane, of the 32 of a tile.
struct PlacedKey {
  int32_t key;  // -1: none
  int32_t outer;
};

PASS_EXT_DEVICE PlacedKey placed_key(const GroupAttention& group, const PlacedRow& row, int32_t place, int32_t end) {
  if (place >= end) return {-1, 0};
  const int32_t key = key_at(group.problem, row.request, group.lists, row.node, place);
  return {key, key < 0 ? 0 : static_cast<int32_t>(outer_of(group.problem, row.request, key))};
}

// The units of 16 bytes of a tile that a lane copies, of units `first_unit` to behind `first_unit` + `units`: always
// the same of several keys.
template <typename Shape, int first_unit, int units>
struct LaneUnits {
  static_assert(32 % units == 0, "a lane has the same unit of several keys");
  static constexpr int kAtOnce = 32 / units;  // keys
  int key = static_cast<int>(lane_index()) / units, unit = first_unit + static_cast<int>(lane_index()) % units;
};

// Starts the copies of some units of the warp's slice of a tile. `from`: of each lane's key, its row; 0: zeros.
template <typename Shape, int first_unit, int units>
PASS_EXT_DEVICE void copy_units(int which, uint64_t from) {
  const LaneUnits<Shape, first_unit, units> own;
  const int column = column_of_chunk<Shape, Shape::kUnit>(own.unit) + (Shape::kHasCodes ? kCodeHeader : 0);
  const SharedAddress to =
      shared_address(arrivals_of_warp<Shape>(which) + own.key * Shape::kArrivalStride + 16 * own.unit);
#pragma unroll
  for (int i = 0; i < kGroupKeys; i += own.kAtOnce) {
    const auto* const row = reinterpret_cast<const typename Shape::Stored*>(shuffle(from, own.key + i));
    copy_async16(to + i * Shape::kArrivalStride, row + column, row != nullptr);
  }
}

template <typename Shape>
PASS_EXT_DEVICE void copy_scales(int turn, bool are_values, uint64_t from) {
  if (warp_index() == 0)
    copy_async4(scales_of_tile<Shape>(turn, are_values) + lane_index(), reinterpret_cast<const void*>(from), from != 0);
}

// The row of a lane's key, of `cache` or `fresh`; 0: none.
template <typename Shape>
PASS_EXT_DEVICE uint64_t row_of_key(const GroupAttention& group, const PlacedRow& row, const PlacedKey& placed,
                                    const KeyRows& cache, const KeyRows& fresh) {
  if (placed.key < 0) return 0;
  return reinterpret_cast<uint64_t>(
      row_in<typename Shape::Stored>(group.problem, row.request, cache, fresh, placed.outer, placed.key, row.head));
}

template <typename Shape>
PASS_EXT_DEVICE void copy_keys(const GroupAttention& group, const PlacedRow& row, const PlacedKey& placed, int which,
                               int turn) {
  const uint64_t from = row_of_key<Shape>(group, row, placed, group.problem.k_cache, group.problem.k_new);
  copy_units<Shape, 0, Shape::kValueUnits>(which, from);
  if constexpr (Shape::kKeyUnits > Shape::kValueUnits)
    copy_units<Shape, Shape::kValueUnits, Shape::kKeyUnits - Shape::kValueUnits>(which, from);
  if constexpr (Shape::kHasCodes) copy_scales<Shape>(turn, false, from);
}

template <typename Shape>
PASS_EXT_DEVICE void copy_values(const GroupAttention& group, const PlacedRow& row, const PlacedKey& placed, int which,
                                 int turn) {
  const uint64_t from = row_of_key<Shape>(group, row, placed, group.problem.v_cache, group.problem.v_new);
  copy_units<Shape, 0, Shape::kValueUnits>(which, from);
  if constexpr (Shape::kHasCodes) copy_scales<Shape>(turn, true, from);
}

// Turns the codes of a tile that has arrived into numbers. A turn takes a unit from each lane, in the order in which
// they were copied: first those that values have too.
template <typename Shape, CodeType type>
PASS_EXT_DEVICE void decode_tile(int which, bool are_keys) {
  constexpr int kOwnUnits = Shape::kKeyUnits - Shape::kValueUnits;
  const LaneUnits<Shape, 0, Shape::kValueUnits> both;
  const LaneUnits<Shape, Shape::kValueUnits, kOwnUnits == 0 ? 1 : kOwnUnits> own;
  const int turns = are_keys ? Shape::kKeyUnits : Shape::kValueUnits;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    const bool is_own = kOwnUnits > 0 && turn >= Shape::kValueUnits;
    const int key = is_own ? own.key + (turn - Shape::kValueUnits) * own.kAtOnce : both.key + turn * both.kAtOnce;
    const int unit = is_own ? own.unit : both.unit;
    const unsigned first = first_half_of(unit);
    Bytes16 numbers[2];
    numbers_of_codes<typename Shape::T, type>(
        numbers, in_order(load16(arrivals_of_warp<Shape>(which) + key * Shape::kArrivalStride + 16 * unit), first));
    typename Shape::T* const to = slices_of_warp<Shape>(0) + key * Shape::kStride + 16 * unit;
    store16(to + 8 * first, numbers[0]);
    store16(to + 8 * (first ^ 1), numbers[1]);
  }
}

// The numbers of a tile of keys, or of values, that has arrived. All lanes of the warp see them.
template <typename Shape>
PASS_EXT_DEVICE const typename Shape::T* arrived_numbers(const GroupAttention& group, int which, bool are_keys) {
  if constexpr (!Shape::kHasCodes) {
    return slices_of_warp<Shape>(which);
  } else {
    if (group.codes == CodeType::int8)
      decode_tile<Shape, CodeType::int8>(which, are_keys);
    else if (group.codes == CodeType::float8_e4m3)
      decode_tile<Shape, CodeType::float8_e4m3>(which, are_keys);
    else
      decode_tile<Shape, CodeType::float8_e5m2>(which, are_keys);
    sync_warp();
    return slices_of_warp<Shape>(0);
  }
}

}  // namespace pass_ext::gpu
