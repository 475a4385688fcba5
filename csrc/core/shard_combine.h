// Combines all ranks' answers to one round (core/shard.h), the same on each rank: takes them, walks on them, and asks
// what the next round has to find.
#pragma once

#include <cstdint>

#include "core/accept.h"
#include "core/accept_walk.h"
#include "core/distribution.h"
#include "core/shard.h"

namespace pass_ext {

// All ranks' answers to one round: [ranks, slots, width].
struct Answers {
  const void* words;
  int64_t ranks;
  AnswerShape shape;

  PASS_EXT_HOST_DEVICE const uint32_t* at(int64_t rank, int64_t slot) const {
    return static_cast<const uint32_t*>(words) + (rank * shape.slots + slot) * shape.width;
  }
  PASS_EXT_HOST_DEVICE float number(int64_t rank, int64_t slot, int64_t place) const {
    return float_of(at(rank, slot)[place]);
  }
  PASS_EXT_HOST_DEVICE int32_t id(int64_t rank, int64_t slot, int64_t place) const {
    return static_cast<int32_t>(at(rank, slot)[place]);
  }
  // The count or mass of a bin on all ranks.
  PASS_EXT_HOST_DEVICE uint64_t measure(int64_t slot, int bin) const {
    uint64_t total = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t place = (rank * shape.slots + slot) * shape.width + bin;
      total += shape.is_wide ? static_cast<const uint64_t*>(words)[place] : static_cast<const uint32_t*>(words)[place];
    }
    return total;
  }
  // The sum of numbers `first`, `first` + `step`, … of a slot, rank by rank: the order of the slices in the vocabulary.
  PASS_EXT_HOST_DEVICE double sum(int64_t slot, int64_t first, int64_t step) const {
    double total = 0.0;
    for (int64_t rank = 0; rank < ranks; ++rank)
      for (int64_t i = first; i < shape.width; i += step) total += static_cast<double>(number(rank, slot, i));
    return total;
  }
};

// The `Rows` of core/accept_walk.h for a walk on answers, by one thread.
class ShardRows {
 public:
  // judges: memory for one per node of the request. `is_final`: races have been answered.
  PASS_EXT_HOST_DEVICE ShardRows(const ShardState& state, const AcceptRequest& request, Judge* judges, bool is_final)
      : state_(state), request_(request), judges_(judges), is_final_(is_final) {}

  PASS_EXT_HOST_DEVICE bool is_leader() const { return true; }

  template <typename Predicate>
  PASS_EXT_HOST_DEVICE int32_t first_node(int32_t from, int32_t count, const Predicate& predicate) const {
    for (int32_t i = from; i < count; ++i)
      if (predicate(i)) return i;
    return -1;
  }

  PASS_EXT_HOST_DEVICE void reset_cuts(int32_t nodes) {
    for (int32_t i = 0; i < nodes; ++i) node(i).cut = kNotCut;
  }
  PASS_EXT_HOST_DEVICE float cut(int32_t i) const { return node(i).cut; }
  PASS_EXT_HOST_DEVICE void set_cut(int32_t i, float value) { node(i).cut = value; }
  PASS_EXT_HOST_DEVICE void save(int32_t i, const Judge& judge) { judges_[i] = judge; }
  PASS_EXT_HOST_DEVICE const Judge& saved(int32_t i) const { return judges_[i]; }

  PASS_EXT_HOST_DEVICE Distribution describe(const LogitRow& row, const SamplingParameters&, bool) const {
    return state_.slots[row.slot].distribution;
  }
  // Only logits of drafted tokens are asked for, in the rows of their parents.
  PASS_EXT_HOST_DEVICE float logit(const LogitRow& row, int32_t id) const {
    const bool is_target = row.slot < request_.problem.nodes;
    const int64_t packed = is_target ? row.slot : row.slot - request_.problem.nodes;
    const int32_t parent = static_cast<int32_t>(packed - request_.first);
    const int32_t child = first_node(
        parent + 1, request_.nodes, [&](int32_t i) { return request_.parent(i) == parent && request_.token(i) == id; });
    return child < 0 ? -kInfinity : is_target ? node(child).p_logit : node(child).q_logit;
  }

  PASS_EXT_HOST_DEVICE ResidualSums residual_sums(const Judge& judge, const AcceptRequest&) {
    ShardNode& asking = node(judge.node);
    int32_t number = asking.asked++;
    const int32_t child = first_node(judge.node + 1, request_.nodes,
                                     [&](int32_t i) { return request_.parent(i) == judge.node && number-- == 0; });
    const ShardNode& keeper = node(child);
    if (keeper.weight_sum == keeper.weight_sum) return {keeper.weight_sum, keeper.remaining_sum};
    if (asking.asks < 0) {
      asking.asks = static_cast<int32_t>(request_.first) + child;
      asking.beta = static_cast<float>(judge.beta);
    }
    return {keeper.weight_sum, keeper.weight_sum};
  }

