// Log probabilities of the tokens that an accept step emitted, and of the most probable tokens beside each of them; and
// the support that each was drawn from:
//   raw(v)        z_v - ln sum exp(z)   of the logits as they are: no mask, temperature or filter
//   processed(v)  ln p(v)               p as the rule draws from it, see core/distribution.h; -inf outside its support
//   support       the v with p(v) > 0   in ascending order: allowed, within the filters' cut, z_v > -inf
// The walk leaves the distribution of every row that it described in `described`, so only sums that no decision needed
// are computed here. An entry without a token has -inf, and token -1.
#pragma once

#include <cstdint>

#include "core/accept.h"
#include "core/distribution.h"
#include "core/platform.h"

namespace pass_ext {

constexpr int32_t kMaxTopLogprobs = 64;

// The results: null without log probabilities.
struct LogprobArrays {
  float *raw, *processed;  // [requests, max_depth + 1]
  int64_t* top_tokens;     // [requests, max_depth + 1, count], the most probable first
  float *top_raw, *top_processed;
  int32_t count;
};

// The supports: null without. More tokens than there is room for are counted, and none is listed.
struct SupportArrays {
  int32_t* counts;  // [requests, max_depth + 1]; 0 where no token was emitted
  int32_t* ids;     // [requests, max_depth + 1, room], -1 behind the last
  int32_t room;
};

// One emitted token: its node's row, with the mask and without, and the row's distribution as the walk left it.
struct EmittedToken {
  int64_t place;  // among the results
  int64_t token;  // -1: none was emitted here
  LogitRow row, unmasked;
  Distribution processed;
};

// Without sums: the raw distribution of a row whose largest logit is known.
PASS_EXT_HOST_DEVICE Distribution raw_distribution(float maximum) {
  return {maximum, 1.0f, -kInfinity, -1, 0.0f, 0.0f, 0};
}

// True if a distribution is the softmax of its row's logits, unless a mask forbids some of them.
PASS_EXT_HOST_DEVICE bool is_softmax(const Distribution& distribution) {
  return distribution.scale == 1.0f && distribution.cut == -kInfinity;
}

PASS_EXT_HOST_DEVICE bool has_mass(const Distribution& distribution) { return distribution.inverse_mass > 0.0f; }

PASS_EXT_HOST_DEVICE float log_probability(const Distribution& distribution, const LogitRow& row, int64_t token) {
  const int32_t id = static_cast<int32_t>(token);
  const float logit = logit_at(row, id);
  return in_support(distribution, logit, id) ? log_weight(distribution, logit) - distribution.log_mass : -kInfinity;
}

// The token that a request emitted at a depth, and its row. At temperature 0 the support is one token: its mass is 1.
PASS_EXT_HOST_DEVICE EmittedToken emitted_token(const AcceptProblem& problem, int64_t request, int32_t depth) {
  const int64_t place = request * (int64_t{problem.max_depth} + 1) + depth;
  EmittedToken emitted{place, -1, {}, {}, {}};
  const int32_t node = problem.path[place];
  if (node < 0 || problem.emitted[place] < 0) return emitted;
  emitted.token = problem.emitted[place];
  emitted.row = request_of(problem, request).target_row(node);
  emitted.unmasked = emitted.row;
  emitted.unmasked.allowed = nullptr;
  if (emitted.row.allowed != nullptr) emitted.unmasked.slot += 2 * problem.nodes;  // behind all rows of the step
  emitted.processed = problem.described[emitted.row.slot];
  const bool greedy =
      problem.target_sampling.temperature == nullptr || is_greedy(problem.target_sampling.temperature[request]);
  if (greedy) set_mass(emitted.processed, 1.0);
  return emitted;
}

}  // namespace pass_ext
