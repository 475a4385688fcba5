// The shortlist of a row: all tokens from some floor on, in order, in shared memory. Filters and the races behind them
// need no other token if the floor is low enough. The floor of a list of at least `wanted` tokens: the groups of 64 are
// dealt out to 128 sets, one for each lane of four warps; each warp takes the r-th largest of its sets' largest logits;
// where w warps reach the floor, r w groups do. Four short lists take the place of a search among all groups.
// A token's place is the number of tokens before it, and its thread counts them: every place at once, without a sort.
#pragma once

#include <cstdint>

#include "core/distribution.h"
#include "cuda/primitives.cuh"
#include "cuda/row_pieces.cuh"
#include "cuda/row_scan.cuh"
#include "cuda/row_select.cuh"

namespace pass_ext::gpu {

constexpr int kShortlist = 512;        // tokens of a list, and groups in which they are
constexpr int kSets = 128;             // no block that describes a row has fewer threads
constexpr int32_t kMostWanted = 96;    // with more, the smallest of the sets decides, and the list grows too long
constexpr int32_t kWantedOfTopP = 64;  // where top-p alone must say how many tokens remain

// In shared memory.
struct Shortlist {
  alignas(16) uint64_t found[kShortlist];  // keys of the tokens' logits, later of their scores in a race, in any order
  union {
    int32_t groups[kShortlist];  // those that have a token above the floor
    uint64_t keys[kShortlist];   // in order
  };
  unsigned long long up_to[kShortlist];  // the mass of keys 0 to i
};

struct ShortlistScratch {
  alignas(16) float sets[kSets];  // read 16 bytes at a time
  float ranked[kSets / 32];
  int32_t groups, tokens;
};

// One of the block's first four warps: ranks the lanes' values and keeps the `rank`-th largest, counted from 1.
PASS_EXT_DEVICE void rank_sets(ShortlistScratch& scratch, float value, int32_t rank) {
  scratch.sets[thread_rank()] = value;
  sync_warp();
  const int32_t lane = static_cast<int32_t>(lane_index());
  int32_t before = 0;
#pragma unroll
  for (int32_t i = 0; i < 32; i += 4) {
    const Bytes16 others = load16(scratch.sets + warp_index() * 32 + i);
#pragma unroll
    for (int32_t k = 0; k < 4; ++k) {
      const float other = float_of(others.word[k]);
      before += other > value || (other == value && i + k < lane);
    }
  }
  if (before == rank - 1) scratch.ranked[warp_index()] = value;
}

// The `rank`-th largest of the warps' values, counted from 1.
PASS_EXT_DEVICE float ranked_of_warps(const ShortlistScratch& scratch, int32_t rank) {
  constexpr int kWarps = kSets / 32;
  float values[kWarps], result = -kInfinity;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) values[i] = scratch.ranked[i];
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    int32_t at_least = 0;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) at_least += values[k] >= values[i];
    if (at_least >= rank) result = larger(result, values[i]);
  }
  return result;
}

// The number of listed tokens before a key. Two of them come with a load.
PASS_EXT_DEVICE int32_t place_of(const Shortlist& list, int32_t count, uint64_t key) {
  int32_t before = 0;
#pragma unroll 4
  for (int32_t i = 0; i + 1 < count; i += 2) {
    const Bytes16 pair = load16(list.found + i);
    before += (static_cast<uint64_t>(pair.word[1]) << 32 | pair.word[0]) > key;
    before += (static_cast<uint64_t>(pair.word[3]) << 32 | pair.word[2]) > key;
  }
  if (count % 2 != 0) before += list.found[count - 1] > key;
  return before;
}

