// Reductions over a warp or a block in a fixed order, and the test for the last block to arrive. Unless a comment says
// otherwise, all threads of the warp or block call a function together and get the same value.
#pragma once

#include <cstdint>

#include "core/distribution.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

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
  int32_t is_last;
};

PASS_EXT_DEVICE unsigned warps_in_block() { return block_size().x / 32; }

PASS_EXT_DEVICE float largest_of_warp(float value) { return float_of_ordered(reduce_max(ordered_bits(value))); }

// No score may be NaN. The id -1 means none and is last among equal scores.
PASS_EXT_DEVICE Best best_of_warp(const Best& value) {
  const float score = largest_of_warp(value.score);
  const uint32_t id = reduce_min(value.score == score ? static_cast<uint32_t>(value.id) : ~0u);
  return {score, static_cast<int32_t>(id)};
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

PASS_EXT_DEVICE double sum_of_warp(double value) {
  for (int step = 16; step > 0; step /= 2) value += shuffle_xor(value, step);
  return value;
}

PASS_EXT_DEVICE_CALL double sum_of_block(BlockScratch& scratch, double value) {
  value = sum_of_warp(value);
  if (lane_index() == 0) scratch.sums[warp_index()] = value;
  sync_block();
  double sum = 0.0;
  for (unsigned warp = 0; warp < warps_in_block(); ++warp) sum += scratch.sums[warp];
  sync_block();
  return sum;
}

// For one thread. True if it is the last of `expected` threads to call this with `counter`: then it sees what the
// others wrote before their calls, and the counter is zero again.
PASS_EXT_DEVICE bool comes_last(int32_t* counter, int32_t expected) {
  fence_device();
  const bool last = atomic_count(counter, expected) + 1 == expected;
  if (last) fence_device();
  return last;
}

// The same for whole blocks: all threads of the last block see what all threads of the others wrote. `answer` is shared
// memory.
PASS_EXT_DEVICE bool block_comes_last(int32_t* counter, int32_t expected, int32_t* answer) {
  sync_block();
  if (thread_rank() == 0) *answer = comes_last(counter, expected);
  sync_block();
  return *answer != 0;
}

}  // namespace pass_ext::gpu
