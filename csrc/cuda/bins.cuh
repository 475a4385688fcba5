// Sums of 64-bit measures by bin, in shared memory: for selections that narrow a range of keys to one of its bins. A
// sum is two words, since an atomic add of shared memory has 32 bits, and one of 64 would be a loop of
// compare-and-swap.
#pragma once

#include <cstdint>

#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

template <int bins>
struct Bins {
  uint32_t low[bins], high[bins];

  PASS_EXT_DEVICE void clear(int bin) { low[bin] = high[bin] = 0; }
  PASS_EXT_DEVICE void add(int bin, uint64_t measure) {
    const uint32_t first = static_cast<uint32_t>(measure);
    const uint32_t carry = atomic_add(&low[bin], first) + first < first ? 1 : 0;
    const uint32_t second = static_cast<uint32_t>(measure >> 32) + carry;
    if (second != 0) atomic_add(&high[bin], second);
  }
  PASS_EXT_DEVICE uint64_t sum(int bin) const { return static_cast<uint64_t>(high[bin]) << 32 | low[bin]; }
};

}  // namespace pass_ext::gpu