  // The rules that need these are not verified from shards.
  PASS_EXT_HOST_DEVICE double entropy(const Judge&) const { return 0.0; }
  PASS_EXT_HOST_DEVICE int32_t invert(const Judge&, uint64_t) const { return -1; }
  PASS_EXT_HOST_DEVICE void overlap_sums(const Judge&, const float*, double* sums) const {
    for (int i = 0; i < kOverlaps; ++i) sums[i] = 0.0;
  }

  PASS_EXT_HOST_DEVICE int32_t draw(const Judge& judge, const Weight& weight, const AcceptRequest&, bool rejected,
                                    const Noise& noise) {
    ShardNode& at = node(judge.node);
    const bool is_second = has_drawn_ && noise.purpose != Purpose::coupled;
    has_drawn_ = true;
    if (is_final_) {
      const int32_t winner = at.winner[is_second];
      is_unanswered_ = winner < 0 || (is_unanswered_ && noise.purpose == Purpose::coupled);
      return winner;
    }
    if (is_second) return -1;
    at.draws = 1;
    at.kind = weight.kind;
    at.first = weight.first;
    at.second = weight.second;
    at.rejected = rejected;
    at.purpose = static_cast<int32_t>(noise.purpose);
    at.position = noise.position;
    return -1;
  }

  // True if the last walk needed a token that no race gave: the walk before asked elsewhere, since the arguments were
  // others, or no rank had a token. Under "coupled" each node of the path needs one, else the last draw counts.
  PASS_EXT_HOST_DEVICE bool is_unanswered() const { return is_unanswered_; }

 private:
  PASS_EXT_HOST_DEVICE ShardNode& node(int32_t i) const { return state_.nodes[request_.first + i]; }

  ShardState state_;
  AcceptRequest request_;
  Judge* judges_;
  bool is_final_, has_drawn_ = false, is_unanswered_ = false;
};

// The range of a selection: everything at or above `floor` in the support.
PASS_EXT_HOST_DEVICE void begin_selection(ShardSlot& slot, float floor, uint64_t needed) {
  const Distribution& distribution = slot.distribution;
  constexpr uint64_t lowest_finite = static_cast<uint64_t>(0x00800000u) << kIdBits;
  constexpr int32_t last_id = (1 << kIdBits) - 1;
  SelectRange range{lowest_finite, select_key(distribution.maximum, 0), 0, needed};
  if (floor > -kInfinity && select_key(floor, last_id) > range.low) range.low = select_key(floor, last_id);
  if (distribution.cut > -kInfinity && select_key(distribution.cut, distribution.tie) > range.low)
    range.low = select_key(distribution.cut, distribution.tie);
  slot.range = range;
  slot.is_selecting = 1;
}

// The first bin at which the measures reach what is needed, or the last that is not empty.
struct ReachedBin {
  int32_t bin;
  bool is_enough;
  uint64_t before, measure;  // of the bins in front, and its own
};

PASS_EXT_HOST_DEVICE ReachedBin find_bin(const Answers& answers, int64_t index, const SelectRange& range) {
  ReachedBin found{0, false, range.before, 0};
  uint64_t before = range.before;
  for (int bin = 0; bin < kSelectBins && !found.is_enough; ++bin) {
    const uint64_t measure = answers.measure(index, bin);
    if (measure == 0) continue;
    found = {bin, before + measure >= range.needed, before, measure};
    before += measure;
  }
  return found;
}

// Narrows the range to a bin. Cuts the distribution when the range is one key. `by_mass`: top-p.
PASS_EXT_HOST_DEVICE void narrow(ShardSlot& slot, const ReachedBin& found, bool by_mass) {
  SelectRange& range = slot.range;
  if (!found.is_enough && !by_mass) {  // fewer than k tokens: all stay
    slot.is_selecting = 0;
    return;
  }
  const int shift = range.shift();
  range.high -= static_cast<uint64_t>(found.bin) << shift;
  const uint64_t width = (uint64_t{1} << shift) - 1;
  if (range.high - range.low > width) range.low = range.high - width;
  range.before = found.before;
  if (range.high != range.low) return;
  slot.distribution.cut = logit_of_select_key(range.high);
  slot.distribution.tie = id_of_select_key(range.high);
  slot.is_selecting = 0;
  if (by_mass) slot.kept = static_cast<double>(found.before + found.measure) / static_cast<double>(kMassUnit);
}

