// The shard ops on the GPU. The rounds: core/shard.h; combining and the walk: core/shard_combine.h. A block answers
// about one row, about one slice of it where it adds, about one request where its race is drawn; a block combines one
// request's answers.
//
// Peaks, bins and races have the CPU's bits. A slice's sum has the CPU's terms in another order, always the same: so
// the results do not depend on the number of ranks, and differ from the CPU's only where the unsharded ops' may, at
// near ties.
#pragma once

#include <cstdint>

#include "core/shard.h"
#include "core/shard_combine.h"
#include "cuda/bins.cuh"
#include "cuda/block.cuh"
#include "cuda/primitives.cuh"
#include "cuda/shard_rows.cuh"

namespace pass_ext::gpu {

// The request that a row belongs to, or -1; -1 for all if cu_nodes does not divide the rows. `answer` is shared memory.
PASS_EXT_DEVICE int64_t owner_of(const AcceptProblem& problem, int64_t row, int32_t* answer) {
  if (thread_rank() == 0) *answer = -1;
  bool broken = false;
  int64_t owner = -1;
  for (int64_t index = thread_rank(); index < problem.requests; index += block_size().x) {
    broken = broken || breaks_bounds(problem, index);
    if (problem.cu_nodes[index] <= row && row < problem.cu_nodes[index + 1]) owner = index;
  }
  if (sync_block_count(broken) != 0) return -1;
  if (owner >= 0) *answer = static_cast<int32_t>(owner);
  sync_block();
  return *answer;
}

// A slot's row, if it is a row; all threads of the block find it together.
struct FoundRow {
  AcceptRequest request;
  int32_t node;
  int side;
  bool is_there;
  LogitRow row;
};

PASS_EXT_DEVICE FoundRow find_row(const ShardProblem& shard, int64_t slot, int32_t* answer) {
  const AcceptProblem& problem = shard.problem;
  const int side = slot >= problem.nodes;
  const int64_t packed = slot - side * problem.nodes, owner = owner_of(problem, packed, answer);
  FoundRow found{request_of(problem, owner < 0 ? 0 : owner), 0, side, false, {}};
  if (owner < 0) return found;
  found.node = static_cast<int32_t>(packed - found.request.first);
  found.is_there = has_row(found.request, found.node, side);
  if (found.is_there) found.row = row_of(found.request, found.node, side);
  return found;
}

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kShardThreads) shard_peaks_kernel(PASS_EXT_PARAMETER ShardProblem shard) {
  begin_kernel(shard);
  PASS_EXT_SHARED(BlockScratch, scratch, 1);
  PASS_EXT_SHARED(int32_t, owner, 1);
  const int64_t slot = block_index().x;
  const FoundRow found = find_row(shard, slot, owner);
  Best peak{-kInfinity, -1};
  bool bad = false;
  if (found.is_there)
    each_logit(found.row, 0, found.row.vocabulary, [&](int32_t id, float z) {
      if (!(z < kInfinity))
        bad = true;
      else if (z > peak.score)
        peak = {z, id};
    });
  const bool is_bad = sync_block_count(bad) != 0;
  peak = best_of_block(*scratch, peak);
  if (thread_rank() != 0) return;
  uint32_t* const answer = shard.words_at(slot);
  answer[0] = is_bad ? 0x7fc00000u : bits_of(peak.score);
  answer[1] = static_cast<uint32_t>(is_bad || peak.id < 0 ? -1 : peak.id + shard.start);
  const bool has_owner = *owner >= 0;
  answer[2] = bits_of(has_owner ? logit_of_token(shard, found.request, found.node, found.side) : -kInfinity);
}

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kShardThreads) shard_bins_kernel(PASS_EXT_PARAMETER ShardProblem shard) {
  begin_kernel(shard);
  PASS_EXT_SHARED(Bins<kSelectBins>, bins, 1);
  PASS_EXT_SHARED(int32_t, owner, 1);
  const int64_t slot = block_index().x;
  const FoundRow found = find_row(shard, slot, owner);
  for (int32_t i = thread_rank(); i < kSelectBins; i += kShardThreads) bins->clear(i);
  sync_block();
  if (found.is_there && is_asked(shard.state.slots[slot], shard.round)) {
    const Distribution distribution = shard.state.slots[slot].distribution;
    const SelectRange range = shard.state.slots[slot].range;
    const float floor = logit_of_select_key(range.low);
    const int shift = range.shift();
    const bool by_mass = shard.shape.is_wide;
    each_logit(found.row, 0, found.row.vocabulary, [&](int32_t id, float z) {
      if (!(z >= floor)) return;
      const uint64_t key = select_key(z, shard.start + id);
      if (key < range.low || key > range.high) return;
      const uint64_t measure = by_mass ? integer_mass(exponential(log_weight(distribution, z))) : 1;
      bins->add(static_cast<int>((range.high - key) >> shift), measure);
    });
  }
  sync_block();
  for (int32_t i = thread_rank(); i < kSelectBins; i += kShardThreads) {
    const int64_t place = slot * kSelectBins + i;
    if (shard.shape.is_wide)
      static_cast<uint64_t*>(shard.answers)[place] = bins->sum(i);
    else
      static_cast<uint32_t*>(shard.answers)[place] = bins->low[i];
  }
}

