// A race among the tokens of a row: argmax of ln(weight) - ln E, E the exponential numbers of core/noise.h. A group of
// 64 tokens has a bound: its largest logit against first_g, which no E of the group is below. Each warp first scores
// all tokens of the group with its highest bound. Their best dismisses most groups. A token of the others has a bound
// of its own: its logit against the same first_g. Those that pass are scored side by side, one by each thread. So a
// race takes a few steps of the whole block, however many groups might have won.
#pragma once

#include <cstdint>

#include "core/distribution.h"
#include "core/noise.h"
#include "cuda/block.cuh"
#include "cuda/primitives.cuh"
#include "cuda/row_champion.cuh"
#include "cuda/row_pieces.cuh"
#include "cuda/row_scan.cuh"
#include "cuda/row_select.cuh"

namespace pass_ext::gpu {

constexpr int32_t kRacingGroups = 256;  // with more, warps score another group each: that dismisses more of them
constexpr int32_t kRacingTokens = 256;
constexpr int32_t kMostAtOnce = 32;        // winners that one race names
constexpr int32_t kRoundsBeforeSpans = 4;  // then a span of the groups dismisses more than one more group of each warp

struct RacingToken {
  int32_t id;
  float logit;
};

// In shared memory.
struct RaceScratch {
  int32_t group_list[kRacingGroups];
  RacingToken token_list[kRacingTokens];
  uint64_t keys[kRacingTokens + kMostAtOnce];  // of the scores of tokens that may win, and of `best` or champions
  uint64_t best[kMostAtOnce];                  // keys of the best tokens so far, in order
  alignas(16) float champions[256];            // the best score of each thread's, read 16 bytes at a time
  float group_bests[kMostAtOnce];
  uint32_t reached;  // ordered_bits of the best score so far; 0: none
  int32_t groups, tokens, keyed;
};

// A token's score in a race; -inf outside the distribution's support.
struct PlainScore {
  const Distribution& distribution;

  PASS_EXT_DEVICE float operator()(int32_t id, float z, float log_e) const {
    return in_support(distribution, z, id) ? race_score(z, distribution.maximum, distribution.scale, log_e)
                                           : -kInfinity;
  }
};

// An upper bound on the scores of a group's tokens in a race: see cpu/rows_kernels-inl.h. -inf if none can win.
PASS_EXT_DEVICE float bound_of_group(const Distribution& distribution, float largest, float log_e, float offset) {
  const float reached = race_score(largest, distribution.maximum, distribution.scale, log_e) + (offset + kBoundSlack);
  return largest >= distribution.cut ? reached : -kInfinity;  // -inf also if `largest` is -inf
}

// The same for one token, `gap` = (largest logit of its group - its logit) scale below the group's bound. Both differ
// from exact values by a few roundings of numbers no larger than they are.
PASS_EXT_DEVICE float bound_of_token(float bound, float gap) {
  const float size = maximum(bound, -bound) + gap;
  return bound - gap + (kBoundSlack + size * 0x1p-20f);
}

// A block writes the groups' bounds for a race whose ln first_g the scan has drawn; adds `offset` to each. `groups`: a
// multiple of four.
PASS_EXT_DEVICE void bound_drawn_groups(const float* maxima, const float* log_firsts, int32_t groups, float* bounds,
                                        const Distribution& distribution, float offset) {
  constexpr int kAtOnce = 4;  // pairs of loads, all under way before the first bound
  const int32_t stride = static_cast<int32_t>(block_size().x) * 4;
  sync_block();
  for (int32_t base = static_cast<int32_t>(thread_rank()) * 4; base < groups; base += kAtOnce * stride) {
    Bytes16 largest[kAtOnce], log_e[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (base + k * stride < groups) largest[k] = load16(maxima + base + k * stride);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (base + k * stride < groups) log_e[k] = load16(log_firsts + base + k * stride);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (base + k * stride >= groups) continue;
      Bytes16 bound;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        bound.word[i] =
            bits_of(bound_of_group(distribution, float_of(largest[k].word[i]), float_of(log_e[k].word[i]), offset));
      store16(bounds + base + k * stride, bound);
    }
  }
  sync_block();
}

// A block writes the groups' bounds for a race, or without noise for a ranking; adds `offset` to each. Each warp has
// a scheduler to itself here, and no other warp hides the latency of its arithmetic: so a thread computes the bounds
// of several groups side by side.
PASS_EXT_DEVICE_CALL void bound_groups(const float* maxima, int32_t groups, float* bounds,
                                       const Distribution& distribution, const Noise* noise, float offset) {
  constexpr int kAtOnce = 4;
  const int32_t stride = static_cast<int32_t>(block_size().x);
  const float cut = distribution.cut;
  const Noise race_noise = noise == nullptr ? Noise{} : *noise;
  sync_block();
  for (int32_t base = static_cast<int32_t>(thread_rank()); base < groups; base += kAtOnce * stride) {
    float largest[kAtOnce], bound[kAtOnce];
    bool races = false;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int32_t group = base + k * stride;
      largest[k] = group < groups ? maxima[group] : -kInfinity;
      bound[k] = -kInfinity;
      races = races || (largest[k] >= cut && largest[k] > -kInfinity);
    }
    if (races) {
      float log_e[kAtOnce] = {};
      if (noise != nullptr) {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) log_e[k] = log_first(race_noise, base + k * stride);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) bound[k] = bound_of_group(distribution, largest[k], log_e[k], offset);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (base + k * stride < groups) bounds[base + k * stride] = bound[k];
  }
  sync_block();
}

