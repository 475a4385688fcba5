// torch.ops.pass_ext.next_tree_ on the CPU: values checked, parallel split, registration. The formulas: core/next.h and
// core/next_tree.h; the scores: cpu/next_kernels-inl.h.
#include "host/next.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "cpu/workers.h"

#define PASS_EXT_KERNELS "cpu/next_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

// Below this many products of transition scores a second thread costs more than it saves.
constexpr int64_t kProductsPerTask = 256 * 1024;

// The offered tokens of one row with their scores: the `List` of core/next.h.
struct CpuOffers {
  const int64_t* tokens;
  float* scores;
  int32_t count;
  int32_t* followed;  // memory for what the text recalls

  Offer at(int32_t k) const { return {scores[k], static_cast<int32_t>(tokens[k])}; }

  Offer best(const Offer& last) const {
    Offer best{-kInfinity, -1};
    for (int32_t k = 0; k < count; ++k) {
      const Offer offer = at(k);
      if (offer.score > -kInfinity && ranks_before(last, offer) && (best.id < 0 || ranks_before(offer, best)))
        best = offer;
    }
    return best;
  }

  template <typename Term>
  uint64_t sum(const Term& term) const {
    uint64_t sum = 0;
    for (int32_t k = 0; k < count; ++k)
      if (scores[k] > -kInfinity) sum += term(at(k));
    return sum;
  }

  template <typename Score>
  void replace(const Score& score) {
    for (int32_t k = 0; k < count; ++k) scores[k] = score(at(k));
  }

  template <typename Function>
  void each(const Function& function) const {
    for (int32_t k = 0; k < count; ++k)
      if (scores[k] > -kInfinity) function(k, at(k));
  }

  int32_t place_of(const Offer& offer) const {
    int32_t k = 0;
    while (tokens[k] != offer.id || scores[k] != offer.score) ++k;
    return k;
  }
};

