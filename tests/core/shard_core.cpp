// The Python module _shard_core: the rounds of csrc/core/shard.h, combined by core/shard_combine.h, on one tree of
// drafts, for every way that its coins can fall (enumerated/core/noise.h). Each rank adds its columns in plain loops; a
// race answers with its whole distribution.
#include "core/shard_combine.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <stdexcept>
#include <tuple>
#include <vector>

namespace pass_ext {
namespace {

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style | pybind11::array::forcecast>;
using Outcome = std::tuple<double, int32_t, std::vector<double>>;

struct SingleThread {
  template <typename Function>
  void each(int32_t count, const Function& function) const {
    for (int32_t i = 0; i < count; ++i) function(i);
  }
  void narrow_each(int32_t, ShardSlot*, const Answers&, int64_t, Round) const {
    throw std::invalid_argument("rows are not filtered here");
  }
  template <typename Function>
  void alone(const Function& function) const {
    function();
  }
  void sync() const {}
};

// All ranks of a group. Rank r holds the columns borders[r] to borders[r + 1]; its slices are two columns wide.
struct Group {
  static constexpr int kSlice = 2;
  AcceptProblem problem;
  std::vector<int32_t> borders;
  std::vector<int64_t> words;
  std::vector<double> last;  // the distribution of the token that was drawn last

  int64_t ranks() const { return static_cast<int64_t>(borders.size()) - 1; }
  ShardState state() { return state_at(words.data(), problem.nodes); }

  // A rank's part of the problem: the same rows, from its first column on.
  ShardProblem part(int64_t rank, Round round, uint32_t* answers, const AnswerShape& shape) {
    ShardProblem shard{};
    shard.problem = problem;
    shard.start = borders[rank];
    for (LogitRows* rows : {&shard.problem.target, &shard.problem.draft}) {
      rows->data = static_cast<const float*>(rows->data) + shard.start;
      rows->vocabulary = borders[rank + 1] - shard.start;
    }
    shard.slices = shape.width;
    shard.round = round;
    shard.state = state();
    shard.answers = answers;
    shard.shape = shape;
    return shard;
  }

  // The cut of a token among the children of a node.
  float cut_of(const AcceptRequest& request, int32_t node, int64_t token) {
    for (int32_t i = node + 1; i < request.nodes; ++i)
      if (request.parent(i) == node && request.token(i) == token && state().nodes[i].cut != kNotCut)
        return state().nodes[i].cut;
    return kNotCut;
  }

  static void add(uint32_t& word, double term) {
    word = bits_of(static_cast<float>(static_cast<double>(float_of(word)) + term));
  }

  // p left at a column after rejections with this beta.
  double left(const Judge& judge, int32_t id, float beta) {
    const float p = probability(judge.p, logit_at(judge.p_row, id), id);
    const float q = judge.has_q ? probability(judge.q, logit_at(judge.q_row, id), id) : 0.0f;
    return beta == kInfinity ? 0.0 : residual_weight(p, q, beta);
  }

  void answer_peaks(const ShardProblem& shard, const AcceptRequest& request, int32_t node, int side) {
    uint32_t* const answer = shard.words_at(node + side * problem.nodes);
    float largest = -kInfinity;
    int32_t best = -1;
    for (int32_t id = 0; has_row(request, node, side) && id < shard.problem.target.vocabulary; ++id) {
      const float z = logit_at(row_of(request, node, side), id);
      if (z > largest) best = shard.start + id;
      largest = maximum(largest, z);
    }
    answer[0] = bits_of(largest);
    answer[1] = static_cast<uint32_t>(best);
    answer[2] = bits_of(logit_of_token(shard, request, node, side));
  }

  void answer_masses(const ShardProblem& shard, const AcceptRequest& request, int32_t node, int side) {
    const ShardSlot& slot = state().slots[node + side * problem.nodes];
    if (!is_asked(slot, Round::masses)) return;
    for (int32_t id = 0; id < shard.problem.target.vocabulary; ++id)
      add(shard.words_at(node + side * problem.nodes)[id / kSlice],
          std::exp(log_weight(slot.distribution, logit_at(row_of(request, node, side), id))));
  }

  void answer_residuals(const ShardProblem& shard, const AcceptRequest& request, int32_t node) {
    const ShardNode& asked = state().nodes[node];
    if (asked.asks < 0) return;
    const Judge judge = judge_at(shard, request, node);
    for (int32_t id = 0; id < shard.problem.target.vocabulary; ++id) {
      const float cut = cut_of(request, node, shard.start + id);
      uint32_t* const sums = shard.words_at(node) + id / kSlice * 2;
      add(sums[0], left(judge, id, cut == kNotCut ? asked.beta : cut));
      if (cut == kNotCut) add(sums[1], probability(judge.q, logit_at(judge.q_row, id), id));
    }
  }

  // The distribution of a node's race, over the columns of all ranks; empty if nothing is left.
  std::vector<double> race(const AcceptRequest& request, int32_t node, bool is_over_p) {
    const ShardNode& asked = state().nodes[node];
    std::vector<double> weights;
    double sum = 0.0;
    for (int64_t rank = 0; rank < ranks(); ++rank) {
      const ShardProblem shard = part(rank, Round::races, nullptr, {});
      const Judge judge = judge_at(shard, request_of(shard.problem, 0), node);
      for (int32_t id = 0; id < shard.problem.target.vocabulary; ++id) {
        const bool is_plain = is_over_p || asked.kind == Weight::plain;
        const float cut = asked.rejected == 0 || is_over_p ? kNotCut : cut_of(request, node, shard.start + id);
        const float z = logit_at(judge.p_row, id);
        if (!is_plain)
          weights.push_back(left(judge, id, cut == kNotCut ? asked.first : cut));
        else  // under "coupled" nobody knows the mass
          weights.push_back(cut == kNotCut && in_support(judge.p, z, id) ? std::exp(log_weight(judge.p, z)) : 0.0);
        sum += weights.back();
      }
    }
    if (!(sum >= 0x1p-126)) return {};
    for (double& weight : weights) weight /= sum;
    return weights;
  }

