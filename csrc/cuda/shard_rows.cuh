// Sweeps over this rank's columns of one row by a block, and the best token of a race: for cuda/shard.cuh.
//
// A race computes the noise of few tokens: a group of 64 counts only if the bound of its largest logit and of its noise
// reaches the best score so far (core/noise.h). Each warp takes 32 groups at a time, a lane knows the bound of one.
#pragma once

#include <cstdint>

#include "core/shard.h"
#include "cuda/block.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kShardThreads = 256;
constexpr int kLoadsAtOnce = 8;

template <typename T>
PASS_EXT_DEVICE void load_logits(const LogitRow& row, int32_t first, int32_t step, int32_t end,
                                 float (&z)[kLoadsAtOnce]) {
  const T* const logits = static_cast<const T*>(row.logits);
#pragma unroll
  for (int i = 0; i < kLoadsAtOnce; ++i) {
    const int32_t id = first + i * step;
    z[i] = id < end && is_allowed(row, id) ? to_float(logits[id]) : -kInfinity;
  }
}

// function(id, logit) for every column in [begin, end), by the threads of a block; a thread's ids ascend.
template <typename Function>
PASS_EXT_DEVICE void each_logit(const LogitRow& row, int32_t begin, int32_t end, const Function& function) {
  const int32_t step = static_cast<int32_t>(block_size().x);
  for (int32_t first = begin + static_cast<int32_t>(thread_rank()); first < end; first += kLoadsAtOnce * step) {
    float z[kLoadsAtOnce];
    if (row.type == LogitType::bfloat16)
      load_logits<bfloat16>(row, first, step, end, z);
    else if (row.type == LogitType::float16)
      load_logits<float16>(row, first, step, end, z);
    else
      load_logits<float>(row, first, step, end, z);
#pragma unroll
    for (int i = 0; i < kLoadsAtOnce; ++i)
      if (first + i * step < end) function(first + i * step, z[i]);
  }
}

// The children of a node that the walk has deleted and that are columns of this rank, in any order.
struct DeletedChildren {
  int32_t count;
  int32_t ids[kMaxTreeNodes];
  float cuts[kMaxTreeNodes];

  // The cut of a token; kNotCut if it was not deleted.
  PASS_EXT_DEVICE float cut_of(int32_t id) const {
    for (int32_t i = 0; i < count; ++i)
      if (ids[i] == id) return cuts[i];
    return kNotCut;
  }
};

PASS_EXT_DEVICE void collect_deleted(const ShardProblem& shard, const AcceptRequest& request, int32_t node,
                                     DeletedChildren& deleted) {
  sync_block();
  if (thread_rank() == 0) deleted.count = 0;
  sync_block();
  const int32_t nodes = request.nodes < kMaxTreeNodes ? request.nodes : kMaxTreeNodes;
  for (int32_t i = node + 1 + static_cast<int32_t>(thread_rank()); i < nodes;
       i += static_cast<int32_t>(block_size().x)) {
    const float cut = shard.state.nodes[request.first + i].cut;
    const int64_t id = request.token(i) - shard.start;
    if (request.parent(i) != node || cut == kNotCut || id < 0 || id >= shard.problem.target.vocabulary) continue;
    const int32_t place = atomic_add(&deleted.count, 1);
    deleted.ids[place] = static_cast<int32_t>(id);
    deleted.cuts[place] = cut;
  }
  sync_block();
}

// A race over the weights of a row's tokens; without noise a ranking by log weights.
struct ShardRace {
  LogitRow row;
  Distribution distribution;
  bool has_noise;
  Noise noise;
  const Judge* judge;              // null: the weights are those of p
  float beta;                      // for a judge: of (p - beta q)+
  const DeletedChildren* deleted;  // null: none is
  Best behind;                     // only tokens that come after it count
};

PASS_EXT_DEVICE float score_of(const ShardRace& race, int32_t id) {
  const float z = logit_at(race.row, id), cut = race.deleted == nullptr ? kNotCut : race.deleted->cut_of(id);
  const Distribution& p = race.distribution;
  if (race.judge == nullptr) {
    if (cut != kNotCut || !in_support(p, z, id)) return -kInfinity;
    return race_score(z, p.maximum, p.scale, race.has_noise ? log_noise(race.noise, id) : 0.0f);
  }
  const float q = probability(race.judge->q, logit_at(race.judge->q_row, id), id);
  const float beta = cut == kNotCut ? race.beta : cut;
  const float left = beta == kInfinity ? 0.0f : residual_weight(probability(p, z, id), q, beta);
  return left < 0x1p-126f ? -kInfinity : logarithm(left) - log_noise(race.noise, id);
}

// The best of the tokens behind `behind`, by a block. `is_bad`: a logit is NaN or +inf; then there is no best.
PASS_EXT_DEVICE_CALL Best best_of_columns(BlockScratch& scratch, const ShardRace& race, bool& is_bad) {
  const int32_t vocabulary = race.row.vocabulary, groups = groups_of(vocabulary), lane = lane_index();
  const float offset = 0.001f - (race.judge == nullptr ? 0.0f : race.distribution.log_mass);
  Best best{-kInfinity, -1};
  bool bad = false;
  for (int32_t first = 32 * warp_index(); first < groups; first += 32 * warps_in_block()) {
    float mine = -kInfinity;  // the largest logit of group first + lane
#pragma unroll 8
    for (int32_t k = 0; k < 32; ++k) {
      const int32_t id = (first + k) * kGroup + lane;
      const float low = id < vocabulary ? logit_at(race.row, id) : -kInfinity;
      const float high = id + 32 < vocabulary ? logit_at(race.row, id + 32) : -kInfinity;
      bad = bad || !(low < kInfinity) || !(high < kInfinity);
      const float largest = largest_of_warp(larger(low, high));
      if (lane == k) mine = largest;
    }
    float bound = -kInfinity;
    if (first + lane < groups && mine > -kInfinity && !(mine < race.distribution.cut)) {
      const float log_e = race.has_noise ? log_first(race.noise, first + lane) : 0.0f;
      bound = race_score(mine, race.distribution.maximum, race.distribution.scale, log_e) + offset;
    }
    for (;;) {
      const Best next = best_of_warp({bound, lane});
      if (next.score == -kInfinity || next.score < best.score) break;
      if (lane == next.id) bound = -kInfinity;
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t id = (first + next.id) * kGroup + 32 * half + lane;
        Best token{id < vocabulary ? score_of(race, id) : -kInfinity, id};
        if (token.score == -kInfinity || !is_better(race.behind, token)) token = {-kInfinity, -1};
        token = best_of_warp(token);
        if (is_better(token, best)) best = token;
      }
    }
  }
  is_bad = sync_block_count(bad) != 0;
  if (is_bad || best.score == -kInfinity) best = {-kInfinity, -1};
  return best_of_block(scratch, best);
}

}  // namespace pass_ext::gpu
