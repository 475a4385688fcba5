// The offered tokens of a look-ahead row as a warp works on them, and the report of a step, for the kernel of
// next.cuh. The formulas: core/next.h.
#pragma once

#include <cstdint>

#include "core/next.h"
#include "cuda/block.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

PASS_EXT_DEVICE uint64_t sum_words_of_warp(uint64_t value) {
  for (int step = 16; step > 0; step /= 2) value += shuffle_xor(value, step);
  return value;
}

// The offered tokens of one row with their scores, worked on by a warp: the `List` of core/next.h. A lane owns every
// 32nd of them.
struct WarpOffers {
  const int64_t* tokens;
  float* scores;
  int32_t count;

  PASS_EXT_DEVICE Offer at(int32_t k) const { return {scores[k], static_cast<int32_t>(tokens[k])}; }

  PASS_EXT_DEVICE Offer best(const Offer& last) const {
    Best best{-kInfinity, -1};
    for (int32_t k = static_cast<int32_t>(lane_index()); k < count; k += 32) {
      const Offer offer = at(k);
      if (offer.score > -kInfinity && ranks_before(last, offer) &&
          (best.id < 0 || ranks_before(offer, {best.score, best.id})))
        best = {offer.score, offer.id};
    }
    best = best_of_warp(best);
    return {best.score, best.id};
  }

  template <typename Term>
  PASS_EXT_DEVICE uint64_t sum(const Term& term) const {
    uint64_t sum = 0;
    for (int32_t k = static_cast<int32_t>(lane_index()); k < count; k += 32)
      if (scores[k] > -kInfinity) sum += term(at(k));
    return sum_words_of_warp(sum);
  }

  template <typename Score>
  PASS_EXT_DEVICE void replace(const Score& score) {
    for (int32_t k = static_cast<int32_t>(lane_index()); k < count; k += 32) scores[k] = score(at(k));
  }

  // A lane calls function for the tokens that it owns.
  template <typename Function>
  PASS_EXT_DEVICE void each(const Function& function) const {
    for (int32_t k = static_cast<int32_t>(lane_index()); k < count; k += 32)
      if (scores[k] > -kInfinity) function(k, at(k));
  }

  PASS_EXT_DEVICE int32_t place_of(const Offer& offer) const {
    uint32_t place = ~0u;
    for (int32_t k = static_cast<int32_t>(lane_index()); k < count && place == ~0u; k += 32)
      if (tokens[k] == offer.id && scores[k] == offer.score) place = static_cast<uint32_t>(k);
    return static_cast<int32_t>(reduce_min(place));
  }
};

// In the order of core/next.h: a lane is a partial sum.
PASS_EXT_DEVICE float product_of_warp(const float* left, const float* right, int32_t rank) {
  float sum = 0.0f;
  for (int32_t i = static_cast<int32_t>(lane_index()); i < rank; i += kPartialProducts)
    sum = fused(left[i], right[i], sum);
  for (int step = kPartialProducts / 2; step > 0; step /= 2) sum += shuffle_xor(sum, step);
  return sum;
}

// A warp: the score of offered token k. given: the slot's own scores; left: the parent's row of transition scores.
PASS_EXT_DEVICE void score_offered(const NextProblem& problem, const WarpOffers& offers, const float* given,
                                   const float* left, int32_t k) {
  const int64_t token = offers.tokens[k];
  float score = -kInfinity;
  if (has_transition(problem, token))
    score = given[k] + product_of_warp(left, problem.right + token * problem.right_stride, problem.rank);
  if (static_cast<int32_t>(lane_index()) == k % 32) offers.scores[k] = score;  // the lane that owns it
}

// All threads of a request's block: the report of its step.
template <int kThreads>
PASS_EXT_DEVICE void report_step(const NextProblem& problem, int64_t request, const NextRoot& root, int32_t drafted) {
  int64_t* const report = problem.report + request * (kReportNumbers + problem.report_width);
  if (thread_rank() == 0) {
    report[0] = root.at_limit ? -1 : problem.num_accepted[request];
    report[1] = problem.status[request];
    report[2] = drafted;
  }
  for (int32_t i = thread_rank(); i < problem.report_width; i += kThreads)
    report[kReportNumbers + i] = i < problem.width ? problem.emitted[request * problem.width + i] : -1;
}

}  // namespace pass_ext::gpu
