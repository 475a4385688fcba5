// The Python module _accept_core: the walk of csrc/core/accept_walk.h on one tree of drafts, for every way that its
// coins can fall (enumerated/core/noise.h). Rows are summed in plain loops.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "core/accept_walk.h"
#include "cpu/rows.h"

namespace pass_ext {
namespace {

// Nodes and cuts are stored as on the CPU.
class EnumeratedRows : public CpuRows {
 public:
  std::vector<double> last;  // the distribution of the last token

  Distribution describe(const LogitRow& row, const SamplingParameters& parameters, bool) {
    if (has_filter(parameters)) throw std::invalid_argument("rows are not filtered here");
    Distribution distribution{-kInfinity, parameters.scale, -kInfinity, -1, 0.0f, 0.0f, 0};
    for (int32_t id = 0; id < row.vocabulary; ++id)
      distribution.maximum = maximum(distribution.maximum, logit_at(row, id));
    double mass = 0.0;
    for (int32_t id = 0; id < row.vocabulary; ++id) mass += std::exp(log_weight(distribution, logit_at(row, id)));
    set_mass(distribution, mass);
    return distribution;
  }

  double entropy(const Judge&) { throw std::invalid_argument("typical is not exact"); }

  // A script chooses from p: the walk is enumerated, not the quantile, which test_accept.py compares with the law.
  int32_t invert(const Judge& judge, uint64_t) {
    std::vector<double> law(judge.p_row.vocabulary);
    for (int32_t id = 0; id < judge.p_row.vocabulary; ++id) law[id] = p_of(judge, id);
    const size_t token = script->choose(law);
    last.assign(law.size(), 0.0);
    last[token] = 1.0;
    return static_cast<int32_t>(token);
  }

  ResidualSums residual_sums(const Judge& judge, const AcceptRequest& request) const {
    ResidualSums sums{0.0, 0.0};
    for (int32_t id = 0; id < judge.p_row.vocabulary; ++id) {
      const float cut = cut_of(judge, request, id);
      sums.weight += left(judge, id, cut == kNotCut ? static_cast<float>(judge.beta) : cut);
      if (cut == kNotCut) sums.remaining += q_of(judge, id);
    }
    return sums;
  }

  void overlap_sums(const Judge& judge, const float* inverse_rho, double* sums) const {
    for (int k = 0; k < kOverlaps; ++k) {
      sums[k] = 0.0;
      for (int32_t id = 0; id < judge.p_row.vocabulary; ++id)
        sums[k] += kseq_overlap(p_of(judge, id), q_of(judge, id), inverse_rho[k]);
    }
  }

  int32_t draw(const Judge& judge, const Weight& weight, const AcceptRequest& request, bool rejected,
               const Noise& noise) {
    last.assign(judge.p_row.vocabulary, 0.0);
    double sum = 0.0;
    for (int32_t id = 0; id < judge.p_row.vocabulary; ++id) {
      const float cut = rejected ? cut_of(judge, request, id) : kNotCut;
      if (cut != kNotCut)
        last[id] = weight.kind == Weight::plain ? 0.0 : left(judge, id, cut);
      else if (weight.kind == Weight::kseq)
        last[id] = kseq_weight(p_of(judge, id), q_of(judge, id), weight.first, weight.second);
      else
        last[id] = left(judge, id, weight.kind == Weight::plain ? 0.0f : weight.first);
      sum += last[id];
    }
    if (sum < 0x1p-126) return -1;
    for (double& one : last) one /= sum;
    if (noise.purpose != Purpose::coupled) return 0;
    const size_t token = script->choose(last);
    last.assign(last.size(), 0.0);
    last[token] = 1.0;
    return static_cast<int32_t>(token);
  }

 private:
  static float p_of(const Judge& judge, int32_t id) { return probability(judge.p, logit_at(judge.p_row, id), id); }
  static float q_of(const Judge& judge, int32_t id) {
    return judge.has_q ? probability(judge.q, logit_at(judge.q_row, id), id) : 0.0f;
  }
  static double left(const Judge& judge, int32_t id, float beta) {
    return beta == kInfinity ? 0.0f : residual_weight(p_of(judge, id), q_of(judge, id), beta);
  }
  // The beta at which a token of the node's children was cut.
  float cut_of(const Judge& judge, const AcceptRequest& request, int32_t id) const {
    for (int32_t i = judge.node + 1; i < request.nodes; ++i)
      if (request.parent(i) == judge.node && request.token(i) == id && cut(i) != kNotCut) return cut(i);
    return kNotCut;
  }
};

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style | pybind11::array::forcecast>;
using Outcome = std::tuple<double, int32_t, std::vector<double>>;

// (probability, last node, distribution of the token behind it) for everything that coins can do at temperature 1. Node
// i's children were drawn from row i of `draft`, or from no distribution if has_row[i] is 0.
std::vector<Outcome> outcomes(int rule, const std::vector<int32_t>& parents, const std::vector<int64_t>& tokens,
                              const Array<float>& target, const Array<float>& draft,
                              const std::vector<int32_t>& has_row, int max_depth) {
  const int32_t nodes = static_cast<int32_t>(parents.size()), vocabulary = static_cast<int32_t>(target.shape(1));
  const std::vector<int32_t> cu_nodes{0, nodes};
  std::vector<int32_t> rows(nodes), path(max_depth + 1);
  for (int32_t i = 0; i < nodes; ++i) rows[i] = has_row[i] ? i : -1;
  std::vector<int64_t> emitted(max_depth + 1);
  const float temperature = 1.0f;
  int32_t accepted = 0, status = 0;

  AcceptProblem problem{};
  problem.target = {target.data(), nullptr, vocabulary, LogitType::float32, vocabulary};
  problem.draft = {draft.data(), nullptr, vocabulary, LogitType::float32, vocabulary};
  problem.has_draft = true;
  problem.tokens = tokens.data();
  problem.parents = parents.data();
  problem.cu_nodes = cu_nodes.data();
  problem.draft_rows = rows.data();
  problem.draft_row_count = nodes;
  problem.target_sampling.temperature = problem.draft_sampling.temperature = &temperature;
  problem.requests = 1;
  problem.nodes = nodes;
  problem.max_depth = max_depth;
  problem.rule = static_cast<Rule>(rule);
  problem.emitted = emitted.data();
  problem.path = path.data();
  problem.num_accepted = &accepted;
  problem.status = &status;

  std::vector<Outcome> found;
  Script all;
  script = &all;
  do {
    EnumeratedRows walked;
    AcceptWalk<EnumeratedRows>(walked, request_of(problem, 0)).run(true);
    if (status != 0) throw std::runtime_error("status " + std::to_string(status));
    found.push_back({all.probability, path[accepted], walked.last});
  } while (all.next());
  return found;
}

}  // namespace
}  // namespace pass_ext

PYBIND11_MODULE(_accept_core, module) { module.def("outcomes", &pass_ext::outcomes); }