PASS_EXT_DEVICE void keep_better(Best& best, const Best& other) {
  if (other.id >= 0 && (best.id < 0 || is_better(other, best))) best = other;
}

// One warp: the best token of a group behind `last`. score(id, logit, ln E) is -inf for a token that does not race.
template <typename Score>
PASS_EXT_DEVICE_CALL Best best_of_group(const LogitRow& row, const Noise* noise, int32_t group, const Best& last,
                                        const Score& score) {
  const int32_t lane = static_cast<int32_t>(lane_index());
  float z[2], log_e[2] = {0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int32_t id = group * kGroup + lane + 32 * k;
    z[k] = id < row.vocabulary ? logit_at(row, id) : -kInfinity;
  }
  if (noise != nullptr) {
    const PhiloxBlock drawn =
        philox4x32(counter_of(*noise, NoiseLevel::group, static_cast<uint32_t>(group)), noise->seed);
    const float first = exponential_variate(drawn.word[0]) * (1.0f / kGroup);
    const uint32_t block = static_cast<uint32_t>(group * kBlocksPerGroup + lane % kBlocksPerGroup);
    const PhiloxBlock tokens = philox4x32(counter_of(*noise, NoiseLevel::token, block), noise->seed);
    for (int k = 0; k < 2; ++k) {
      const int32_t place = lane + 32 * k;
      const float e = first + exponential_variate(lane < kBlocksPerGroup ? tokens.word[2 * k] : tokens.word[2 * k + 1]);
      log_e[k] = logarithm(static_cast<int32_t>(drawn.word[1] % kGroup) == place ? first : e);
    }
  }
  Best best{-kInfinity, -1};
  for (int k = 0; k < 2; ++k) {
    const int32_t id = group * kGroup + lane + 32 * k;
    if (!(z[k] > -kInfinity)) continue;
    const Best token{score(id, z[k], log_e[k]), id};
    if (token.score > -kInfinity && is_better(last, token)) keep_better(best, token);
  }
  return best_of_warp(best);
}

// One token's score; id -1 if it does not race or is not behind `last`.
template <typename Score>
PASS_EXT_DEVICE_CALL Best score_token(const Noise* noise, const Best& last, const Score& score, int32_t id, float z) {
  const Best token{score(id, z, noise == nullptr ? 0.0f : log_noise(*noise, id)), id};
  return token.score > -kInfinity && is_better(last, token) ? token : Best{-kInfinity, -1};
}