// [begin, end) of a slice in a row of `columns`; empty behind the last.
struct SliceColumns {
  int32_t begin, end;
};
PASS_EXT_DEVICE SliceColumns columns_of_slice(int64_t slice, int32_t columns) {
  const int64_t begin = slice * kSliceColumns, end = begin + kSliceColumns;
  return {static_cast<int32_t>(begin < columns ? begin : columns), static_cast<int32_t>(end < columns ? end : columns)};
}

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kShardThreads) shard_masses_kernel(PASS_EXT_PARAMETER ShardProblem shard) {
  begin_kernel(shard);
  PASS_EXT_SHARED(BlockScratch, scratch, 1);
  PASS_EXT_SHARED(int32_t, owner, 1);
  const int64_t slot = block_index().x, slice = block_index().y;
  const FoundRow found = find_row(shard, slot, owner);
  float sum = 0.0f;
  if (found.is_there && is_asked(shard.state.slots[slot], shard.round)) {
    const Distribution distribution = local_distribution(shard.state.slots[slot].distribution, shard.start);
    const SliceColumns columns = columns_of_slice(slice, found.row.vocabulary);
    each_logit(found.row, columns.begin, columns.end, [&](int32_t id, float z) {
      if (in_support(distribution, z, id)) sum += exponential(log_weight(distribution, z));
    });
  }
  const double total = sum_of_block(*scratch, static_cast<double>(sum));
  if (thread_rank() == 0) shard.words_at(slot)[slice] = bits_of(static_cast<float>(total));
}

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kShardThreads) shard_residuals_kernel(PASS_EXT_PARAMETER ShardProblem shard) {
  begin_kernel(shard);
  PASS_EXT_SHARED(BlockScratch, scratch, 1);
  PASS_EXT_SHARED(DeletedChildren, deleted, 1);
  PASS_EXT_SHARED(int32_t, owner, 1);
  const int64_t packed = block_index().x, slice = block_index().y;
  const FoundRow found = find_row(shard, packed, owner);
  float left = 0.0f, remaining = 0.0f;
  if (found.is_there && shard.state.nodes[packed].asks >= 0 && shard.state.slots[packed].distribution.status == 0) {
    const Judge judge = judge_at(shard, found.request, found.node);
    if (judge.has_q) {
      collect_deleted(shard, found.request, found.node, *deleted);
      const float beta = shard.state.nodes[packed].beta;
      const SliceColumns columns = columns_of_slice(slice, found.row.vocabulary);
      each_logit(found.row, columns.begin, columns.end, [&](int32_t id, float z) {
        const float p = probability(judge.p, z, id), q = probability(judge.q, logit_at(judge.q_row, id), id);
        const float cut = deleted->cut_of(id);
        if (cut == kNotCut) remaining += q;
        if (cut != kInfinity) left += residual_weight(p, q, cut == kNotCut ? beta : cut);
      });
    }
  }
  const double lefts = sum_of_block(*scratch, static_cast<double>(left));
  const double rest = sum_of_block(*scratch, static_cast<double>(remaining));
  if (thread_rank() != 0) return;
  uint32_t* const answer = shard.words_at(packed) + 2 * slice;
  answer[0] = bits_of(static_cast<float>(lefts));
  answer[1] = bits_of(static_cast<float>(rest));
}

