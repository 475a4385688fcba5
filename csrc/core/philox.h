// Philox4x32-10 (Salmon et al. 2011): four uniform 32-bit words from a 128-bit counter and a 64-bit key, no state.
//   ten rounds of  (c0, c1, c2, c3) <- (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)),  k += W
// The key is a request's seed and the counter says which draw it is, so a draw never depends on batch, tree or launch.
// Called by every kernel that draws.
#pragma once

#include <cstdint>

#include "core/platform.h"

namespace pass_ext {

struct PhiloxBlock {
  uint32_t word[4];
};

PASS_EXT_HOST_DEVICE PhiloxBlock philox4x32(PhiloxBlock counter, uint64_t key) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kMultiplier0) * counter.word[0];
    const uint64_t product1 = static_cast<uint64_t>(kMultiplier1) * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

}  // namespace pass_ext
