// The random numbers of drafting and accepting. Key = the request's seed; the counter says which draw it is:
//   (block | draw << 20,  purpose << 1 | level | node << 8,  position low, position high)
//
// A race draws token v with probability w_v / sum(w): argmin over v of E_v / w_v, E_v independent and exponential. Few
// of the E have to be computed, because among the 64 tokens of a group g
//   E_v = first_g                      for one uniformly chosen token, the group's leader; first_g is exponential / 64
//   E_v = first_g + an exponential     for the others
// These are 64 independent exponentials: the minimum of n of them is exponential / n, wherever it lies, and the excess
// of each other one is exponential again. No token of a group can beat max(w) / first_g, so one draw and the largest
// logit dismiss most groups. A token's E depends on seed, position, purpose and its own id, on nothing else.
#pragma once

#include <cstdint>

#include "core/philox.h"
#include "core/platform.h"

namespace pass_ext {

constexpr int kGroup = 64;  // tokens that share a first_g
constexpr int kBlocksPerGroup =
    16;  // Philox blocks for a group's tokens: block i serves tokens i, i + 16, i + 32, i + 48

enum class Purpose : uint32_t { coupled, coin, residual, bonus, draft, inverse };

PASS_EXT_HOST_DEVICE int32_t groups_of(int32_t vocabulary) { return (vocabulary + kGroup - 1) / kGroup; }

// Names a draw: the whole counter except the block.
struct Noise {
  uint64_t seed;
  int64_t position;
  Purpose purpose;
  uint32_t node;             // distinguishes draws of one request at one position: the tree node concerned
  uint32_t draw;             // distinguishes repeated draws from one row
  uint32_t first_group = 0;  // the number in the vocabulary of the row's first group: not 0 in a shard of a row
};

// A request's seed and position; 0 for a null array. Both loads are under way at once.
struct NoiseKey {
  uint64_t seed, position;
};

PASS_EXT_HOST_DEVICE NoiseKey noise_key(const int64_t* seeds, const int64_t* positions, int64_t request) {
  const int64_t* const arrays[2] = {seeds, positions};
  uint64_t values[2] = {0, 0};
  for (int i = 0; i < 2; ++i)
    if (arrays[i] != nullptr) values[i] = static_cast<uint64_t>(arrays[i][request]);
  return {values[0], values[1]};
}

enum class NoiseLevel : uint32_t { group, token };

PASS_EXT_HOST_DEVICE PhiloxBlock counter_of(const Noise& noise, NoiseLevel level, uint32_t block) {
  const uint64_t position = static_cast<uint64_t>(noise.position);
  block += noise.first_group * (level == NoiseLevel::token ? kBlocksPerGroup : 1);
  return {{block | noise.draw << 20,
           static_cast<uint32_t>(noise.purpose) << 1 | static_cast<uint32_t>(level) | noise.node << 8,
           static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32)}};
}

// ln first_g
PASS_EXT_HOST_DEVICE float log_first(const Noise& noise, int32_t group) {
  const PhiloxBlock drawn = philox4x32(counter_of(noise, NoiseLevel::group, static_cast<uint32_t>(group)), noise.seed);
  return logarithm(exponential_variate(drawn.word[0]) * (1.0f / kGroup));
}

// ln E of one token
PASS_EXT_HOST_DEVICE float log_noise(const Noise& noise, int32_t id) {
  const int32_t group = id / kGroup, place = id % kGroup;
  const PhiloxBlock drawn = philox4x32(counter_of(noise, NoiseLevel::group, static_cast<uint32_t>(group)), noise.seed);
  const float first = exponential_variate(drawn.word[0]) * (1.0f / kGroup);
  if (drawn.word[1] % kGroup == static_cast<uint32_t>(place)) return logarithm(first);
  const uint32_t block = static_cast<uint32_t>(group * kBlocksPerGroup + place % kBlocksPerGroup);
  const PhiloxBlock tokens = philox4x32(counter_of(noise, NoiseLevel::token, block), noise.seed);
  return logarithm(first + exponential_variate(tokens.word[place / kBlocksPerGroup]));
}

// Uniform in [0, 1), a multiple of 2^-32: the coin thrown for `node` in the step whose first token is at `position`.
PASS_EXT_HOST_DEVICE double coin(uint64_t seed, int64_t position, int node) {
  const Noise noise{seed, position, Purpose::coin, static_cast<uint32_t>(node), 0};
  return philox4x32(counter_of(noise, NoiseLevel::group, 0), seed).word[0] * 0x1p-32;
}

// Uniform in [0, 1), in units of 2^-64: the place of a draw by the inverse of a distribution function.
PASS_EXT_HOST_DEVICE uint64_t uniform_bits(const Noise& noise) {
  const PhiloxBlock drawn = philox4x32(counter_of(noise, NoiseLevel::group, 0), noise.seed);
  return static_cast<uint64_t>(drawn.word[0]) << 32 | drawn.word[1];
}

}  // namespace pass_ext
