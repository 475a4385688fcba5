// Attention by the heads of a group: shapes, and slices of keys and values on their way through shared memory. A warp
// copies its own slices, of 32 keys at a time.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "core/attention_lists.h"
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
// of the numbers that both have, and of those that keys have besides.
template <typename Element, int key_dim, int value_dim, int row_tiles>
struct GroupShape {
  using T = Element;
  static constexpr int kKeyDim = key_dim, kValueDim = value_dim;
  static constexpr int kRowTiles = row_tiles, kRows = 16 * row_tiles;
  static constexpr int kKeyChunks = key_dim / 8 / kGroupWarps;      // of 16 bytes, of a slice of a key
  static constexpr int kValueChunks = value_dim / 8 / kGroupWarps;  // of a value; the first ones of a key
  static constexpr int kSteps = kKeyChunks / 2;                     // products for a score
  static constexpr int kStride = 8 * (kKeyChunks + 1);              // odd chunks: rows at one chunk in different banks
  static constexpr int kTile = kGroupKeys * kStride;                // a warp's slices of a tile
  static constexpr int kPartStride = value_dim + 4;                 // a row's sums, and its RowTotals
  static_assert(key_dim % (16 * kGroupWarps) == 0 && value_dim % (16 * kGroupWarps) == 0 && value_dim <= key_dim,
                "slices are whole fragments");

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

// The column of a key at which a chunk of the warp's slice begins.
template <typename Shape>
PASS_EXT_DEVICE int column_of_chunk(int chunk) {
  constexpr int kOwnChunks = Shape::kKeyChunks - Shape::kValueChunks;  // that values do not have
  const int warp = static_cast<int>(warp_index());
  return chunk < Shape::kValueChunks ? 8 * (warp * Shape::kValueChunks + chunk)
                                     : Shape::kValueDim + 8 * (warp * kOwnChunks + chunk - Shape::kValueChunks);
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

// Starts the copies of some chunks of the warp's slice of a tile. `from`: of each lane's key, its row; 0: zeros.
template <typename Shape, int first_chunk, int chunks>
PASS_EXT_DEVICE void copy_chunks(typename Shape::T* tile, uint64_t from) {
  static_assert(32 % chunks == 0, "a lane copies the same chunk of several keys");
  constexpr int kAtOnce = 32 / chunks;  // keys
  const int lane = static_cast<int>(lane_index()), first = lane / chunks, chunk = first_chunk + lane % chunks;
  const int column = column_of_chunk<Shape>(chunk);
  const SharedAddress to = shared_address(tile + first * Shape::kStride + 8 * chunk);
#pragma unroll
  for (int i = 0; i < kGroupKeys; i += kAtOnce) {
    const typename Shape::T* const row = reinterpret_cast<const typename Shape::T*>(shuffle(from, first + i));
    copy_async16(to + i * Shape::kStride * static_cast<int>(sizeof(typename Shape::T)), row + column, row != nullptr);
  }
}

template <typename Shape>
PASS_EXT_DEVICE void copy_keys(const GroupAttention& group, const PlacedRow& row, const PlacedKey& placed, int which) {
  using T = typename Shape::T;
  const AttentionProblem& problem = group.problem;
  const uint64_t from = placed.key < 0
                            ? 0
                            : reinterpret_cast<uint64_t>(row_in<T>(problem, row.request, problem.k_cache, problem.k_new,
                                                                   placed.outer, placed.key, row.head));
  copy_chunks<Shape, 0, Shape::kValueChunks>(slices_of_warp<Shape>(which), from);
  if constexpr (Shape::kKeyChunks > Shape::kValueChunks)
    copy_chunks<Shape, Shape::kValueChunks, Shape::kKeyChunks - Shape::kValueChunks>(slices_of_warp<Shape>(which),
                                                                                     from);
}

template <typename Shape>
PASS_EXT_DEVICE void copy_values(const GroupAttention& group, const PlacedRow& row, const PlacedKey& placed,
                                 int which) {
  using T = typename Shape::T;
  const AttentionProblem& problem = group.problem;
  const uint64_t from = placed.key < 0
                            ? 0
                            : reinterpret_cast<uint64_t>(row_in<T>(problem, row.request, problem.v_cache, problem.v_new,
                                                                   placed.outer, placed.key, row.head));
  copy_chunks<Shape, 0, Shape::kValueChunks>(slices_of_warp<Shape>(which), from);
}

}  // namespace pass_ext::gpu