// The numbers of a request that come from the accept result.
void check_request(const char* op, const NextProblem& problem, int64_t b) {
  if (problem.lengths[b] < 0 || problem.lengths[b] > kMostLength)
    refuse(op, "lengths must be in [0, ", kMostLength, "], got ", problem.lengths[b], " at ", b);
  const int32_t accepted = problem.num_accepted[b];
  if (accepted < -1 || accepted >= problem.width)
    refuse(op, "num_accepted must be in [-1, ", problem.width, ") (path has ", problem.width, " columns), got ",
           accepted, " at ", b);
  if (problem.text && problem.lengths[b] < problem.limits[b] && problem.lengths[b] + accepted + 1 > problem.text_room)
    refuse(op, "text must have a column for every token, ", problem.lengths[b] + accepted + 1, " at ", b, ", got ",
           problem.text_room);
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

// What the report says of the next step.
void report_next(const NextProblem& problem, int64_t request, int32_t rows, int32_t nodes) {
  int64_t* const report = problem.report + request * (kReportNumbers + problem.report_width);
  report[3] = rows;
  report[4] = nodes;
}

// Moves a request to its root, in the state and in its text.
void move_to(const NextProblem& problem, int64_t request, const NextRoot& root) {
  problem.lengths[request] = root.length;
  problem.prefix_lens[request] = static_cast<int32_t>(root.length - 1);
  if (problem.text && root.moves)
    for (int32_t i = 0; i <= problem.num_accepted[request]; ++i) write_text(problem, request, root, i);
}

// The scores below a node whose token is `before`. token(node), parent(node): of a node behind the root.
template <typename Token, typename Parent>
void score_below(const NextProblem& problem, int64_t request, const NextRoot& root, const CpuOffers& offers,
                 int32_t node, int64_t before, const Token& token, const Parent& parent) {
  const float* const scores = problem.scores + (offers.tokens - problem.offered);
  PASS_EXT_AT_ISA(score_offered(problem, offers.tokens, scores, before, offers.scores));
  if (!problem.text) return;
  const RecallText text = text_of(problem, request, root);
  const RecallContext path = path_behind(text, root, node, token, parent);
  PASS_EXT_AT_ISA(recall_offered(text, path, offers.tokens, offers.count, offers.followed, offers.scores));
}

int64_t requests_per_task(const NextProblem& problem) {
  const int64_t products = int64_t{problem.row_count} * problem.count * std::max(problem.rank, 1);
  return std::max<int64_t>(1, kProductsPerTask / std::max<int64_t>(1, products));
}

void check_values(const NextTreeProblem& problem) {
  constexpr const char* kOp = "next_tree_";
  const NextProblem& step = problem.step;
  for (int64_t b = 0; b < step.requests; ++b) {
    for (int32_t row = 0; row < step.row_count; ++row) {
      const int32_t parent = problem.parents[b * step.row_count + row];
      if (row == 0 ? parent != -1 : parent < 0 || parent >= row)
        refuse(kOp, "parents must be -1 for the root and an earlier row for each other row, got ", parent, " at [", b,
               ", ", row, "]");
    }
    check_request(kOp, step, b);
    const int32_t accepted = step.num_accepted[b], last = accepted < 0 ? -1 : step.path[b * step.width + accepted];
    if (step.offered && last >= step.row_count)
      refuse(kOp, "path must be below ", step.row_count, " (the rows of a request), got ", last, " at [", b, ", ",
             accepted, "]");
  }
}

// The candidates of one request, with buffers for the offers below each of them.
class CpuTree {
 public:
  explicit CpuTree(const NextTreeProblem& problem)
      : problem_(problem),
        scores_(static_cast<size_t>(problem.step.row_count) * problem.step.count),
        chances_(scores_.size()),
        followed_(problem.step.text ? int64_t{kRecallTokens} * problem.step.count : 0) {}

  TreeNodes nodes;

  // In the order of their reach.
  void fill(int64_t request, const NextRoot& root, const SlotRows& slots, int32_t levels) {
    begin_tree(nodes, root);
    for (int32_t slot = 0; slot < slots.count; ++slot) {
      mass_[slot] = 0;
      const float* const scores = problem_.step.scores + offset_of(request, slots.first + slot);
      for (int32_t k = 0; k < problem_.step.count; ++k) mass_[slot] += offered_mass(scores[k]);
    }
    for (int32_t node = 0; nodes.count < problem_.step.row_count; node = nodes.count - 1) {
      open_below(request, root, slots, levels, node);
      int32_t parent = 0;
      for (int32_t other = 1; other < nodes.count; ++other)
        if (is_taken_before(open_[other].reach, other, open_[parent].reach, parent)) parent = other;
      if (chance_units(open_[parent].reach) < kLeastReach) return;
      const TreeOpening taken = open_[parent];
      take_child(nodes, parent, taken);
      open_[parent] = opening_behind(offers_[parent], chances_of(parent), taken.offer, nodes.reach[parent]);
    }
  }

  // Of the rows that a request keeps. Parents come first.
  void fill_kept(int64_t request, const NextRoot& root, const JudgedRows& judged, const SlotRows& slots,
                 int32_t levels) {
    const int32_t row_count = problem_.step.row_count;
    keep_tree(nodes, root, judged, row_count);
    for (int32_t node = 0; node < row_count; ++node) {
      int32_t child = child_behind(judged, node, node, row_count);
      if (child == row_count || !may_have_children(problem_, nodes, node, slots.count, levels)) continue;
      const CpuOffers& offers = rank_below(request, root, slots, node);
      for (Offer last = offers.best(before_all()); child < row_count && last.id >= 0; last = offers.best(last)) {
        nodes.token[child] = last.id;
        child = child_behind(judged, node, child, row_count);
      }
    }
  }

 private:
  int64_t offset_of(int64_t request, int32_t row) const {
    return (request * problem_.step.slots + row) * problem_.step.count;
  }
  float* chances_of(int32_t node) { return chances_.data() + int64_t{node} * problem_.step.count; }

  // The tokens offered below a node, with the scores by which they rank.
  CpuOffers& rank_below(int64_t request, const NextRoot& root, const SlotRows& slots, int32_t node) {
    const NextProblem& step = problem_.step;
    const int32_t depth = nodes.depth[node];
    const int64_t place = offset_of(request, slots.first + depth);
    CpuOffers& offers = offers_[node];
    offers = {step.offered + place, scores_.data() + int64_t{node} * step.count, step.count, followed_.data()};
    score_below(
        step, request, root, offers, node, nodes.token[node], [&](int32_t at) { return nodes.token[at]; },
        [&](int32_t at) { return nodes.parent[at]; });
    race(offers, step, request, root.length + depth);
    return offers;
  }

  // The best child of a new node.
  void open_below(int64_t request, const NextRoot& root, const SlotRows& slots, int32_t levels, int32_t node) {
    open_[node] = nothing_open();
    if (!may_have_children(problem_, nodes, node, slots.count, levels)) return;
    const CpuOffers& offers = rank_below(request, root, slots, node);
    set_chances(offers, mass_[nodes.depth[node]], is_raced(problem_.step, request), chances_of(node));
    open_[node] = opening_behind(offers, chances_of(node), before_all(), nodes.reach[node]);
  }

  const NextTreeProblem& problem_;
  std::vector<float> scores_, chances_;
  std::vector<int32_t> followed_;
  CpuOffers offers_[kMostChosenRows];
  TreeOpening open_[kMostChosenRows];
  uint64_t mass_[kMostChosenSlots];
};

struct TreeCosts {
  TreeWorth worth;
  int64_t of_rows[kMostChosenRows];
};

TreeCosts costs_of(const NextTreeProblem& problem) {
  TreeCosts costs{};
  if (problem.rates == nullptr) return costs;
  for (int32_t passed = 0; passed <= kMostChosenSlots; ++passed)
    for (int32_t slots = 0; slots <= kMostChosenSlots; ++slots)
      costs.worth.of[passed][slots] = worth_of_slots(problem, passed, slots);
  for (int32_t rows = 1; rows <= problem.step.row_count; ++rows) costs.of_rows[rows - 1] = cost_of_rows(problem, rows);
  return costs;
}

void choose(const NextTreeProblem& problem, int64_t request, const TreeCosts& costs, CpuTree& tree) {
  const NextProblem& step = problem.step;
  const NextRoot root = next_root(step, request);
  report_step(step, request, root);
  JudgedRows judged;
  for (int32_t row = 0; row < step.row_count; ++row) read_judged(problem, request, row, judged);
  const auto first_slot = [&](int32_t node) { return first_slot_behind(judged, node, step.row_count); };
  const SlotRows slots = slots_behind(problem, judged, root.last, first_slot);
  const int32_t levels = levels_left(problem, request, root);
  move_to(step, request, root);
  if (problem.rates == nullptr) {
    tree.fill_kept(request, root, judged, slots, levels);
    report_next(step, request, step.row_count, count_tokens(tree.nodes));
    for (int32_t row = 0; row < step.row_count; ++row)
      write_tree_row(problem, request, root, row, kept_row(tree.nodes, judged, root, row));
    return;
  }
  tree.fill(request, root, slots, levels);
  TreeChoice best = no_choice();
  for (int32_t form = 0; form < count_forms(problem.slots, tree.nodes.chain_length); ++form) {
    const TreeChoice choice =
        best_of_form(tree.nodes, costs.worth, costs.of_rows, form_at(form, problem.slots), step.row_count, levels);
    if (is_better_choice(choice, best)) best = choice;
  }
  const TreeShape shape = shape_of(best);
  report_next(step, request, shape.rows, shape.nodes);
  for (int32_t row = 0; row < step.row_count; ++row)
    write_tree_row(problem, request, root, row, tree_row(tree.nodes, shape, root, row));
}

void next_tree_on_cpu(const NextTreeProblem& problem, const Tensor&) {
  check_values(problem);
  const TreeCosts costs = costs_of(problem);
  const auto run = [&](int64_t begin, int64_t end) {
    CpuTree tree(problem);
    for (int64_t request = begin; request < end; ++request) choose(problem, request, costs, tree);
  };
  for_ranges(problem.step.requests, requests_per_task(problem.step), run);
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("next_tree_", TORCH_BOX(&pass_ext::next_tree<pass_ext::next_tree_on_cpu>));
}