// Top-p's range, from the mass that it sees: as in CpuRows::cut_top_p.
PASS_EXT_HOST_DEVICE void begin_nucleus(ShardSlot& slot, double mass, int32_t vocabulary) {
  const Distribution& distribution = slot.distribution;
  const uint64_t needed = mass_to_reach(slot.top_p, mass);
  const float spare = static_cast<float>((1.0 - static_cast<double>(slot.top_p)) * mass / vocabulary * 0.99);
  const float floor = distribution.maximum + logarithm(maximum(spare, 0x1p-60f)) / distribution.scale;
  begin_selection(slot, minimum(floor, distribution.maximum), needed > 0 ? needed : 1);
}

// A row before any answer.
PASS_EXT_HOST_DEVICE void begin_slot(const SamplingParameters& parameters, ShardSlot& slot) {
  slot = {};
  slot.distribution = {-kInfinity, parameters.scale, -kInfinity, -1, 0.0f, 0.0f, 0};
  slot.top_k = parameters.top_k;
  slot.top_p = parameters.top_p;
  slot.min_p = parameters.min_p;
  slot.is_used = 1;
}

// Takes the answers of one round about one row, but for bins.
PASS_EXT_HOST_DEVICE void take_row(const Answers& answers, Round round, int64_t index, int32_t vocabulary,
                                   ShardSlot& slot) {
  Distribution& distribution = slot.distribution;
  if (round == Round::peaks) {
    int32_t id = -1;
    bool bad = false;
    for (int64_t rank = 0; rank < answers.ranks; ++rank) {
      const float largest = answers.number(rank, index, 0);
      bad = bad || !(largest < kInfinity);
      if (!(largest > distribution.maximum)) continue;
      distribution.maximum = largest;
      id = answers.id(rank, index, 1);
    }
    if (bad)
      distribution.status = kBadLogits;
    else if (id < 0)
      distribution.status = kEmptySupport;
    if (distribution.status != 0 || slot.top_k != 1) return;
    distribution.cut = distribution.maximum;
    distribution.tie = id;
    return;
  }
  if (!is_asked(slot, round)) return;
  if (round == Round::top_p)
    begin_nucleus(slot, answers.sum(index, 0, 1), vocabulary);
  else
    set_mass(distribution, answers.sum(index, 0, 1));
}

// Prepares a row for the next round.
PASS_EXT_HOST_DEVICE void prepare_row(Round round, Round next, ShardSlot& slot) {
  if (slot.is_used == 0 || slot.distribution.status != 0) return;
  if (next == Round::counts && round == Round::peaks && slot.top_k > 1)
    begin_selection(slot, -kInfinity, static_cast<uint64_t>(slot.top_k));
  const bool is_filtering = next == Round::counts || next == Round::top_p || next == Round::nucleus;
  if (!is_filtering && slot.min_p > 0.0f) {
    if (cut_at_floor(slot.distribution, slot.min_p)) slot.kept = 0.0;
    slot.min_p = 0.0f;
  }
  if (next == Round::masses && slot.kept > 0.0) set_mass(slot.distribution, slot.kept);
}

// Takes the answers of one round about one node: the logits of its token, its residual sums, its race.
PASS_EXT_HOST_DEVICE void take_node(const Answers& answers, Round round, const AcceptProblem& problem, int64_t index,
                                    const ShardState& state) {
  ShardNode& node = state.nodes[index];
  if (round == Round::peaks) {  // one rank has the token, the others answer -inf
    node.p_logit = node.q_logit = -kInfinity;
    for (int64_t rank = 0; rank < answers.ranks; ++rank) {
      node.p_logit = maximum(node.p_logit, answers.number(rank, index, 2));
      if (problem.has_draft) node.q_logit = maximum(node.q_logit, answers.number(rank, problem.nodes + index, 2));
    }
  } else if (round == Round::residuals && node.asks >= 0 && node.asks < problem.nodes) {
    state.nodes[node.asks].weight_sum = answers.sum(index, 0, 2);
    state.nodes[node.asks].remaining_sum = answers.sum(index, 1, 2);
  } else if (round == Round::races && node.draws != 0) {
    const bool is_coupled = problem.rule == Rule::coupled;
    const int64_t slot = is_coupled ? index : node.request;
    for (int i = 0; i < (is_coupled ? 1 : 2); ++i) {
      float best = -kInfinity;
      node.winner[i] = -1;
      for (int64_t rank = 0; rank < answers.ranks; ++rank) {
        const float score = answers.number(rank, slot, kRaceWords * i);
        if (!(score > best)) continue;  // ranks ascend: the lowest id wins a tie
        best = score;
        node.winner[i] = answers.id(rank, slot, kRaceWords * i + 1);
      }
    }
  }
}

