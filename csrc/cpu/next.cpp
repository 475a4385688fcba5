// torch.ops.pass_ext.next_rows_ on the CPU: values checked, parallel split, registration. The formulas: core/next.h;
// the scores: cpu/next_kernels-inl.h.
#include "host/next.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "cpu/workers.h"

#define PASS_EXT_KERNELS "cpu/next_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

constexpr const char* kOp = "next_rows_";

// Below this many products of transition scores a second thread costs more than it saves.
constexpr int64_t kProductsPerTask = 256 * 1024;

// The offered tokens of one row with their scores: the `List` of core/next.h.
struct CpuOffers {
  const int64_t* tokens;
  std::vector<float> scores;

  Offer at(size_t k) const { return {scores[k], static_cast<int32_t>(tokens[k])}; }

  Offer best(const Offer& last) const {
    Offer best{-kInfinity, -1};
    for (size_t k = 0; k < scores.size(); ++k) {
      const Offer offer = at(k);
      if (offer.score > -kInfinity && ranks_before(last, offer) && (best.id < 0 || ranks_before(offer, best)))
        best = offer;
    }
    return best;
  }

  template <typename Term>
  uint64_t sum(const Term& term) const {
    uint64_t sum = 0;
    for (size_t k = 0; k < scores.size(); ++k)
      if (scores[k] > -kInfinity) sum += term(at(k));
    return sum;
  }

  template <typename Score>
  void replace(const Score& score) {
    for (size_t k = 0; k < scores.size(); ++k) scores[k] = score(at(k));
  }
};

void check_values(const NextProblem& problem) {
  for (int32_t row = 0; row < problem.row_count; ++row) {
    const int32_t parent = problem.parents[row];
    if (row == 0 ? parent != -1 : parent < 0 || parent >= row)
      refuse(kOp, "parents must be -1 for the root and an earlier row for each other row, got ", parent, " at ", row);
  }
  for (int32_t node = 0; problem.offered && node < problem.judged_nodes; ++node)
    if (problem.groups[node] < -1 || problem.groups[node] >= problem.slots)
      refuse(kOp, "groups must be in [-1, ", problem.slots, ") (the look-ahead rows of offered), got ",
             problem.groups[node], " at ", node);
  for (int64_t b = 0; b < problem.requests; ++b) {
    if (problem.lengths[b] < 0 || problem.lengths[b] > kMostLength)
      refuse(kOp, "lengths must be in [0, ", kMostLength, "], got ", problem.lengths[b], " at ", b);
    const int32_t accepted = problem.num_accepted[b];
    if (accepted < -1 || accepted >= problem.width)
      refuse(kOp, "num_accepted must be in [-1, ", problem.width, ") (path has ", problem.width, " columns), got ",
             accepted, " at ", b);
    const int32_t last = accepted < 0 ? -1 : problem.path[b * problem.width + accepted];
    if (problem.offered && last >= problem.judged_nodes)
      refuse(kOp, "path must be below ", problem.judged_nodes, " (the nodes of groups), got ", last, " at [", b, ", ",
             accepted, "]");
  }
}

void report_step(const NextProblem& problem, int64_t request, const NextRoot& root) {
  int64_t* const report = problem.report + request * (kReportNumbers + problem.report_width);
  int64_t drafted = 0;
  for (int32_t row = 1; row < problem.row_count; ++row) drafted += *token_of(problem, request, row) >= 0;
  report[0] = root.at_limit ? -1 : problem.num_accepted[request];
  report[1] = problem.status[request];
  report[2] = drafted;
  for (int32_t i = 0; i < problem.report_width; ++i)
    report[kReportNumbers + i] = i < problem.width ? problem.emitted[request * problem.width + i] : -1;
}

// Writes the tokens of the nodes below the root. Parents come first.
void fill_nodes(const NextProblem& problem, int64_t request, const NextRoot& root, CpuOffers& offers) {
  for (int32_t node = 1; node < problem.nodes; ++node) *token_of(problem, request, node) = -1;
  for (int32_t parent = 0; parent < problem.nodes; ++parent) {
    int32_t child = parent + 1;
    while (child < problem.nodes && problem.parents[child] != parent) ++child;
    const int64_t before = parent == 0 ? root.token : *token_of(problem, request, parent);
    if (child == problem.nodes || before < 0) continue;
    const int32_t depth = depth_of_row(problem, parent);
    offers.tokens = offered_at(problem, request, root, depth);
    if (!offers.tokens) continue;
    const bool is_scored = problem.scores != nullptr;
    if (is_scored) {
      if (!has_transition(problem, before)) continue;
      const float* const scores = problem.scores + (offers.tokens - problem.offered);
      offers.scores.resize(problem.count);
      PASS_EXT_AT_ISA(score_offered(problem, offers.tokens, scores, problem.left + before * problem.left_stride,
                                    offers.scores.data()));
      race(offers, problem, request, root.length + depth);
    }
    Offer last = before_all();
    for (int32_t number = 0; child < problem.nodes; ++child) {
      if (problem.parents[child] != parent) continue;
      if (is_scored && number > 0 && last.id < 0) break;  // nothing is left
      if (is_scored) last = offers.best(last);
      *token_of(problem, request, child) = is_scored                ? last.id
                                           : number < problem.count ? std::max<int64_t>(offers.tokens[number], -1)
                                                                    : -1;
      ++number;
    }
  }
}

void advance(const NextProblem& problem, int64_t request, CpuOffers& offers) {
  const NextRoot root = next_root(problem, request);
  report_step(problem, request, root);
  problem.lengths[request] = root.length;
  problem.prefix_lens[request] = static_cast<int32_t>(root.length - 1);
  *id_of(problem, request, 0) = *token_of(problem, request, 0) = root.token;
  fill_nodes(problem, request, root, offers);
  for (int32_t node = 1; node < problem.nodes; ++node)
    *id_of(problem, request, node) = std::max<int64_t>(*token_of(problem, request, node), 0);
  for (int32_t row = 0; row < problem.row_count; ++row)
    *position_of(problem, request, row) = root.length - 1 + depth_of_row(problem, row);
}

void next_on_cpu(const NextProblem& problem, const Tensor&) {
  check_values(problem);
  const auto run = [&](int64_t begin, int64_t end) {
    CpuOffers offers;
    for (int64_t request = begin; request < end; ++request) advance(problem, request, offers);
  };
  const int64_t products = int64_t{problem.nodes} * problem.count * std::max(problem.rank, 1);
  const int64_t requests_per_task = std::max<int64_t>(1, kProductsPerTask / std::max<int64_t>(1, products));
  for_ranges(problem.requests, requests_per_task, run);
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CPU, library) {
  library.impl("next_rows_", TORCH_BOX(&pass_ext::next_rows<pass_ext::next_on_cpu>));
}
