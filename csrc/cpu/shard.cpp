// torch.ops.pass_ext.shard_local, shard_combine and shard_best on the CPU: parallel split and registration. The
// formulas: core/shard.h; work on rows: cpu/rows.h.
#include "host/shard.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
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
      const int64_t id = request.token(i) - shard.start;
      if (id < 0 || id >= shard.problem.target.vocabulary) continue;
      ids.push_back(static_cast<int32_t>(id));
      cuts.push_back(cut);
    }
    return {ids.data(), cuts.data(), static_cast<int32_t>(ids.size())};
  }
};

// p and q over this rank's columns.
Judge judge_at(const ShardProblem& shard, const AcceptRequest& request, int32_t node) {
  const ShardSlot* const slots = shard.state.slots + request.first + node;
  const ShardSlot& draft = slots[shard.problem.nodes];
  Judge judge{};
  judge.node = node;
  judge.p_row = request.target_row(node);
  judge.p = local_distribution(slots->distribution, shard.start);
  judge.has_q = draft.is_used != 0 && draft.distribution.status == 0;
  if (!judge.has_q) return judge;
  judge.q_row = request.draft_row(node, request.draft_index(node));
  judge.q = local_distribution(draft.distribution, shard.start);
  return judge;
}

void answer_row(const ShardProblem& shard, const LogitRow& row, const ShardSlot& slot, CpuRows& rows,
                uint64_t* answer) {
  if (!is_asked(slot, shard.round)) return;
  const Distribution distribution = local_distribution(slot.distribution, shard.start);
  if (shard.round == Round::counts || shard.round == Round::nucleus)
    return rows.select_bins(row, distribution, shard.start, slot.range, shard.round == Round::nucleus, answer);
  const bool everything = shard.round == Round::top_p && distribution.cut == -kInfinity;
  rows.slice_masses(row, distribution, everything, reinterpret_cast<double*>(answer));
}

// The logit of a node's token in a row of its parent, if the token is a column of this rank.
float logit_of_token(const ShardProblem& shard, const AcceptRequest& request, int32_t node, const LogitRow& row) {
  const int64_t id = request.token(node) - shard.start;
  return id < 0 || id >= row.vocabulary ? -kInfinity : logit_at(row, static_cast<int32_t>(id));
}

void answer_peaks(const ShardProblem& shard, const AcceptRequest& request, int32_t node, CpuRows& rows) {
  const AcceptProblem& problem = shard.problem;
  const int32_t parent = node == 0 ? -1 : request.parent(node);
  const bool has_parent = parent >= 0 && parent < node;
  for (int side = 0; side < 2; ++side) {
    const auto is_row = [&](int32_t i) {
      const int32_t index = request.draft_index(i);
      return side == 0 || (index >= 0 && index < problem.draft_row_count);
    };
    const auto row_of = [&](int32_t i) {
      return side == 0 ? request.target_row(i) : request.draft_row(i, request.draft_index(i));
    };
    uint64_t* const answer = shard.answers + (request.first + node + side * problem.nodes) * 2;
    Candidate peak{-kInfinity, -1};
    if (is_row(node)) peak = rows.peak(row_of(node));
    answer[0] = word_of(peak.logit, peak.id < 0 ? -1 : peak.id + shard.start);
    answer[1] =
        word_of(has_parent && is_row(parent) ? logit_of_token(shard, request, node, row_of(parent)) : -kInfinity, 0);
  }
}

void answer_race(const ShardProblem& shard, const AcceptRequest& request, int32_t node, CpuRows& rows,
                 LocalRemoved& removed) {
  const ShardNode& asked = shard.state.nodes[request.first + node];
  uint64_t* const answer = shard.answers + (request.first + node) * 2;
  answer[0] = answer[1] = word_of(-kInfinity, -1);
  if (asked.draws == 0 || shard.state.slots[request.first + node].distribution.status != 0) return;
  const Judge judge = judge_at(shard, request, node);
  if (!(rows.peak(judge.p_row).logit < kInfinity))
    return;  // its rank said so in the first round, and stopped the request
  const Noise noise{shard.problem.seeds == nullptr ? 0 : static_cast<uint64_t>(shard.problem.seeds[request.index]),
                    asked.position,
                    static_cast<Purpose>(asked.purpose),
                    0,
                    0,
                    static_cast<uint32_t>(shard.start / kGroup)};
  const Removed none{nullptr, nullptr, 0};
  const Weight weight{static_cast<Weight::Kind>(asked.kind), asked.first, asked.second};
  for (int i = 0; i < 2; ++i) {
    if (i == 1 && weight.kind == Weight::plain && asked.rejected == 0) return;
    const bool is_first = i == 0;
    const Candidate best = rows.race(judge, is_first ? weight : Weight{Weight::plain, 0, 0},
                                     is_first && asked.rejected != 0 ? removed.of(shard, request, node) : none, noise);
    if (best.id >= 0) answer[i] = word_of(best.logit, best.id + shard.start);
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
    double* const sums = reinterpret_cast<double*>(shard.answers + packed * 2 * shard.slices);
    return rows.slice_residual_sums(judge, removed.of(shard, request, node), sums);
  }
  const int64_t width = answer_width(shard.round, shard.slices);
  answer_row(shard, request.target_row(node), shard.state.slots[packed], rows, shard.answers + packed * width);
  if (shard.state.slots[nodes + packed].is_used != 0)
    answer_row(shard, request.draft_row(node, request.draft_index(node)), shard.state.slots[nodes + packed], rows,
               shard.answers + (nodes + packed) * width);
}

void shard_local_on_cpu(const ShardProblem& shard, const Tensor&) {
  const AcceptProblem& problem = shard.problem;
  std::fill_n(shard.answers, answer_slots(shard.round, problem.nodes) * answer_width(shard.round, shard.slices), 0);
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
  for (int64_t index = 0; index < problem.requests; ++index)
    combine_request(state, problem, index, combination.answers, combination.round, combination.next, divided,
                    judges.data());
}

void shard_best_on_cpu(const ShardBest& best, const Tensor&) {
  const DraftProblem& draft = best.draft;
  for_each_request(draft.rows, [&](int64_t index, bool alone) {
    uint64_t* const words = best.words + index * draft.count * 2;
    for (int32_t i = 0; i < draft.count; ++i) words[2 * i] = words[2 * i + 1] = word_of(-kInfinity, -1);
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
        words[2 * (begin + i)] = word_of(candidate.logit, candidate.id + best.start);
        words[2 * (begin + i) + 1] = word_of(logprob, 0);
      }
    }
  });
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CPU, library) {
  library.impl("shard_local", TORCH_BOX(&pass_ext::shard_local<pass_ext::shard_local_on_cpu>));
  library.impl("shard_combine", TORCH_BOX(&pass_ext::shard_combine<pass_ext::shard_combine_on_cpu>));
  library.impl("shard_best", TORCH_BOX(&pass_ext::shard_best<pass_ext::shard_best_on_cpu>));
}