// Asks for the target's own token at every node.
PASS_EXT_HOST_DEVICE void ask_coupled_races(const ShardState& state, const AcceptRequest& request) {
  const AcceptProblem& problem = request.problem;
  if (problem.target_sampling.temperature == nullptr || is_greedy(problem.target_sampling.temperature[request.index]))
    return;
  for (int32_t i = 0; i < request.nodes && i < kMaxTreeNodes; ++i) {
    ShardNode& node = state.nodes[request.first + i];
    const int32_t parent = request.parent(i);
    if (i > 0 && (parent < 0 || parent >= i)) continue;
    node.depth = i == 0 ? 0 : state.nodes[request.first + parent].depth + 1;
    if (node.depth > problem.max_depth) continue;
    node.draws = 1;
    node.kind = Weight::plain;
    node.rejected = 0;
    node.purpose = static_cast<int32_t>(Purpose::coupled);
    node.position = noise_at(problem, request.index, Purpose::coupled, node.depth).position;
  }
}

// Everything that combining reads and writes.
struct ShardCombination {
  AcceptProblem problem;
  Answers answers;
  Round round, next;
  const int64_t* former;  // null in the first round
  int64_t* state;
  int64_t words;
};

// A row and its node before any answer.
PASS_EXT_HOST_DEVICE void begin_node(const ShardState& state, const AcceptRequest& request, int32_t i) {
  const AcceptProblem& problem = request.problem;
  const int64_t packed = request.first + i, index = request.index;
  const int32_t vocabulary = problem.target.vocabulary, draft_index = request.draft_index(i);
  begin_slot(parameters_of(problem.target_sampling, index, vocabulary, 0.0f), state.slots[packed]);
  ShardSlot& draft = state.slots[problem.nodes + packed];
  begin_slot(parameters_of(problem.draft_sampling, index, vocabulary, 0.0f), draft);
  draft.is_used = draft_index >= 0 && draft_index < problem.draft_row_count;
  ShardNode& node = state.nodes[packed];
  node = {};
  node.weight_sum = node.remaining_sum = static_cast<double>(float_of(0x7fc00000u));
  node.winner[0] = node.winner[1] = -1;
  node.request = static_cast<int32_t>(index);
}

// One request's part of combining: takes the answers to `round`, then asks what `next` needs, or finishes. All threads
// of `Team` call it. A team has
//   each(count, function)      function(i) for every i below count, each by one thread
//   narrow_each(count, ...)    the same for bins: narrow() where is_asked says so
//   alone(function)            function() by one thread
//   sync()                     the threads see each other's writes
template <typename Team>
PASS_EXT_HOST_DEVICE void combine_request(Team& team, const ShardState& state, const AcceptProblem& problem,
                                          int64_t index, const Answers& answers, Round round, Round next, bool divided,
                                          Judge* judges) {
  const AcceptRequest request = request_of(problem, index);
  const int32_t count = divided ? request.nodes : 0;
  const bool is_about_rows = round != Round::residuals && round != Round::races;
  if (round == Round::peaks) team.each(count, [&](int32_t i) { begin_node(state, request, i); });
  team.sync();
  for (int side = 0; side < (problem.has_draft ? 2 : 1) && count > 0; ++side) {
    const int64_t first = request.first + side * problem.nodes;
    if (round == Round::counts || round == Round::nucleus)
      team.narrow_each(count, state.slots + first, answers, first, round);
    else if (is_about_rows)
      team.each(count, [&](int32_t i) {
        take_row(answers, round, first + i, problem.target.vocabulary, state.slots[first + i]);
      });
  }
  team.sync();
  for (int side = 0; side < 2; ++side)
    team.each(count,
              [&](int32_t i) { prepare_row(round, next, state.slots[request.first + side * problem.nodes + i]); });
  team.each(count, [&](int32_t i) { take_node(answers, round, problem, request.first + i, state); });
  team.sync();
  team.each(count, [&](int32_t i) {
    ShardNode& node = state.nodes[request.first + i];
    node.asks = -1;
    node.asked = node.draws = 0;
  });
  team.sync();
  const bool is_walked = next == Round::residuals || next == Round::races || next == Round::finish;
  if (!is_walked) return;
  if (next == Round::races && problem.rule == Rule::coupled) {
    if (divided) team.alone([&] { ask_coupled_races(state, request); });
    return;
  }
  team.alone([&] {
    ShardRows rows(state, request, judges, next == Round::finish);
    AcceptWalk<ShardRows> walk(rows, request);
    switch (route_of(problem.rule)) {
      case Route::coupled: walk.template run<Route::coupled>(divided); break;
      case Route::traversal: walk.template run<Route::traversal>(divided); break;
      default: walk.template run<Route::down>(divided);
    }
    if (rows.is_unanswered()) problem.status[index] |= kEmptySupport;
  });
}

}  // namespace pass_ext