// The node at which a request races; -1: none. `answer` is shared memory.
PASS_EXT_DEVICE int32_t find_draw(const ShardProblem& shard, int64_t index, int32_t* answer) {
  const AcceptRequest request = request_of(shard.problem, index);
  const bool divided = owner_of(shard.problem, request.first, answer) >= 0;  // -1 for a request without nodes too
  sync_block();
  if (thread_rank() == 0) *answer = INT32_MAX;
  sync_block();
  for (int32_t i = thread_rank(); divided && i < request.nodes; i += kShardThreads)
    if (shard.state.nodes[request.first + i].draws != 0) atomic_min(answer, i);
  sync_block();
  return *answer == INT32_MAX ? -1 : *answer;
}

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kShardThreads) shard_races_kernel(PASS_EXT_PARAMETER ShardProblem shard) {
  begin_kernel(shard);
  PASS_EXT_SHARED(BlockScratch, scratch, 1);
  PASS_EXT_SHARED(DeletedChildren, deleted, 1);
  PASS_EXT_SHARED(int32_t, found, 1);
  const AcceptProblem& problem = shard.problem;
  const bool is_coupled = problem.rule == Rule::coupled;
  const int64_t slot = block_index().x, index = is_coupled ? owner_of(problem, slot, found) : slot;
  const AcceptRequest request = request_of(problem, index < 0 ? 0 : index);
  int32_t node =
      is_coupled ? (index < 0 ? -1 : static_cast<int32_t>(slot - request.first)) : find_draw(shard, index, found);
  if (node >= 0 && (shard.state.nodes[request.first + node].draws == 0 ||
                    shard.state.slots[request.first + node].distribution.status != 0))
    node = -1;
  const int races = is_coupled ? 1 : 2;
  if (node < 0) {
    if (thread_rank() == 0)
      for (int i = 0; i < races; ++i) {
        shard.words_at(slot)[kRaceWords * i] = bits_of(-kInfinity);
        shard.words_at(slot)[kRaceWords * i + 1] = static_cast<uint32_t>(-1);
      }
    return;
  }
  const ShardNode& asked = shard.state.nodes[request.first + node];
  const Judge judge = judge_at(shard, request, node);
  if (asked.rejected != 0) collect_deleted(shard, request, node, *deleted);
  const bool is_residual = asked.kind != Weight::plain;
  for (int i = 0; i < races; ++i) {
    Best best{-kInfinity, -1};
    const bool is_first = i == 0, is_over_p = !is_first || !is_residual;
    if (is_first || is_residual || asked.rejected != 0) {
      const ShardRace race{judge.p_row,
                           judge.p,
                           true,
                           noise_of_race(shard, index, asked),
                           is_over_p ? nullptr : &judge,
                           asked.first,
                           is_first && asked.rejected != 0 ? deleted : nullptr,
                           {kInfinity, -1}};
      bool is_bad;
      best = best_of_columns(*scratch, race, is_bad);
    }
    if (thread_rank() != 0) continue;
    shard.words_at(slot)[kRaceWords * i] = bits_of(best.score);
    shard.words_at(slot)[kRaceWords * i + 1] = static_cast<uint32_t>(best.id < 0 ? -1 : best.id + shard.start);
  }
}

// Answers fill all of `shard.answers`.
inline void launch_shard_local(const ShardProblem& shard, Stream stream) {
  const auto shape = [&](int64_t slices) { return LaunchShape{{shard.shape.slots, slices}, {kShardThreads}}; };
  if (shard.shape.slots == 0) return;
  switch (shard.round) {
    case Round::peaks: return launch("shard_local", shard_peaks_kernel, shape(1), stream, shard);
    case Round::counts:
    case Round::nucleus: return launch("shard_local", shard_bins_kernel, shape(1), stream, shard);
    case Round::top_p:
    case Round::masses:
      if (shard.slices == 0) return;
      return launch("shard_local", shard_masses_kernel, shape(shard.slices), stream, shard);
    case Round::residuals:
      if (shard.slices == 0) return;
      return launch("shard_local", shard_residuals_kernel, shape(shard.slices), stream, shard);
    default: return launch("shard_local", shard_races_kernel, shape(1), stream, shard);
  }
}

// ---- combining ----

constexpr int kShardCombineThreads = 128;

// find_bin() of core/shard_combine.h by a warp. It asks for the measures twice, each a sum over the ranks, and keeps
// none.
PASS_EXT_DEVICE ReachedBin find_bin_of_warp(const Answers& answers, int64_t index, const SelectRange& range) {
  constexpr int kBinsPerLane = kSelectBins / 32;
  const int lane = static_cast<int>(lane_index());
  uint64_t sum = 0;
  for (int i = 0; i < kBinsPerLane; ++i) sum += answers.measure(index, lane * kBinsPerLane + i);
  uint64_t up_to = sum;
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = shuffle_up(up_to, step);
    if (lane >= step) up_to += other;
  }
  const uint64_t before = range.before + up_to - sum;
  const unsigned filled = ballot(sum > 0), reaching = ballot(sum > 0 && before + sum >= range.needed);
  ReachedBin found{0, false, before, 0};
  if (filled == 0) return {0, false, range.before, 0};
  const int source = reaching != 0 ? first_set_bit(reaching) : last_set_bit(filled);
  for (int i = 0; i < kBinsPerLane && !found.is_enough; ++i) {
    const uint64_t measure = answers.measure(index, lane * kBinsPerLane + i);
    if (measure == 0) continue;
    const uint64_t reached = found.before + found.measure;
    found = {lane * kBinsPerLane + i, reached + measure >= range.needed, reached, measure};
  }
  return {shuffle(found.bin, source), shuffle(static_cast<int>(found.is_enough), source) != 0,
          shuffle(found.before, source), shuffle(found.measure, source)};
}