// A block finds the best token of a race behind `last`; id -1 if there is none. `maxima` and `bounds` of the groups, a
// multiple of four, -inf behind the last.
template <typename Score>
PASS_EXT_DEVICE_CALL Best best_of_race(RaceScratch& scratch, BlockScratch& block, const LogitRow& row,
                                       const float* maxima, const float* bounds, int32_t groups, float scale,
                                       const Noise* noise, const Best& last, const Score& score) {
  const bool is_first_lane = lane_index() == 0;
  const int32_t threads = static_cast<int32_t>(block_size().x);
  if (thread_rank() == 0) {
    scratch.reached = 0;
    scratch.groups = scratch.tokens = 0;
  }
  sync_block();
  Best best{-kInfinity, -1}, examined{kInfinity, -1};
  float reached = -kInfinity;
  for (;;) {
    Best bound{-kInfinity, INT32_MAX};  // the highest of the warp's share, behind the group examined last
    for_each_four_groups<1>(bounds, 0, groups, threads, [&](int32_t group, const float (&four)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Best candidate{four[i], group + i};
        if (is_better(candidate, bound) && is_better(examined, candidate)) bound = candidate;
      }
    });
    examined = best_of_warp(bound);
    if (examined.score > -kInfinity && examined.score >= reached) {
      keep_better(best, best_of_group(row, noise, examined.id, last, score));
      if (is_first_lane && best.id >= 0) atomic_max(&scratch.reached, ordered_bits(best.score));
    }
    sync_block();
    reached = scratch.reached == 0 ? -kInfinity : float_of_ordered(scratch.reached);
    for_each_four_groups<1>(bounds, 0, groups, threads, [&](int32_t group, const float (&four)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (four[i] > -kInfinity && four[i] >= reached && is_better(examined, {four[i], group + i})) {
          const int32_t place = atomic_add(&scratch.groups, 1);
          if (place < kRacingGroups) scratch.group_list[place] = group + i;
        }
      }
    });
    sync_block();
    if (scratch.groups <= kRacingGroups) break;
    sync_block();
    if (thread_rank() == 0) scratch.groups = 0;
  }
  for_each_listed_piece(row, scratch.group_list, scratch.groups, [&](int32_t first, const float (&z)[kPiece]) {
    const float bound = bounds[first / kGroup], largest = maxima[first / kGroup];
    const auto can_win = [&](float logit) {
      return logit > -kInfinity && bound_of_token(bound, (largest - logit) * scale) >= reached;
    };
    for_each_element(z, can_win, [&](int i, float logit) {
      const int32_t place = atomic_add(&scratch.tokens, 1);
      if (place < kRacingTokens)
        scratch.token_list[place] = {first + i, logit};
      else
        keep_better(best, score_token(noise, last, score, first + i, logit));
    });
  });
  sync_block();
  const int32_t count = scratch.tokens < kRacingTokens ? scratch.tokens : kRacingTokens;
  for (int32_t i = static_cast<int32_t>(thread_rank()); i < count; i += threads)
    keep_better(best, score_token(noise, last, score, scratch.token_list[i].id, scratch.token_list[i].logit));
  return best_of_block(block, best);
}

// The `rank`-th largest of `count` numbers in shared memory, up to 32, counted from 1; -inf if there are fewer.
PASS_EXT_DEVICE float ranked_of_few(const float* values, int32_t count, int32_t rank) {
  const int32_t lane = static_cast<int32_t>(lane_index());
  const float value = lane < count ? values[lane] : -kInfinity;
  int32_t before = 0;
#pragma unroll 4
  for (int32_t i = 0; i < count; ++i) before += values[i] > value || (values[i] == value && i < lane);
  const unsigned is_it = ballot(lane < count && before == rank - 1);
  return is_it == 0 ? -kInfinity : shuffle(value, first_set_bit(is_it));
}

// A block lists the tokens of the listed groups whose bounds reach `reached`; but for those of `champions`, of each
// chunk, unless it is null.
PASS_EXT_DEVICE_CALL void list_tokens(RaceScratch& scratch, const LogitRow& row, const float* maxima,
                                      const float* bounds, float scale, float reached, const Champion* champions) {
  for_each_listed_piece(row, scratch.group_list, scratch.groups, [&](int32_t first, const float (&z)[kPiece]) {
    const float bound = bounds[first / kGroup], largest = maxima[first / kGroup];
    const int32_t champion = champions == nullptr ? -1 : champions[first / kChunk].id;
    const auto can_win = [&](float logit) {
      return logit > -kInfinity && bound_of_token(bound, (largest - logit) * scale) >= reached;
    };
    for_each_element(z, can_win, [&](int i, float logit) {
      if (first + i == champion) return;
      const int32_t place = atomic_add(&scratch.tokens, 1);
      if (place < kRacingTokens) scratch.token_list[place] = {first + i, logit};
    });
  });
}

// A block scores the listed tokens and ranks them with what scratch.keys has already; returns how many of the `count`
// best there are. All of these reach `reached`, so of the tokens scored few are compared with each other.
template <typename Score>
PASS_EXT_DEVICE int32_t rank_tokens(RaceScratch& scratch, const Noise* noise, int32_t count, const Best& last,
                                    const Score& score, float reached) {
  const int32_t thread = static_cast<int32_t>(thread_rank()), threads = static_cast<int32_t>(block_size().x);
#pragma unroll 1
  for (int32_t i = thread; i < scratch.tokens; i += threads) {
    const RacingToken token = scratch.token_list[i];
    const Best best = score_token(noise, last, score, token.id, token.logit);
    if (best.id >= 0 && best.score >= reached)
      scratch.keys[atomic_add(&scratch.keyed, 1)] = key_of(best.score, best.id);
  }
  sync_block();
  const int32_t racing = scratch.keyed;
  for (int32_t i = thread; i < racing; i += threads) {
    const uint64_t key = scratch.keys[i];
    int32_t before = 0;
#pragma unroll 4
    for (int32_t k = 0; k < racing; ++k) before += scratch.keys[k] > key;
    if (before < count) scratch.best[before] = key;
  }
  sync_block();
  return racing < count ? racing : count;
}

