// A draw by the inverse of the distribution function: the token that holds the place u of the row's mass.
//   m_v = floor(2^40 exp((z_v - max z) / T)) in the support, else 0;   M = sum m_v
//   the least v with m_0 + ... + m_v > floor(u M),   u in units of 2^-64 (noise.h)
// Masses are integers, so that any order of additions gives the same bits and every device the same token. One number
// decides a position: who knows u and the model's distribution knows the token.
#pragma once

#include <cstdint>

#include "core/distribution.h"

namespace pass_ext {

constexpr float kWeightless = -28.0f;  // a token below e^-28 of the largest has mass 0

// floor(a b / 2^64)
PASS_EXT_HOST_DEVICE uint64_t high_product(uint64_t a, uint64_t b) {
  const uint64_t low = 0xffffffffu, a_low = a & low, a_high = a >> 32, b_low = b & low, b_high = b >> 32;
  const uint64_t middle = a_high * b_low + (a_low * b_low >> 32);
  return a_high * b_high + (middle >> 32) + ((a_low * b_high + (middle & low)) >> 32);
}

// m of one token
PASS_EXT_HOST_DEVICE uint64_t token_mass(const Distribution& distribution, float logit, int32_t id) {
  return in_support(distribution, logit, id) ? integer_mass(exponential(log_weight(distribution, logit))) : 0;
}

}  // namespace pass_ext