// A warp turns the masses in `up_to` into their sums.
PASS_EXT_DEVICE void add_up(Shortlist& list, int32_t count) {
  const int32_t share = (count + 31) / 32, begin = static_cast<int32_t>(lane_index()) * share;
  const int32_t end = begin + share < count ? begin + share : count;
  unsigned long long sum = 0;
  for (int32_t i = begin; i < end; ++i) sum += list.up_to[i];
  unsigned long long up_to = sum;
#pragma unroll
  for (unsigned step = 1; step < 32; step *= 2) {
    const unsigned long long before = shuffle_up(up_to, step);
    if (lane_index() >= step) up_to += before;
  }
  up_to -= sum;
  for (int32_t i = begin; i < end; ++i) {
    up_to += list.up_to[i];
    list.up_to[i] = up_to;
  }
}

struct ShortlistSize {
  int32_t tokens;  // -1: too many
  bool is_whole;   // all tokens are listed whose logit is above -inf
};

// A block lists all tokens down to a floor that at least `wanted` tokens reach, up to kMostWanted, if the row has so
// many. `maxima`: the largest logit of each group, and -inf up to a multiple of four groups. `distribution`: its
// maximum and scale are known.
PASS_EXT_DEVICE_CALL ShortlistSize make_shortlist(Shortlist& list, ShortlistScratch& scratch, const LogitRow& row,
                                                  const float* maxima, const Distribution& distribution,
                                                  int32_t wanted) {
  constexpr int32_t kWarps = kSets / 32;
  const int32_t groups = groups_of(row.vocabulary), rank = (wanted + kWarps - 1) / kWarps;
  const int32_t thread = static_cast<int32_t>(thread_rank()), stride = static_cast<int32_t>(block_size().x);
  sync_block();
  if (thread == 0) scratch.groups = scratch.tokens = 0;
  if (thread < kSets) {
    float value = -kInfinity;
    for_each_four_groups<4>(maxima, 0, groups, kSets, [&](int32_t, const float (&largest)[4]) {
      value = larger(value, larger(larger(largest[0], largest[1]), larger(largest[2], largest[3])));
    });
    rank_sets(scratch, value, rank);
  }
  sync_block();
  const float floor = ranked_of_warps(scratch, (wanted + rank - 1) / rank);
  const auto is_high = [&](float z) { return z >= floor && z > -kInfinity; };
  for_each_four_groups<1>(maxima, 0, groups, stride, [&](int32_t group, const float (&largest)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (is_high(largest[i])) {
        const int32_t place = atomic_add(&scratch.groups, 1);
        if (place < kShortlist) list.groups[place] = group + i;
      }
  });
  sync_block();
  if (scratch.groups > kShortlist) return {-1, false};
  for_each_listed_piece(row, list.groups, scratch.groups, [&](int32_t first, const float (&z)[kPiece]) {
    for_each_element(z, is_high, [&](int i, float logit) {
      const int32_t place = atomic_add(&scratch.tokens, 1);
      if (place < kShortlist) list.found[place] = key_of(logit, first + i);
    });
  });
  sync_block();
  const int32_t count = scratch.tokens;
  if (count > kShortlist) return {-1, false};
  for (int32_t i = thread; i < count; i += stride) {
    const uint64_t key = list.found[i];
    const int32_t place = place_of(list, count, key);
    list.keys[place] = key;
    list.up_to[place] = integer_mass(exponential(log_weight(distribution, logit_of_key(key))));
  }
  sync_block();
  if (warp_index() == 0) add_up(list, count);
  sync_block();
  return {count, floor == -kInfinity};
}

// A warp: the first of `count` indices for which the monotone condition(i) holds; `count` if there is none.
template <typename Condition>
PASS_EXT_DEVICE int32_t first_index_with(int32_t count, const Condition& condition) {
#pragma unroll 1
  for (int32_t base = 0; base < count; base += 32) {
    const int32_t i = base + static_cast<int32_t>(lane_index());
    const unsigned holds = ballot(i < count && condition(i));
    if (holds != 0) return base + first_set_bit(holds);
  }
  return count;
}

}  // namespace pass_ext::gpu
