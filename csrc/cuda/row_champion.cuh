// The champion of a chunk in a race: each lane of the warp that scans 1,024 logits scores one of its 32 tokens, the one
// whose bound (its logit against first_g of its group) is the highest. The best of these is the champion: its logit,
// its noise, and its lead over an upper bound on the scores of all other tokens of the chunk. The row's largest logit
// is not known yet, so these scores stand against the chunk's own; the difference is the same for all its tokens, but
// for rounding. The block that finishes the row then has a good score of each chunk, and looks only at chunks whose
// others may reach the best.
#pragma once

#include <cstdint>

#include "core/distribution.h"
#include "core/noise.h"
#include "cuda/block.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr float kBoundSlack = 0.001f;  // more than a score may exceed its bound by rounding

struct alignas(16) Champion {
  float logit, log_e;
  int32_t id;  // -1: none
  float lead;
};

// What a scan keeps of a row for its race; null if it draws no noise.
struct RowRace {
  float* log_firsts;    // [groups]
  Champion* champions;  // [chunks]
};

// The first number of a group's noise (core/noise.h), and the place of the token that has it.
struct FirstOfGroup {
  float value;
  int32_t leader;
};

PASS_EXT_DEVICE FirstOfGroup first_of_group(const Noise& noise, int32_t group) {
  const PhiloxBlock drawn = philox4x32(counter_of(noise, NoiseLevel::group, static_cast<uint32_t>(group)), noise.seed);
  return {exponential_variate(drawn.word[0]) * (1.0f / kGroup), static_cast<int32_t>(drawn.word[1] % kGroup)};
}

// A lane's token with the highest bound, its group, and the highest bound of the lane's others.
struct LaneToken {
  float logit;  // -inf: none
  int32_t id;
  FirstOfGroup first;
  float others;
};

// One warp finds the champion of a chunk. `peak`: the chunk's largest logit.
PASS_EXT_DEVICE_CALL void crown_champion(LaneToken token, float scale, float peak, Noise noise, Champion* champion) {
  const int32_t group = token.id / kGroup, place = token.id % kGroup;
  const uint32_t block = static_cast<uint32_t>(group * kBlocksPerGroup + place % kBlocksPerGroup);
  const PhiloxBlock drawn = philox4x32(counter_of(noise, NoiseLevel::token, block), noise.seed);
  uint32_t word = drawn.word[0];
#pragma unroll
  for (int i = 1; i < kGroup / kBlocksPerGroup; ++i) word = place / kBlocksPerGroup == i ? drawn.word[i] : word;
  const float e = token.first.value + exponential_variate(word);
  const float log_e = logarithm(place == token.first.leader ? token.first.value : e);
  const float score = token.logit > -kInfinity ? race_score(token.logit, peak, scale, log_e) : -kInfinity;
  const Best winner = best_of_warp({score, score > -kInfinity ? token.id : -1});
  const bool wins = winner.id >= 0 && token.id == winner.id;
  const float others = largest_of_warp(wins ? token.others : larger(token.others, score));
  if (winner.id < 0 ? lane_index() == 0 : wins) *champion = {token.logit, log_e, winner.id, winner.score - others};
}

// True if a token of the chunk other than the champion may reach `reached`. `score`: the champion's in the row's race;
// -inf if it does not race there, and then nothing is known of the others.
PASS_EXT_DEVICE bool has_rival(const Champion& champion, float score, float reached) {
  if (!(score > -kInfinity)) return true;
  const float size = maximum(score, -score) + maximum(champion.lead, -champion.lead);
  return score - champion.lead + (kBoundSlack + size * 0x1p-20f) >= reached;
}

}  // namespace pass_ext::gpu
