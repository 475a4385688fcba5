// torch.ops.pass_ext.shard_local, shard_combine and shard_best on the CPU: parallel split and registration. The
// formulas: core/shard.h, core/shard_combine.h; work on rows: cpu/rows.h.
#include "host/shard.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/accept_checks.h"
#include "cpu/rows.h"
#include "cpu/workers.h"

namespace pass_ext {
namespace {

bool divides(const AcceptProblem& problem) {
  for (int64_t index = 0; index < problem.requests; ++index)
    if (breaks_bounds(problem, index)) return false;
  return true;
}

// The children of a node that the walk has deleted and that are columns of this rank.
struct LocalRemoved {
  std::vector<int32_t> ids;
  std::vector<float> cuts;

  Removed of(const ShardProblem& shard, const AcceptRequest& request, int32_t node) {
    ids.clear();
    cuts.clear();
    for (int32_t i = node + 1; i < request.nodes; ++i) {
      const float cut = shard.state.nodes[request.first + i].cut;
      if (request.parent(i) != node || cut == kNotCut) continue;
      const int64_t token = request.token(i);  // any number
      if (token < shard.start || token - shard.start >= shard.problem.target.vocabulary) continue;
      ids.push_back(static_cast<int32_t>(token - shard.start));
      cuts.push_back(cut);
    }
    return {ids.data(), cuts.data(), static_cast<int32_t>(ids.size())};
  }
};

// Sums and bins of a row, before they become words of an answer.
struct RowNumbers {
  std::vector<double> sums;
  std::vector<uint64_t> bins;
};

template <typename To, typename From>
void store_as(To* to, const std::vector<From>& from) {
  for (size_t i = 0; i < from.size(); ++i) to[i] = static_cast<To>(from[i]);
}

void answer_row(const ShardProblem& shard, const LogitRow& row, int64_t index, CpuRows& rows) {
  thread_local RowNumbers numbers;
  const ShardSlot& slot = shard.state.slots[index];
  if (!is_asked(slot, shard.round)) return;
  const Distribution distribution = local_distribution(slot.distribution, shard.start);
  const int64_t place = index * shard.shape.width;
  if (shard.round == Round::counts || shard.round == Round::nucleus) {
    numbers.bins.assign(kSelectBins, 0);
    rows.select_bins(row, distribution, shard.start, slot.range, shard.shape.is_wide, numbers.bins.data());
    if (shard.shape.is_wide) return store_as(static_cast<uint64_t*>(shard.answers) + place, numbers.bins);
    return store_as(static_cast<uint32_t*>(shard.answers) + place, numbers.bins);
  }
  const bool everything = shard.round == Round::top_p && distribution.cut == -kInfinity;
  numbers.sums.assign(shard.slices, 0.0);
  rows.slice_masses(row, distribution, everything, numbers.sums.data());
  store_as(static_cast<float*>(shard.answers) + place, numbers.sums);
}

void answer_peaks(const ShardProblem& shard, const AcceptRequest& request, int32_t node, CpuRows& rows) {
  for (int side = 0; side < (shard.problem.has_draft ? 2 : 1); ++side) {
    uint32_t* const answer = shard.words_at(request.first + node + side * shard.problem.nodes);
    Candidate peak{-kInfinity, -1};
    if (has_row(request, node, side)) peak = rows.peak(row_of(request, node, side));
    answer[0] = bits_of(peak.logit);
    answer[1] = static_cast<uint32_t>(peak.id < 0 ? -1 : peak.id + shard.start);
    answer[2] = bits_of(logit_of_token(shard, request, node, side));
  }
}

void answer_race(const ShardProblem& shard, const AcceptRequest& request, int32_t node, CpuRows& rows,
                 LocalRemoved& removed) {
  const ShardNode& asked = shard.state.nodes[request.first + node];
  const bool is_coupled = shard.problem.rule == Rule::coupled;
  uint32_t* const answer = shard.words_at(is_coupled ? request.first + node : request.index);
  if (asked.draws == 0 || shard.state.slots[request.first + node].distribution.status != 0) return;
  const Judge judge = judge_at(shard, request, node);
  if (!(rows.peak(judge.p_row).logit < kInfinity))
    return;  // its rank said so in the first round, and stopped the request
  const Noise noise = noise_of_race(shard, request.index, asked);
  const Removed none{nullptr, nullptr, 0};
  const Weight weight{static_cast<Weight::Kind>(asked.kind), asked.first, asked.second};
  for (int i = 0; i < (is_coupled ? 1 : 2); ++i) {
    if (i == 1 && weight.kind == Weight::plain && asked.rejected == 0) return;
    const bool is_first = i == 0;
    const Candidate best = rows.race(judge, is_first ? weight : Weight{Weight::plain, 0, 0},
                                     is_first && asked.rejected != 0 ? removed.of(shard, request, node) : none, noise);
    if (best.id < 0) continue;
    answer[kRaceWords * i] = bits_of(best.logit);
    answer[kRaceWords * i + 1] = static_cast<uint32_t>(best.id + shard.start);
  }
}

void answer_node(const ShardProblem& shard, const AcceptRequest& request, int32_t node, CpuRows& rows) {
  thread_local LocalRemoved removed;
  const int64_t packed = request.first + node, nodes = shard.problem.nodes;
  if (shard.round == Round::peaks) return answer_peaks(shard, request, node, rows);
  if (shard.round == Round::races) return answer_race(shard, request, node, rows, removed);
  if (shard.round == Round::residuals) {
    if (shard.state.nodes[packed].asks < 0 || shard.state.slots[packed].distribution.status != 0) return;
    Judge judge = judge_at(shard, request, node);
    if (!judge.has_q) return;
    judge.beta = shard.state.nodes[packed].beta;
    thread_local std::vector<double> sums;
    sums.assign(2 * shard.slices, 0.0);
    rows.slice_residual_sums(judge, removed.of(shard, request, node), sums.data());
    return store_as(reinterpret_cast<float*>(shard.words_at(packed)), sums);
  }
  answer_row(shard, request.target_row(node), packed, rows);
  if (shard.problem.has_draft && shard.state.slots[nodes + packed].is_used != 0)
    answer_row(shard, request.draft_row(node, request.draft_index(node)), nodes + packed, rows);
}

// What a rank answers that has nothing to say: no token, or zeros.
void answer_nothing(const ShardProblem& shard) {
  if (shard.shape.bytes() == 0) return;  // without rows there is no memory
  std::memset(shard.answers, 0, shard.shape.bytes());
  const int words = shard.round == Round::peaks ? kPeakWords : shard.round == Round::races ? kRaceWords : 0;
  uint32_t* const answers = static_cast<uint32_t*>(shard.answers);
  for (int64_t i = 0; words > 0 && i < shard.shape.slots * shard.shape.width; ++i)
    answers[i] = i % words == 1 ? static_cast<uint32_t>(-1) : bits_of(-kInfinity);
}

void shard_local_on_cpu(const ShardProblem& shard, const Tensor&) {
  const AcceptProblem& problem = shard.problem;
  answer_nothing(shard);
  if (shard.round == Round::finish || !divides(problem)) return;
  std::vector<int32_t> owner(problem.nodes, -1);
  for (int64_t index = 0; index < problem.requests; ++index)
    for (int64_t row = problem.cu_nodes[index]; row < problem.cu_nodes[index + 1]; ++row)
      owner[row] = static_cast<int32_t>(index);
  for_each_request(problem.nodes, [&](int64_t row, bool alone) {
    if (owner[row] < 0) return;
    const AcceptRequest request = request_of(problem, owner[row]);
    answer_node(shard, request, static_cast<int32_t>(row - request.first), thread_rows(alone));
  });
}

// The team of combine_request() on the CPU.
struct SingleThread {
  template <typename Function>
  void each(int32_t count, const Function& function) const {
    for (int32_t i = 0; i < count; ++i) function(i);
  }
  void narrow_each(int32_t count, ShardSlot* slots, const Answers& answers, int64_t first, Round round) const {
    for (int32_t i = 0; i < count; ++i)
      if (is_asked(slots[i], round))
        narrow(slots[i], find_bin(answers, first + i, slots[i].range), round == Round::nucleus);
  }
  template <typename Function>
  void alone(const Function& function) const {
    function();
  }
  void sync() const {}
};

void shard_combine_on_cpu(const ShardCombination& combination, const Tensor&) {
  const AcceptProblem& problem = combination.problem;
  check_positions("shard_combine", problem);
  const bool divided = divides(problem);
  if (problem.rule == Rule::block && divided) check_is_chain("shard_combine", problem);
  if (combination.former == nullptr)
    std::fill_n(combination.state, combination.words, 0);
  else
    std::copy_n(combination.former, combination.words, combination.state);
  const ShardState state = state_at(combination.state, problem.nodes);
  std::vector<Judge> judges(kMaxTreeNodes);
  SingleThread team;
  for (int64_t index = 0; index < problem.requests; ++index)
    combine_request(team, state, problem, index, combination.answers, combination.round, combination.next, divided,
                    judges.data());
}

void shard_best_on_cpu(const ShardBest& best, const Tensor&) {
  const DraftProblem& draft = best.draft;
  for_each_request(draft.rows, [&](int64_t index, bool alone) {
    for (int32_t i = 0; i < draft.count; ++i) best.write(index, i, -kInfinity, -1, -kInfinity);
    const Distribution distribution = local_distribution(best.slots[index].distribution, best.start);
    if (distribution.status != 0) return;
    const LogitRow row = row_at(draft.logits, index * draft.logits.stride, index, index);
    CpuRows& rows = thread_rows(alone);
    if (!(rows.peak(row).logit < kInfinity)) return;  // a state of other logits
    const bool races = is_race(draft.mode, is_greedy_draft(draft, index));
    const bool is_single = draft.mode == DraftMode::with;
    Noise noise = draft_noise(draft, index);
    noise.first_group = static_cast<uint32_t>(best.start / kGroup);
    for (int32_t begin = 0; begin < draft.count; begin += is_single ? 1 : draft.count, ++noise.draw) {
      const int32_t filled = rows.rank(row, distribution, races ? &noise : nullptr, is_single ? 1 : draft.count);
      for (int32_t i = 0; i < filled; ++i) {
        const Candidate& candidate = rows.ranked(i);
        const float logprob = log_weight(distribution, logit_at(row, candidate.id)) - distribution.log_mass;
        best.write(index, begin + i, candidate.logit, candidate.id + best.start, logprob);
      }
    }
  });
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("shard_local", TORCH_BOX(&pass_ext::shard_local<pass_ext::shard_local_on_cpu>));
  library.impl("shard_combine", TORCH_BOX(&pass_ext::shard_combine<pass_ext::shard_combine_on_cpu>));
  library.impl("shard_best", TORCH_BOX(&pass_ext::shard_best<pass_ext::shard_best_on_cpu>));
}
