// A race whose scan has crowned champions (row_champion.cuh), finished by a block: the best champion is nearly always
// the winner, and what is left to look at are chunks with a rival. Their groups are bounded as in row_race.cuh.
#pragma once

#include <cstdint>

#include "core/distribution.h"
#include "core/noise.h"
#include "cuda/block.cuh"
#include "cuda/primitives.cuh"
#include "cuda/row_champion.cuh"
#include "cuda/row_race.cuh"
#include "cuda/row_scan.cuh"
#include "cuda/row_select.cuh"
#include "cuda/rows_plan.cuh"

namespace pass_ext::gpu {

PASS_EXT_DEVICE Champion load_champion(const Champion* from) {
  const Bytes16 bytes = load16(from);
  return {float_of(bytes.word[0]), float_of(bytes.word[1]), static_cast<int32_t>(bytes.word[2]),
          float_of(bytes.word[3])};
}

// How many of `count` numbers in shared memory, a multiple of four, are at least `value`.
PASS_EXT_DEVICE int32_t count_at_least(const float* values, int32_t count, float value) {
  int32_t found = 0;
#pragma unroll 4
  for (int32_t i = 0; i < count; i += 4) {
    const Bytes16 four = load16(values + i);
#pragma unroll
    for (int k = 0; k < 4; ++k) found += float_of(four.word[k]) >= value;
  }
  return found;
}

// A thread lists those groups of one chunk, from `first` on, whose bounds reach `reached`, and writes their bounds.
PASS_EXT_DEVICE_CALL void list_groups(RaceScratch& scratch, const RowSummary& summary, const float* log_firsts,
                                      float* bounds, const Distribution& distribution, float offset, int32_t first,
                                      float reached) {
  constexpr int kAtOnce = 2;  // pairs of loads: more would not stay in registers
#pragma unroll 1
  for (int32_t base = first; base < first + kGroupsPerChunk && base < summary.groups; base += 4 * kAtOnce) {
    Bytes16 largest[kAtOnce], log_e[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int32_t group = base + 4 * k < summary.groups ? base + 4 * k : base;
      largest[k] = load16(summary.maxima + group);
      log_e[k] = load16(log_firsts + group);
    }
#pragma unroll
    for (int i = 0; i < 4 * kAtOnce; ++i) {
      const float bound = bound_of_group(distribution, float_of(largest[i / 4].word[i % 4]),
                                         float_of(log_e[i / 4].word[i % 4]), offset);
      if (base + i >= summary.groups || !(bound > -kInfinity && bound >= reached)) continue;
      bounds[base + i] = bound;
      const int32_t place = atomic_add(&scratch.groups, 1);
      if (place < kRacingGroups) scratch.group_list[place] = base + i;
    }
  }
}

// A block finds the `count` best tokens of a race, up to kMostAtOnce, from the champions of the row's chunks; their
// keys are in scratch.best, in order. Returns `count`; or -1 if they do not tell: there are fewer, or too much is left
// to look at. The winners reach the `count`-th best champion, so they are champions or in chunks that have a rival.
// `bounds` [groups] gets those of the groups listed. `noise`: what the scan has drawn. No score(id, logit, ln E) is
// above the token's plain score plus `offset`.
template <typename Score>
PASS_EXT_DEVICE_CALL int32_t best_of_champions(RaceScratch& scratch, const LogitRow& row,
                                               const RowsWorkspace& workspace, float* bounds,
                                               const Distribution& distribution, const Noise& noise, int32_t count,
                                               const Score& score, float offset) {
  constexpr int kChunks = 2;  // of a thread
  const RowSummary summary = summary_of(workspace, row.slot);
  const RowRace race = race_of(workspace, row.slot);
  const int32_t thread = static_cast<int32_t>(thread_rank()), threads = static_cast<int32_t>(block_size().x);
  const int32_t chunks = chunks_of(row.vocabulary);
  if (chunks > kChunks * threads) return -1;
  Champion champion[kChunks];
  float scores[kChunks] = {};
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    champion[k].id = -1;
    if (thread + k * threads < chunks) champion[k] = load_champion(race.champions + thread + k * threads);
  }
#pragma unroll 1
  for (int k = 0; k < kChunks; ++k) {  // each champion moves to the front in turn: one copy of the code below
    const Champion front = champion[0];
    champion[0] = champion[1];
    champion[1] = front;
    scores[0] = scores[1];
    scores[1] = front.id < 0 ? -kInfinity : score(front.id, front.logit, front.log_e);
  }
  const float best = larger(scores[0], scores[1]);
  sync_block();
  if (thread == 0) {
    scratch.reached = 0;
    scratch.groups = scratch.tokens = scratch.keyed = 0;
  }
  scratch.champions[thread] = best;
  sync_block();
  const int32_t as_good = count == 1 ? 1 : count_at_least(scratch.champions, threads, best);
  const float enough = largest_of_warp(as_good >= count ? best : -kInfinity);
  if (lane_index() == 0) atomic_max(&scratch.reached, ordered_bits(enough));
  sync_block();
  const float reached = float_of_ordered(scratch.reached);
  if (!(reached > -kInfinity)) return -1;
#pragma unroll 1
  for (int k = 0; k < kChunks; ++k) {  // again
    const int32_t chunk = thread + k * threads;
    if (chunk < chunks) {
      if (scores[0] >= reached) {
        const int32_t place = atomic_add(&scratch.keyed, 1);
        if (place < kMostAtOnce) scratch.keys[place] = key_of(scores[0], champion[0].id);
      }
      const float plain = champion[0].id < 0
                              ? -kInfinity
                              : PlainScore{distribution}(champion[0].id, champion[0].logit, champion[0].log_e);
      if (has_rival(champion[0], plain + offset, reached))
        list_groups(scratch, summary, race.log_firsts, bounds, distribution, offset, chunk * kGroupsPerChunk, reached);
    }
    champion[0] = champion[1];
    scores[0] = scores[1];
  }
  sync_block();
  if (scratch.groups > kRacingGroups || scratch.keyed > kMostAtOnce) return -1;
  if (scratch.groups > 0) {
    list_tokens(scratch, row, summary.maxima, bounds, distribution.scale, reached, race.champions);
    sync_block();
    if (scratch.tokens > kRacingTokens) return -1;
  }
  return rank_tokens(scratch, &noise, count, {kInfinity, -1}, score, reached);
}

}  // namespace pass_ext::gpu