// The team of combine_request(): the threads of a block.
struct BlockTeam {
  template <typename Function>
  PASS_EXT_DEVICE void each(int32_t count, const Function& function) const {
    for (int32_t i = thread_rank(); i < count; i += kShardCombineThreads) function(i);
  }
  PASS_EXT_DEVICE void narrow_each(int32_t count, ShardSlot* slots, const Answers& answers, int64_t first,
                                   Round round) const {
    for (int32_t i = warp_index(); i < count; i += kShardCombineThreads / 32) {
      if (!is_asked(slots[i], round)) continue;
      const ReachedBin found = find_bin_of_warp(answers, first + i, slots[i].range);
      sync_warp();  // the range has been read by all lanes
      if (lane_index() == 0) narrow(slots[i], found, round == Round::nucleus);
    }
  }
  template <typename Function>
  PASS_EXT_DEVICE void alone(const Function& function) const {
    if (thread_rank() == 0) function();
  }
  PASS_EXT_DEVICE void sync() const { sync_block(); }
};

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kShardThreads)
    shard_state_kernel(PASS_EXT_PARAMETER ShardCombination combination) {
  begin_kernel(combination);
  const int64_t step = static_cast<int64_t>(grid_size().x) * kShardThreads;
  for (int64_t i = static_cast<int64_t>(block_index().x) * kShardThreads + thread_rank(); i < combination.words;
       i += step)
    combination.state[i] = combination.former == nullptr ? 0 : combination.former[i];
}

// judges: memory for one per node.
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kShardCombineThreads)
    shard_combine_kernel(PASS_EXT_PARAMETER ShardCombination combination, Judge* judges) {
  begin_kernel(combination);
  const AcceptProblem& problem = combination.problem;
  bool broken = false;
  for (int64_t index = thread_rank(); index < problem.requests; index += kShardCombineThreads)
    broken = broken || breaks_bounds(problem, index);
  const bool divided = sync_block_count(broken) == 0;
  const int64_t index = block_index().x;
  BlockTeam team;
  combine_request(team, state_at(combination.state, problem.nodes), problem, index, combination.answers,
                  combination.round, combination.next, divided, divided ? judges + problem.cu_nodes[index] : judges);
}

inline int64_t shard_combine_workspace(const ShardCombination& combination) {
  return combination.problem.nodes * static_cast<int64_t>(sizeof(Judge));
}

inline void launch_shard_combine(const ShardCombination& combination, void* workspace, Stream stream) {
  const int64_t blocks = (combination.words + kShardThreads - 1) / kShardThreads,
                requests = combination.problem.requests;
  if (blocks > 0)
    launch("shard_combine", shard_state_kernel, LaunchShape{{blocks < 1024 ? blocks : 1024}, {kShardThreads}}, stream,
           combination);
  if (requests > 0)
    launch("shard_combine", shard_combine_kernel, LaunchShape{{requests}, {kShardCombineThreads}}, stream, combination,
           static_cast<Judge*>(workspace));
}

// ---- drafting ----

// One race after the other: each looks behind the token that won the last. Few are asked for.
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kShardThreads) shard_best_kernel(PASS_EXT_PARAMETER ShardBest best) {
  begin_kernel(best);
  PASS_EXT_SHARED(BlockScratch, scratch, 1);
  const DraftProblem& draft = best.draft;
  const int64_t index = block_index().x;
  const Distribution distribution = local_distribution(best.slots[index].distribution, best.start);
  const bool is_single = draft.mode == DraftMode::with;
  ShardRace race{row_at(draft.logits, index * draft.logits.stride, index, index),
                 distribution,
                 is_race(draft.mode, is_greedy_draft(draft, index)),
                 draft_noise(draft, index),
                 nullptr,
                 0.0f,
                 nullptr,
                 {kInfinity, -1}};
  race.noise.first_group = static_cast<uint32_t>(best.start / kGroup);
  bool is_over = distribution.status != 0;
  for (int32_t i = 0; i < draft.count; ++i) {
    Best token{-kInfinity, -1};
    bool is_bad = false;
    if (!is_over) token = best_of_columns(*scratch, race, is_bad);
    is_over = is_over || token.id < 0;
    if (is_single)
      ++race.noise.draw;
    else
      race.behind = token;
    if (thread_rank() != 0) continue;
    if (token.id < 0)
      best.write(index, i, -kInfinity, -1, -kInfinity);
    else
      best.write(index, i, token.score, token.id + best.start,
                 log_weight(distribution, logit_at(race.row, token.id)) - distribution.log_mass);
  }
}

inline void launch_shard_best(const ShardBest& best, Stream stream) {
  if (best.draft.rows > 0)
    launch("shard_best", shard_best_kernel, LaunchShape{{best.draft.rows}, {kShardThreads}}, stream, best);
}

}  // namespace pass_ext::gpu