// A block finds the `count` best tokens of a race behind `last`, up to kMostAtOnce. Their keys are in scratch.best, in
// order; returns their number, less than `count` only if no more race. Arguments as for best_of_race. `count` groups or
// more, those with the highest bounds, give their best tokens: so many tokens reach the `count`-th of these scores, and
// the winners are among the tokens whose bounds do. Of a flat row these are more than the lists hold. Then more groups
// give their best; and then the block takes a span of the groups at a time, and the best tokens of the spans so far
// dismiss most of the others. Four groups always fit.
template <typename Score>
PASS_EXT_DEVICE_CALL int32_t best_few_of_race(RaceScratch& scratch, const LogitRow& row, const float* maxima,
                                              const float* bounds, int32_t groups, float scale, const Noise* noise,
                                              int32_t count, const Best& last, const Score& score) {
  static_assert(kRacingTokens >= 4 * kGroup && kRacingGroups >= 4, "a span of four groups always fits");
  static_assert(kRoundsBeforeSpans * 8 <= kMostAtOnce, "a best token of each warp and round");
  const int32_t threads = static_cast<int32_t>(block_size().x), warps = threads / 32;
  const int32_t thread = static_cast<int32_t>(thread_rank());
  // One round more than needed: a higher score dismisses more groups. A single winner's is high enough.
  int32_t rounds = count == 1 ? 1 : (count + warps - 1) / warps + 1;
  if (rounds * warps > kMostAtOnce) rounds = kMostAtOnce / warps;
  Best examined{kInfinity, -1};
  float reached = -kInfinity;
  int32_t found = 0;
#pragma unroll 1
  for (int32_t begin = 0, span = groups, round = 0; begin < groups;) {
    const int32_t end = begin + span < groups ? begin + span : groups;
#pragma unroll 1
    for (; round < rounds; ++round) {
      Best bound{-kInfinity, INT32_MAX};  // the highest of the warp's share, behind the group examined last
      for_each_four_groups<1>(bounds, 0, groups, threads, [&](int32_t group, const float (&four)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Best candidate{four[i], group + i};
          if (is_better(candidate, bound) && is_better(examined, candidate)) bound = candidate;
        }
      });
      examined = best_of_warp(bound);
      Best best{-kInfinity, -1};
      if (examined.score > -kInfinity) best = best_of_group(row, noise, examined.id, last, score);
      if (lane_index() == 0) scratch.group_bests[round * warps + static_cast<int32_t>(warp_index())] = best.score;
    }
    if (thread == 0) scratch.groups = scratch.tokens = scratch.keyed = 0;
    sync_block();
    if (begin == 0) reached = ranked_of_few(scratch.group_bests, rounds * warps, count);
    for_each_four_groups<1>(bounds, begin, end, threads, [&](int32_t group, const float (&four)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (four[i] > -kInfinity && four[i] >= reached) {
          const int32_t place = atomic_add(&scratch.groups, 1);
          if (place < kRacingGroups) scratch.group_list[place] = group + i;
        }
      }
    });
    sync_block();
    const int32_t listed = scratch.groups;
    if (listed <= kRacingGroups) list_tokens(scratch, row, maxima, bounds, scale, reached, nullptr);
    sync_block();
    const int32_t tokens = scratch.tokens;
    if (listed > kRacingGroups || tokens > kRacingTokens) {
      if (begin == 0 && span == groups && listed > kRacingGroups && rounds < kRoundsBeforeSpans) {
        ++rounds;
      } else {  // a span that needs about half of the lists' room
        span = listed > kRacingGroups ? span / 2 * kRacingGroups / listed : span / 2 * kRacingTokens / tokens;
        span = span < 4 ? 4 : span / 4 * 4;
      }
      sync_block();  // all have read the counters
      continue;
    }
    if (thread < found) scratch.keys[atomic_add(&scratch.keyed, 1)] = scratch.best[thread];
    found = rank_tokens(scratch, noise, count, last, score, reached);
    if (found == count) reached = larger(reached, logit_of_key(scratch.best[count - 1]));
    if (2 * tokens <= kRacingTokens) span *= 2;
    begin = end;
  }
  return found;
}

}  // namespace pass_ext::gpu
