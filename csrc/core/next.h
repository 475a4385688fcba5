// The rows of the next step from the accept result of this one, request by request: the problem as raw pointers, and
// the arithmetic on which both devices agree to the bit.
//   length += accepted + 1,  prefix = length - 1        unless length >= limit: then nothing changes
//   root's token = emitted[accepted],  position of a row = length - 1 + its depth
//   score of an offered token = its slot's score + left[parent's token] · right[token] + recall
// At a temperature the tokens below a parent race, with the target's own noise at their position, in the distribution
// over the offered tokens. What a text recalls is that of core/recall.h; the emitted tokens are written behind the
// text. Which rows there are, and which of them offer: core/next_tree.h.
#pragma once

#include <cstdint>

#include "core/distribution.h"
#include "core/noise.h"
#include "core/platform.h"
#include "core/recall.h"
#include "core/scalar.h"
#include "core/tree.h"

namespace pass_ext {

constexpr int64_t kMostLength = INT32_MAX - 2 * kMaxTreeNodes;  // so that no position leaves int32
// In front of the emitted tokens: accepted, status, drafted, rows of the next step, nodes with a token among them.
constexpr int kReportNumbers = 5;

struct NextProblem {
  // the step that was judged
  const int64_t* emitted;       // [requests, width]
  const int32_t* path;          // [requests, width]
  const int32_t* num_accepted;  // [requests]
  const int32_t* status;        // [requests]
  int32_t width;
  // the tokens that its look-ahead rows offer
  const int64_t* offered;  // [requests, slots, count], or null
  const float* scores;     // the same shape
  const float *left, *right;
  int64_t left_stride, right_stride, vocabulary;
  int32_t slots, count, rank;
  SamplingParameterArrays sampling;
  const int64_t* seeds;
  // the state
  const int64_t* limits;  // [requests]
  int64_t* rows;          // ids, tokens and positions, [3, requests, row_count]
  int64_t* lengths;       // [requests]
  int32_t* prefix_lens;   // [requests]
  int64_t* report;        // [requests, kReportNumbers + report_width]
  int64_t* text;          // [requests, text_room], or null: nothing is recalled
  int64_t requests, text_room;
  int32_t row_count;     // rows of a request
  int32_t report_width;  // emitted tokens that it has room for
};

// The numbers of row `row` of request `request`.
PASS_EXT_HOST_DEVICE int64_t* id_of(const NextProblem& problem, int64_t request, int32_t row) {
  return problem.rows + request * problem.row_count + row;
}
PASS_EXT_HOST_DEVICE int64_t* token_of(const NextProblem& problem, int64_t request, int32_t row) {
  return id_of(problem, problem.requests + request, row);
}
PASS_EXT_HOST_DEVICE int64_t* position_of(const NextProblem& problem, int64_t request, int32_t row) {
  return id_of(problem, 2 * problem.requests + request, row);
}

// A request's move to its next root.
struct NextRoot {
  bool moves;
  bool at_limit;   // before the step: nobody wants its tokens
  int64_t token;   // of the root
  int64_t length;  // of the text, the root included
  int32_t last;    // the last accepted node, or -1
};

PASS_EXT_HOST_DEVICE NextRoot next_root(const NextProblem& problem, int64_t request) {
  const int64_t limit = problem.limits[request], known = problem.lengths[request];
  const int64_t length = known < 0 ? 0 : known < kMostLength ? known : kMostLength;
  const int32_t accepted = problem.num_accepted[request];
  NextRoot root{false, length >= limit, *id_of(problem, request, 0), length, -1};
  if (root.at_limit || accepted < 0 || accepted >= problem.width) return root;
  const int64_t place = request * problem.width + accepted, token = problem.emitted[place];
  if (token < 0) return root;
  root.moves = true;
  root.token = token;
  root.length += accepted + 1;
  root.last = problem.path[place];
  return root;
}

// Writes emitted token `i` of a request that moves into its text; tokens without a column are left out.
PASS_EXT_HOST_DEVICE void write_text(const NextProblem& problem, int64_t request, const NextRoot& root, int32_t i) {
  const int64_t place = root.length - 1 - problem.num_accepted[request] + i;
  if (place < problem.text_room)
    problem.text[request * problem.text_room + place] = problem.emitted[request * problem.width + i];
}

PASS_EXT_HOST_DEVICE RecallText text_of(const NextProblem& problem, int64_t request, const NextRoot& root) {
  return recall_text(problem.text + request * problem.text_room, root.length, problem.text_room);
}

// The last tokens of a node's path. token(node), parent(node): of a node behind the root, number 0.
template <typename Token, typename Parent>
PASS_EXT_HOST_DEVICE RecallContext path_behind(const RecallText& text, const NextRoot& root, int32_t node,
                                               const Token& token, const Parent& parent) {
  RecallContext context;
  int64_t place = root.length - 1;
  for (int32_t n = 0; n < kRecallTokens; ++n) {
    if (node > 0) {
      context.last[n] = token(node);
      node = parent(node);
    } else {
      context.last[n] = place >= text.begin && place < text.end ? text.tokens[place] : -1;
      --place;
    }
  }
  return context;
}

PASS_EXT_HOST_DEVICE bool has_transition(const NextProblem& problem, int64_t token) {
  return token >= 0 && token < problem.vocabulary;
}

// left · right has one order: number i is added to partial sum i % kPartialProducts, in the order of i and fused; then
// the upper half of the partial sums is added to the lower half until one is left.
constexpr int kPartialProducts = 32;

// A token and its score. Larger scores come first, lower ids among equals.
struct Offer {
  float score;
  int32_t id;
};
PASS_EXT_HOST_DEVICE bool ranks_before(const Offer& a, const Offer& b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}
PASS_EXT_HOST_DEVICE Offer before_all() { return {kInfinity, -1}; }

// Turns the scores of the offered tokens into those of the race below one parent; at temperature 0 they stay. `List`
// works on them with all threads that share it: best(last) is the best offer behind `last`, id -1 if there is none,
// sum(term) adds term(offer), replace(score) sets every score.
template <typename List>
PASS_EXT_HOST_DEVICE void race(List& list, const NextProblem& problem, int64_t request, int64_t position) {
  if (problem.sampling.temperature == nullptr || is_greedy(problem.sampling.temperature[request])) return;
  const SamplingParameters parameters = parameters_of(problem.sampling, request, problem.count, 0.0f);
  const Offer most = list.best(before_all());
  if (most.id < 0) return;
  const float scale = parameters.scale;
  Offer cut{-kInfinity, INT32_MAX};  // the last offer of the support
  if (parameters.top_k > 0) {
    Offer last = most;
    for (int32_t i = 1; i < parameters.top_k && last.id >= 0; ++i) last = list.best(last);
    if (last.id >= 0) cut = last;
  }
  const auto mass = [&](const Offer& offer) -> uint64_t {
    if (ranks_before(cut, offer)) return 0;
    return integer_mass(exponential((offer.score - most.score) * scale));
  };
  if (parameters.top_p < 1.0f) {
    const uint64_t needed = mass_to_reach(parameters.top_p, static_cast<double>(list.sum(mass)) / kMassUnit);
    uint64_t reached = mass(most);
    Offer last = most;
    while (reached < needed) {
      const Offer next = list.best(last);
      if (next.id < 0) break;
      last = next;
      reached += mass(next);
    }
    if (ranks_before(last, cut)) cut = last;
  }
  const float floor = parameters.min_p > 0.0f ? logarithm(maximum(parameters.min_p, 0x1p-126f)) : -kInfinity;
  const uint64_t seed = problem.seeds == nullptr ? 0 : static_cast<uint64_t>(problem.seeds[request]);
  const Noise noise{seed, position, Purpose::coupled, 0, 0};
  list.replace([&](const Offer& offer) {
    const float log_weight = (offer.score - most.score) * scale;
    if (!(offer.score > -kInfinity) || ranks_before(cut, offer) || !(log_weight >= floor)) return -kInfinity;
    return fused(offer.score - most.score, scale, 0.0f - log_noise(noise, offer.id));
  });
}

}  // namespace pass_ext
