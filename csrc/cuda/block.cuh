// What all threads of a block do together: reductions in a fixed order, elections, and the selection of the r-th
// largest of many keys. Every function is called by all threads, starts and ends with a barrier around its scratch, and
// returns the same value to all. Called by cuda/rows.cuh.
#pragma once

#include <cstdint>

#include "core/law.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kDigit = 256;  // radix of a selection: four passes over the data decide 32 bits

struct Best {
  float score;
  int32_t id;
};

// Larger scores first, lower ids among equals.
PASS_EXT_DEVICE bool is_better(const Best& a, const Best& b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

struct BlockScratch {
  double sums[32];
  Best best[32];
  int32_t integers[32];
  unsigned long long bins[kDigit];
  unsigned long long found_before;
  int32_t found_digit;
};

PASS_EXT_DEVICE unsigned warps_in_block() { return block_size().x / 32; }

PASS_EXT_DEVICE Best best_of_warp(Best value) {
  for (int step = 16; step > 0; step /= 2) {
    const Best other{shuffle_xor(value.score, step), shuffle_xor(value.id, step)};
    if (is_better(other, value)) value = other;
  }
  return value;
}

PASS_EXT_DEVICE Best best_of_block(BlockScratch& scratch, Best value) {
  value = best_of_warp(value);
  if (lane_index() == 0) scratch.best[warp_index()] = value;
  sync_block();
  Best best = scratch.best[0];
  for (unsigned warp = 1; warp < warps_in_block(); ++warp)
    if (is_better(scratch.best[warp], best)) best = scratch.best[warp];
  sync_block();
  return best;
}

PASS_EXT_DEVICE double sum_of_block(BlockScratch& scratch, double value) {
  for (int step = 16; step > 0; step /= 2) value += shuffle_xor(value, step);
  if (lane_index() == 0) scratch.sums[warp_index()] = value;
  sync_block();
  double sum = 0.0;
  for (unsigned warp = 0; warp < warps_in_block(); ++warp) sum += scratch.sums[warp];
  sync_block();
  return sum;
}

PASS_EXT_DEVICE int32_t smallest_of_block(BlockScratch& scratch, int32_t value) {
  for (int step = 16; step > 0; step /= 2) {
    const int32_t other = shuffle_xor(value, step);
    if (other < value) value = other;
  }
  if (lane_index() == 0) scratch.integers[warp_index()] = value;
  sync_block();
  int32_t smallest = scratch.integers[0];
  for (unsigned warp = 1; warp < warps_in_block(); ++warp)
    if (scratch.integers[warp] < smallest) smallest = scratch.integers[warp];
  sync_block();
  return smallest;
}

// One warp: the first bin at which the measure, counted from `before`, reaches `wanted`; else the last that is not
// empty.
PASS_EXT_DEVICE void find_bin(BlockScratch& scratch, unsigned long long wanted, unsigned long long before) {
  constexpr int kBinsPerLane = kDigit / 32;
  const int first = static_cast<int>(lane_index()) * kBinsPerLane;
  unsigned long long own = 0;
  int last = -1;
  for (int i = first; i < first + kBinsPerLane; ++i) {
    own += scratch.bins[i];
    if (scratch.bins[i] > 0) last = i;
  }
  unsigned long long up_to = own;  // of this lane's bins and all before
  for (unsigned step = 1; step < 32; step *= 2) {
    const unsigned long long other = shuffle_up(up_to, step);
    if (lane_index() >= step) up_to += other;
  }
  for (int step = 16; step > 0; step /= 2) {
    const int other = shuffle_xor(last, step);
    if (other > last) last = other;
  }
  const unsigned reaching = ballot(before + up_to >= wanted);
  const int owner = reaching != 0 ? first_set_bit(reaching) : (last < 0 ? 0 : last) / kBinsPerLane;
  if (static_cast<int>(lane_index()) != owner) return;
  before += up_to - own;
  int digit = first;
  while (digit < first + kBinsPerLane - 1 && digit < last && before + scratch.bins[digit] < wanted)
    before += scratch.bins[digit++];
  scratch.found_digit = digit;
  scratch.found_before = before;
}

struct Selected {
  uint32_t key;
  unsigned long long before;  // measure of the keys above it
};

// The largest key K with measure(keys >= K) >= wanted, or the smallest key of any measure where all together do not
// reach it. All keys lie in [lowest, highest]; digits are of the distance from the highest, scaled to the range, so
// that the first of them tells keys apart. for_each(take) calls take(key, measure) for this thread's share of the
// elements; it runs up to four times.
template <typename ForEach>
PASS_EXT_DEVICE Selected select_key(BlockScratch& scratch, unsigned long long wanted, uint32_t lowest, uint32_t highest,
                                    const ForEach& for_each) {
  int unused = 0;  // leading zeros of the range
  while (unused < 24 && (highest - lowest) >> (31 - unused) == 0) ++unused;
  uint32_t prefix = 0;
  unsigned long long before = 0;
  for (int shift = 24; shift >= 0 && shift + 8 > unused; shift -= 8) {
    for (unsigned i = thread_rank(); i < kDigit; i += block_size().x) scratch.bins[i] = 0;
    sync_block();
    for_each([&](uint32_t key, unsigned long long measure) {
      const uint32_t distance = (highest - key) << unused;
      const bool in_prefix = shift == 24 || distance >> (shift + 8) == prefix >> (shift + 8);
      if (in_prefix && measure > 0) atomic_add(&scratch.bins[distance >> shift & (kDigit - 1)], measure);
    });
    sync_block();
    if (warp_index() == 0) find_bin(scratch, wanted, before);
    sync_block();
    prefix |= static_cast<uint32_t>(scratch.found_digit) << shift;
    before = scratch.found_before;
    sync_block();
  }
  return {highest - (prefix >> unused), before};
}

}  // namespace pass_ext::gpu