  // Writes a race's winner into the answer of the rank that holds it.
  void answer_race(std::vector<uint32_t>& answers, const AnswerShape& shape, int64_t slot, int pair, int32_t winner) {
    for (int64_t rank = 0; rank < ranks(); ++rank) {
      uint32_t* const answer = answers.data() + (rank * shape.slots + slot) * shape.width + kRaceWords * pair;
      const bool holds = winner >= borders[rank] && winner < borders[rank + 1];
      answer[0] = bits_of(holds ? 1.0f : -kInfinity);
      answer[1] = static_cast<uint32_t>(holds ? winner : -1);
    }
  }

  void answer_races(std::vector<uint32_t>& answers, const AnswerShape& shape, const AcceptRequest& request) {
    const bool is_coupled = problem.rule == Rule::coupled;
    for (int64_t slot = 0; slot < shape.slots; ++slot)
      for (int pair = 0; pair < shape.width / kRaceWords; ++pair) answer_race(answers, shape, slot, pair, -1);
    for (int32_t node = 0; node < request.nodes; ++node) {
      if (state().nodes[node].draws == 0) continue;
      if (is_coupled) {
        const std::vector<double> weights = race(request, node, true);
        answer_race(answers, shape, node, 0, static_cast<int32_t>(script->choose(weights)));
        continue;
      }
      last = race(request, node, false);
      if (!last.empty()) answer_race(answers, shape, 0, 0, 0);
      if (last.empty()) last = race(request, node, true);
      answer_race(answers, shape, 0, 1, 0);
    }
  }

  void play(const std::vector<Round>& rounds) {
    const AcceptRequest request = request_of(problem, 0);
    std::vector<Judge> judges(problem.nodes);
    SingleThread team;
    words.assign(state_words(problem.nodes), 0);
    int32_t widest = 1;
    for (int64_t rank = 0; rank < ranks(); ++rank) {
      const int32_t slices = (borders[rank + 1] - borders[rank] + kSlice - 1) / kSlice;
      widest = slices > widest ? slices : widest;
    }
    for (size_t i = 0; i + 1 < rounds.size(); ++i) {
      const Round round = rounds[i];
      const AnswerShape shape = answer_shape(problem, round, widest);
      std::vector<uint32_t> answers(ranks() * shape.slots * shape.width, 0);
      for (int64_t rank = 0; rank < ranks() && round != Round::races; ++rank) {
        const ShardProblem shard = part(rank, round, answers.data() + rank * shape.slots * shape.width, shape);
        const AcceptRequest local = request_of(shard.problem, 0);
        for (int32_t node = 0; node < request.nodes; ++node) {
          if (round == Round::residuals) answer_residuals(shard, local, node);
          for (int side = 0; side < 2; ++side) {
            if (round == Round::peaks) answer_peaks(shard, local, node, side);
            if (round == Round::masses) answer_masses(shard, local, node, side);
          }
        }
      }
      if (round == Round::races) answer_races(answers, shape, request);
      combine_request(team, state(), problem, 0, {answers.data(), ranks(), shape}, round, rounds[i + 1], true,
                      judges.data());
    }
  }
};

// (probability, last node, distribution of the token behind it) for everything that coins can do at temperature 1. Node
// i's children were drawn from row i of `draft`, or from no distribution if has_row[i] is 0.
std::vector<Outcome> outcomes(int rule, const std::vector<int32_t>& parents, const std::vector<int64_t>& tokens,
                              const Array<float>& target, const Array<float>& draft,
                              const std::vector<int32_t>& has_row, int max_depth, const std::vector<int32_t>& borders,
                              const std::vector<int>& rounds) {
  const int32_t nodes = static_cast<int32_t>(parents.size()), vocabulary = static_cast<int32_t>(target.shape(1));
  const std::vector<int32_t> cu_nodes{0, nodes};
  std::vector<int32_t> rows(nodes), path(max_depth + 1);
  for (int32_t i = 0; i < nodes; ++i) rows[i] = has_row[i] ? i : -1;
  std::vector<int64_t> emitted(max_depth + 1);
  const float temperature = 1.0f;
  int32_t accepted = 0, status = 0;

  Group group{};
  AcceptProblem& problem = group.problem;
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
  group.borders = borders;
  std::vector<Round> asked;
  for (int round : rounds) asked.push_back(static_cast<Round>(round));

  std::vector<Outcome> found;
  Script all;
  all.repeats = true;
  script = &all;
  do {
    group.play(asked);
    if (status != 0) throw std::runtime_error("status " + std::to_string(status));
    if (problem.rule == Rule::coupled) {
      group.last.assign(vocabulary, 0.0);
      group.last[emitted[accepted]] = 1.0;
    }
    found.push_back({all.probability, path[accepted], group.last});
  } while (all.next());
  return found;
}

}  // namespace
}  // namespace pass_ext

PYBIND11_MODULE(_shard_core, module) { module.def("outcomes", &pass_ext::outcomes); }
