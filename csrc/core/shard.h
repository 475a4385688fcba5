// The accept step when each rank of a group holds some columns of the logits. Ranks answer questions about their
// columns, all answers go to all ranks, and each rank combines them and walks (core/shard_combine.h):
//
//   peaks      the largest logit of each row and its id; the logits of the drafted tokens
//   counts     top-k: how many tokens of a row lie in each bin of a range of keys; halving by 2^9 finds the k-th
//   top_p      sum of exp((z - max) scale) over each slice of 8,192 columns, before top-p
//   nucleus    top-p: the mass of the tokens in each bin, an integer
//   masses     the sums over the slices of the support
//   residuals  sums of (p - beta q)+ and of q over the slices, for the nodes where the walk asks for them
//   races      the best token of each race, by its id in the whole vocabulary
//
// Slices, bins, maxima and races do not depend on the split into ranks, and the slices are added in their order in the
// whole vocabulary. So the results have the bits of one rank that holds all columns, if every rank's columns begin at a
// multiple of 8,192. A slice's sum is a float, and the slices are added as doubles.
//
// A walk that needs sums nobody knows yet gets NaN, which rejects whatever depends on it; the next walk knows them. No
// sums are asked for at numbers that were not known.
#pragma once

#include <cstdint>

#include "core/accept.h"
#include "core/draft.h"

namespace pass_ext {

constexpr int32_t kSliceColumns = 8192;  // as in cpu/rows.cpp

// The order of ROUNDS in pass_ext/ops/shard.py.
enum class Round : int32_t { peaks, counts, top_p, nucleus, masses, residuals, races, finish };

constexpr int kSelectBits = 9, kSelectBins = 1 << kSelectBits;
constexpr int kIdBits = 22;  // kMostVocabulary in host/distribution.h

// A token's place in the order of filters, logit descending and id ascending, as an integer of 54 bits.
PASS_EXT_HOST_DEVICE uint64_t select_key(float logit, int32_t id) {
  constexpr uint32_t last = (1u << kIdBits) - 1;
  return static_cast<uint64_t>(ordered_bits(logit)) << kIdBits | (last - static_cast<uint32_t>(id));
}
PASS_EXT_HOST_DEVICE float logit_of_select_key(uint64_t key) {
  return float_of_ordered(static_cast<uint32_t>(key >> kIdBits));
}
PASS_EXT_HOST_DEVICE int32_t id_of_select_key(uint64_t key) {
  constexpr uint32_t last = (1u << kIdBits) - 1;
  return static_cast<int32_t>(last - (static_cast<uint32_t>(key) & last));
}

// The range of keys in which a cut is looked for, both ends included.
struct SelectRange {
  uint64_t low, high;
  uint64_t before;  // the measures of the keys above
  uint64_t needed;

  PASS_EXT_HOST_DEVICE int shift() const {
    int bits = 0;
    while (bits < 64 && (high - low) >> bits != 0) ++bits;
    return bits > kSelectBits ? bits - kSelectBits : 0;
  }
};

// What all ranks know about a row. Slot i is node i's target row, slot nodes + i the row that its children were drawn
// from.
struct ShardSlot {
  Distribution distribution;
  int32_t top_k;
  float top_p, min_p;
  double kept;  // the mass that top-p left; 0: not known
  SelectRange range;
  int32_t is_selecting;  // 1: the range is not yet one key
  int32_t is_used;
};

// What all ranks know about a node, and what the last walk asked there.
struct ShardNode {
  float p_logit, q_logit;  // of its token, in its parent's rows
  float cut;
  int32_t asked;         // residual sums asked for at this node in one walk
  double weight_sum;     // one answer: the node keeps that of its parent's question with its number among the children
  double remaining_sum;  // NaN: not known
  int32_t asks;          // residual sums: the node that keeps the answer; -1: none
  float beta;
  int32_t draws;  // 1: a race is asked for
  int32_t kind;
  float first, second;
  int32_t rejected, purpose;
  int64_t position;
  int32_t winner[2];  // the race's, and that of a race over p without anything rejected; -1: none
  int32_t depth, request;
};

// The state is a tensor of int64; pass_ext/ops/shard.py knows its size.
static_assert(sizeof(ShardSlot) == 88 && sizeof(ShardNode) == 88, "words of the state");

struct ShardState {
  ShardSlot* slots;  // [2 nodes]
  ShardNode* nodes;  // [nodes]
};

PASS_EXT_HOST_DEVICE int64_t state_words(int64_t nodes) {
  return nodes * static_cast<int64_t>(2 * sizeof(ShardSlot) + sizeof(ShardNode)) / 8;
}
PASS_EXT_HOST_DEVICE ShardState state_at(int64_t* words, int64_t nodes) {
  ShardSlot* const slots = reinterpret_cast<ShardSlot*>(words);
  return {slots, reinterpret_cast<ShardNode*>(slots + 2 * nodes)};
}

// The shape of a round's answers: [slots, width] words of 32 bits, or of 64 for masses in bins.
//   peaks              a row: its largest logit, the id, the logit of the node's token in the parent's row
//   counts, nucleus    a row: its bins
//   top_p, masses      a row: its slices
//   residuals          a node: two sums for each slice
//   races              a node under "coupled", else a request: score and id of the best; then those over p alone
// Rows are the nodes' target rows, then, with draft logits, the rows that their children were drawn from.
struct AnswerShape {
  int64_t slots, width;
  bool is_wide;

