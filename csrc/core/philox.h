// Philox4x32-10 (Salmon et al. 2011): four uniform 32-bit words from a 128-bit counter and a 64-bit key, no state.
//   ten rounds of  (c0, c1, c2, c3) <- (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)),  k += W
// The key is a request's seed and the counter says which draw it is, so a draw never depends on batch, tree or launch.
#pragma once

#include <cstdint>

#include "core/scalar.h"

namespace pass_ext {

struct PhiloxBlock {
  uint32_t word[4];
};

PASS_EXT_HOST_DEVICE PhiloxBlock philox4x32(PhiloxBlock counter, uint64_t key) {
  philox_rounds(counter.word, key);
  return counter;
}

}  // namespace pass_ext