  PASS_EXT_HOST_DEVICE int64_t bytes() const { return slots * width * (is_wide ? 8 : 4); }
};

constexpr int kPeakWords = 3, kRaceWords = 2;

PASS_EXT_HOST_DEVICE AnswerShape answer_shape(const AcceptProblem& problem, Round round, int64_t slices) {
  const int64_t rows = problem.nodes * (problem.has_draft ? 2 : 1);
  switch (round) {
    case Round::counts: return {rows, kSelectBins, false};
    case Round::nucleus: return {rows, kSelectBins, true};
    case Round::top_p:
    case Round::masses: return {rows, slices, false};
    case Round::residuals: return {problem.nodes, 2 * slices, false};
    case Round::races:
      if (problem.rule == Rule::coupled) return {problem.nodes, kRaceWords, false};
      return {problem.requests, 2 * kRaceWords, false};
    default: return {rows, kPeakWords, false};
  }
}

// The distribution over columns that begin at `start`: its tie is an id of theirs.
PASS_EXT_HOST_DEVICE Distribution local_distribution(Distribution distribution, int32_t start) {
  if (distribution.tie == INT32_MAX) return distribution;
  distribution.tie = distribution.tie < start ? -1 : distribution.tie - start;
  return distribution;
}

// True if a row is a distribution whose numbers a round has to find.
PASS_EXT_HOST_DEVICE bool is_asked(const ShardSlot& slot, Round round) {
  if (slot.is_used == 0 || slot.distribution.status != 0) return false;
  if (round == Round::counts || round == Round::nucleus) return slot.is_selecting != 0;
  if (round == Round::top_p) return slot.top_p < 1.0f;
  return round == Round::masses && !(slot.kept > 0.0);
}

// One rank's columns of a problem.
struct ShardProblem {
  AcceptProblem problem;
  int32_t start;
  int64_t slices;
  Round round;
  ShardState state;  // read only; not there in the first round
  void* answers;
  AnswerShape shape;

  // The words of a slot in an answer of 32-bit words.
  PASS_EXT_HOST_DEVICE uint32_t* words_at(int64_t slot) const {
    return static_cast<uint32_t*>(answers) + slot * shape.width;
  }
};

// The rows that a question is about: the node's target row (side 0), or the row that its children were drawn from.
PASS_EXT_HOST_DEVICE bool has_row(const AcceptRequest& request, int32_t node, int side) {
  if (side == 0) return true;
  const int32_t index = request.draft_index(node);
  return index >= 0 && index < request.problem.draft_row_count;
}
PASS_EXT_HOST_DEVICE LogitRow row_of(const AcceptRequest& request, int32_t node, int side) {
  return side == 0 ? request.target_row(node) : request.draft_row(node, request.draft_index(node));
}

// The logit of a node's token in a row of its parent, if the token is a column of this rank.
PASS_EXT_HOST_DEVICE float logit_of_token(const ShardProblem& shard, const AcceptRequest& request, int32_t node,
                                          int side) {
  const int32_t parent = node == 0 ? -1 : request.parent(node);
  if (parent < 0 || parent >= node || !has_row(request, parent, side)) return -kInfinity;
  const LogitRow row = row_of(request, parent, side);
  const int64_t token = request.token(node);  // any number
  if (token < shard.start || token - shard.start >= row.vocabulary) return -kInfinity;
  return logit_at(row, static_cast<int32_t>(token - shard.start));
}

// p and q over this rank's columns.
PASS_EXT_HOST_DEVICE Judge judge_at(const ShardProblem& shard, const AcceptRequest& request, int32_t node) {
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

// The noise of a race over this rank's columns.
PASS_EXT_HOST_DEVICE Noise noise_of_race(const ShardProblem& shard, int64_t request, const ShardNode& asked) {
  const uint64_t seed = shard.problem.seeds == nullptr ? 0 : static_cast<uint64_t>(shard.problem.seeds[request]);
  return {seed, asked.position, static_cast<Purpose>(asked.purpose), 0, 0, static_cast<uint32_t>(shard.start / kGroup)};
}

// The words of a token that shard_best() answers: score, id, log probability.
constexpr int kBestWords = 3;

// The best of a shard's tokens for drafting.
struct ShardBest {
  DraftProblem draft;
  int32_t start;
  const ShardSlot* slots;
  uint32_t* words;  // [rows, count, kBestWords]

  PASS_EXT_HOST_DEVICE void write(int64_t index, int32_t place, float score, int32_t id, float log_probability) const {
    uint32_t* const to = words + (index * draft.count + place) * kBestWords;
    to[0] = bits_of(score);
    to[1] = static_cast<uint32_t>(id);
    to[2] = bits_of(log_probability);
  }
};

}  // namespace pass_ext
