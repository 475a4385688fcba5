// The rows of the next step, by the tokens that the look-ahead slots of this one offer: the problem as raw pointers,
// and the arithmetic on which both devices agree to the bit.
//   slots      those behind the last accepted node; if it has none, those of the nearest node above it that has some,
//              without the ones already passed: slot k of the ancestor at distance k foresees the token of slot 0
//   chance     of a token below a parent = softmax(s)  ·  the offered tokens' mass,   s = score + left[parent] · right
//              + recall; at a temperature softmax(z / 1.5), z being the scores of the race, which hold the target's own
//              noise
//   reach(v)   product of the chances on v's path; candidates are taken by reach, each behind its parent and the
//              siblings that rank before it
//   W(o, m)    = 0.8 · sum over i < m - o of  0.6^i · rate[o] · … · rate[o + i],   what m slots are worth when o of
//              them are passed: the next step has to pay for rows too, and more for those of later slots
//   tokens     = 1 + W(root's) + sum over candidates v of  reach(v) · (1 + W(slots of v) - W(slots of v's parent))
//   rows       = arg max over g, h, d, k of  tokens - costs[rows]:  g slots behind the root, h behind the d-th node of
//              the best chain, which has first children alone, and the first k candidates; 1 + g + h + k at most R
// A row costs 2^-10 tokens at least. Among equals the choice with the fewest rows wins, then smaller g, h, d.
// Without rates nothing is chosen: a request keeps its rows, child k of a node gets the k-th best token below it, and
// the last accepted node's own slots alone offer.
#pragma once

#include <cstdint>

#include "core/next.h"

namespace pass_ext {

constexpr int32_t kMostChosenRows = 64;   // of a request
constexpr int32_t kMostChosenSlots = 8;   // behind a node
constexpr int32_t kMostTreeOffers = 128;  // tokens of a look-ahead row

// reach and W are whole numbers of 2^-20, so that sums have the same bits in any order, and choices that are equally
// good are equal. Products are whole numbers of 2^-40.
constexpr int kChanceBits = 20;
constexpr int32_t kChanceUnit = int32_t{1} << kChanceBits;
PASS_EXT_HOST_DEVICE int32_t chance_units(float value) {
  return static_cast<int32_t>(static_cast<double>(value) * kChanceUnit + 0.5);
}

// A row that gives less is not worth the choice; and choices would be nearly equal, where rounding decides.
constexpr int kLeastCostBits = 10;
constexpr int32_t kLeastReach = kChanceUnit >> 12;  // candidates below it are never worth a row

struct NextTreeProblem {
  NextProblem step;
  const float* rates;  // [slots], the share of places where a slot's best candidate is right; null: rows are kept
  const float* costs;  // [row_count], tokens that a step of 1, 2, … rows costs; null: rows are free
  int32_t* parents;    // [requests, row_count]
  int32_t slots;       // the most behind a node
  int32_t first;       // the row of the judged step whose tokens offered[:, 0] are
};

// ---- the judged step ----

// One request's rows. Malformed parents are the root.
struct JudgedRows {
  int32_t parents[kMostChosenRows];
  int32_t slots[kMostChosenRows];  // the number of a look-ahead row's slot; -1: a node
};

PASS_EXT_HOST_DEVICE void read_judged(const NextTreeProblem& problem, int64_t request, int32_t row,
                                      JudgedRows& judged) {
  const int64_t id = *id_of(problem.step, request, row);
  const int32_t parent = parent_or_root(problem.parents[request * problem.step.row_count + row], row);
  judged.parents[row] = row > 0 && parent < 0 ? 0 : parent;
  judged.slots[row] = id < 0 && id >= -kMostChosenRows ? static_cast<int32_t>(-1 - id) : -1;
}

// The next child of a node behind row `after`, or row_count.
PASS_EXT_HOST_DEVICE int32_t child_behind(const JudgedRows& judged, int32_t node, int32_t after, int32_t row_count) {
  int32_t row = after + 1;
  while (row < row_count && (judged.slots[row] >= 0 || judged.parents[row] != node)) ++row;
  return row;
}

// The row of slot 0 behind a node, or -1.
PASS_EXT_HOST_DEVICE int32_t first_slot_behind(const JudgedRows& judged, int32_t node, int32_t row_count) {
  for (int32_t row = node + 1; row < row_count; ++row)
    if (judged.slots[row] == 0 && judged.parents[row] == node) return row;
  return -1;
}

// Look-ahead rows, as indices in `offered`.
struct SlotRows {
  int32_t first, count;
};

// The slots that foresee what follows the last accepted node. first_slot(node): as first_slot_behind.
template <typename FirstSlot>
PASS_EXT_HOST_DEVICE SlotRows slots_behind(const NextTreeProblem& problem, const JudgedRows& judged, int32_t last,
                                           const FirstSlot& first_slot) {
  const int32_t row_count = problem.step.row_count;
  if (last < 0 || last >= row_count) return {0, 0};
  int32_t node = last, passed = 0, row = first_slot(node);
  while (problem.rates != nullptr && node > 0 && row < 0) {
    node = judged.parents[node];
    ++passed;
    row = first_slot(node);
  }
  if (row < 0) return {0, 0};
  int32_t length = 1;
  while (length < problem.slots && row + length < row_count && judged.slots[row + length] == length &&
         judged.parents[row + length] == row + length - 1)
    ++length;
  const int32_t first = row - problem.first + passed, known = problem.step.slots - first;
  const int32_t count = length - passed < known ? length - passed : known;
  return first < 0 || count < 0 ? SlotRows{0, 0} : SlotRows{first, count};
}

// How deep candidates may be by the tokens that are left of the text. Rows that are kept have tokens as long as the
// target does not add the last one itself.
PASS_EXT_HOST_DEVICE int32_t levels_left(const NextTreeProblem& problem, int64_t request, const NextRoot& root) {
  const int64_t limit = problem.step.limits[request], levels = limit <= root.length ? 0 : limit - root.length - 1;
  const bool is_deep = levels >= kMostChosenRows || (problem.rates == nullptr && levels > 0);
  return is_deep ? kMostChosenRows : static_cast<int32_t>(levels);
}

// ---- candidates, the most probable first ----

struct TreeNodes {
  int32_t count;  // the root, node 0, included
  int32_t token[kMostChosenRows], parent[kMostChosenRows], depth[kMostChosenRows], children[kMostChosenRows];
  int32_t on_chain[kMostChosenRows];  // how deep a node's path is that of the best chain
  int32_t units[kMostChosenRows];     // reach
  float reach[kMostChosenRows];
  int32_t chain[kMostChosenSlots + 1];  // the nodes of the best chain; chain[0] is the root
  int32_t chain_length;
};

PASS_EXT_HOST_DEVICE void begin_tree(TreeNodes& nodes, const NextRoot& root) {
  nodes.count = 1;
  nodes.token[0] = static_cast<int32_t>(root.token);
  nodes.parent[0] = -1;
  nodes.depth[0] = nodes.children[0] = nodes.on_chain[0] = nodes.chain[0] = nodes.chain_length = 0;
  nodes.units[0] = kChanceUnit;
  nodes.reach[0] = 1.0f;
}

// The rows that a request keeps, slots among them, without tokens.
PASS_EXT_HOST_DEVICE void keep_tree(TreeNodes& nodes, const NextRoot& root, const JudgedRows& judged,
                                    int32_t row_count) {
  begin_tree(nodes, root);
  nodes.count = row_count;
  for (int32_t row = 1; row < row_count; ++row) {
    nodes.token[row] = -1;
    nodes.parent[row] = judged.parents[row];
    nodes.depth[row] = nodes.depth[judged.parents[row]] + 1;
  }
}

// The next child that a node may get. reach 0: none.
struct TreeOpening {
  float reach;
  Offer offer;
};
PASS_EXT_HOST_DEVICE TreeOpening nothing_open() { return {0.0f, {-kInfinity, -1}}; }

PASS_EXT_HOST_DEVICE void take_child(TreeNodes& nodes, int32_t parent, const TreeOpening& opening) {
  const int32_t node = nodes.count, depth = nodes.depth[parent] + 1;
  const bool extends_chain = nodes.children[parent] == 0 && nodes.on_chain[parent] == nodes.depth[parent];
  nodes.token[node] = opening.offer.id;
  nodes.parent[node] = parent;
  nodes.depth[node] = depth;
  nodes.children[node] = 0;
  nodes.on_chain[node] = extends_chain ? depth : nodes.on_chain[parent];
  nodes.units[node] = chance_units(opening.reach);
  nodes.reach[node] = opening.reach;
  if (extends_chain) {
    nodes.chain[depth] = node;
    nodes.chain_length = depth;
  }
  ++nodes.children[parent];
  nodes.count = node + 1;
}

// True if children of a node can be had: `slots` of them foresee, and `levels` are left of the text.
PASS_EXT_HOST_DEVICE bool may_have_children(const NextTreeProblem& problem, const TreeNodes& nodes, int32_t node,
                                            int32_t slots, int32_t levels) {
  return nodes.depth[node] < slots && nodes.depth[node] < levels && has_transition(problem.step, nodes.token[node]);
}

// The share of all tokens that the offered ones have, in whole numbers as masses of top-p. score: one's log
// probability.
PASS_EXT_HOST_DEVICE uint64_t offered_mass(float score) {
  return score > -kInfinity ? integer_mass(exponential(minimum(score, 0.0f))) : 0;
}

// By how much scores of a race are flattened: the target draws by this noise and by scores that the slots know but
// roughly.
constexpr float kSharpnessOfRace = 1.0f / 1.5f;

PASS_EXT_HOST_DEVICE bool is_raced(const NextProblem& problem, int64_t request) {
  return problem.sampling.temperature != nullptr && !is_greedy(problem.sampling.temperature[request]);
}

// Sets the chance of each offered token below one parent. `List`: as for race, behind it; each(function) calls
// function(k, offer) for every token with a score. mass: the sum of offered_mass.
template <typename List>
PASS_EXT_HOST_DEVICE void set_chances(const List& list, uint64_t mass, bool raced, float* chances) {
  const Offer most = list.best(before_all());
  if (most.id < 0) return;
  const float sharpness = raced ? kSharpnessOfRace : 1.0f;
  const auto weight = [&](const Offer& offer) { return exponential((offer.score - most.score) * sharpness); };
  const uint64_t total = list.sum([&](const Offer& offer) { return integer_mass(weight(offer)); });
  const double share = static_cast<double>(mass) / kMassUnit;
  const float ratio = static_cast<float>((share < 1.0 ? share : 1.0) / (static_cast<double>(total) / kMassUnit));
  list.each([&](int32_t k, const Offer& offer) { chances[k] = minimum(weight(offer) * ratio, 1.0f); });
}

// The best child behind `last` of a parent of this reach. place_of(offer): its first place in the list.
template <typename List>
PASS_EXT_HOST_DEVICE TreeOpening opening_behind(const List& list, const float* chances, const Offer& last,
                                                float reach) {
  const Offer offer = list.best(last);
  if (offer.id < 0) return nothing_open();
  return {reach * chances[list.place_of(offer)], offer};
}

// True if a is taken before b: larger reach first, children of earlier nodes among equals.
PASS_EXT_HOST_DEVICE bool is_taken_before(float reach_a, int32_t parent_a, float reach_b, int32_t parent_b) {
  return reach_a > reach_b || (reach_a == reach_b && parent_a < parent_b);
}

// ---- the shape ----

PASS_EXT_HOST_DEVICE float checked_rate(const NextTreeProblem& problem, int32_t slot) {
  return minimum(maximum(problem.rates[slot], 0.0f), 1.0f);
}

// W(passed, slots) by [passed][slots].
struct TreeWorth {
  int32_t of[kMostChosenSlots + 1][kMostChosenSlots + 1];
};

PASS_EXT_HOST_DEVICE int32_t worth_of_slots(const NextTreeProblem& problem, int32_t passed, int32_t slots) {
  float total = 0.0f, right = 0.8f;
  for (int32_t slot = passed; slot < slots && slot < problem.slots; ++slot) {
    right *= checked_rate(problem, slot);
    total += right;
    right *= 0.6f;
  }
  return chance_units(total);
}

// A step's cost in units of 2^-40. NaN counts as 0.
PASS_EXT_HOST_DEVICE int64_t cost_of_rows(const NextTreeProblem& problem, int32_t rows) {
  const int64_t least = static_cast<int64_t>(rows) << (2 * kChanceBits - kLeastCostBits);
  if (problem.costs == nullptr) return least;
  const float cost = problem.costs[rows - 1], most = 0x1p20f;
  const float known = cost > -most ? minimum(cost, most) : cost <= -most ? -most : 0.0f;
  return least + static_cast<int64_t>(static_cast<double>(known) * 0x1p40);
}

struct TreeForm {
  int32_t behind_root, behind_chain, depth;  // g, h, d
};

PASS_EXT_HOST_DEVICE int32_t count_forms(int32_t slots, int32_t chain_length) {
  return (slots + 1) * (1 + slots * chain_length);
}
PASS_EXT_HOST_DEVICE TreeForm form_at(int32_t index, int32_t slots) {
  const int32_t behind_root = index % (slots + 1), rest = index / (slots + 1);
  if (rest == 0) return {behind_root, 0, 0};
  return {behind_root, 1 + (rest - 1) % slots, 1 + (rest - 1) / slots};
}

// A shape and its value. Smaller keys win among equal values: fewer rows, then smaller g, h, d.
struct TreeChoice {
  int64_t value;
  uint32_t key;
};
PASS_EXT_HOST_DEVICE bool is_better_choice(const TreeChoice& a, const TreeChoice& b) {
  return a.value > b.value || (a.value == b.value && a.key < b.key);
}
PASS_EXT_HOST_DEVICE TreeChoice no_choice() { return {INT64_MIN, ~0u}; }
PASS_EXT_HOST_DEVICE uint32_t key_of(const TreeForm& form, int32_t rows) {
  return static_cast<uint32_t>(rows << 12 | form.behind_root << 8 | form.behind_chain << 4 | form.depth);
}

// The best number of candidates of a form. costs: of 1, 2, … rows.
PASS_EXT_HOST_DEVICE TreeChoice best_of_form(const TreeNodes& nodes, const TreeWorth& worth, const int64_t* costs,
                                             const TreeForm& form, int32_t row_count, int32_t levels) {
  const int32_t fixed = 1 + form.behind_root + form.behind_chain, room = row_count - fixed;
  const int32_t least = nodes.chain[form.depth], most = nodes.count - 1 < room ? nodes.count - 1 : room;
  // Slots that foresee tokens behind the end of the text are worth nothing.
  if (form.behind_root > 0 && form.behind_root >= levels) return no_choice();
  if (form.behind_chain > 0 && form.depth + form.behind_chain >= levels) return no_choice();
  const auto worth_behind = [&](int32_t node) {
    const int32_t depth = nodes.depth[node];
    return form.behind_chain > 0 && nodes.on_chain[node] >= form.depth ? worth.of[depth - form.depth][form.behind_chain]
                                                                       : worth.of[depth][form.behind_root];
  };
  TreeChoice best = no_choice();
  int64_t tokens = static_cast<int64_t>(kChanceUnit + worth.of[0][form.behind_root]) << kChanceBits;
  for (int32_t node = 0; node <= most; ++node) {
    if (node > 0)
      tokens += static_cast<int64_t>(nodes.units[node]) *
                (kChanceUnit + worth_behind(node) - worth_behind(nodes.parent[node]));
    if (node < least) continue;
    const int64_t value = tokens - costs[fixed + node - 1];
    if (value > best.value) best = {value, key_of(form, fixed + node)};
  }
  return best;
}

// ---- its rows ----

struct TreeShape {
  int32_t rows, nodes, behind_root, behind_chain, depth;
};
PASS_EXT_HOST_DEVICE TreeShape shape_of(const TreeChoice& choice) {
  const int32_t key = static_cast<int32_t>(choice.key);
  const int32_t rows = key >> 12, behind_root = key >> 8 & 15, behind_chain = key >> 4 & 15;
  return {rows, rows - behind_root - behind_chain, behind_root, behind_chain, key & 15};
}

struct TreeRow {
  int64_t id, token;
  int32_t parent, depth;
};

// Nodes of the best chain have the first rows, behind each other as they would lie in the cache: then attention adds up
// keys and values in the order of plain decoding, and 16-bit floats round alike. The others keep their order behind
// them.
struct RowOrder {
  const TreeNodes& nodes;
  int32_t on_chain;  // nodes of the chain among the chosen ones, without the root

  PASS_EXT_HOST_DEVICE RowOrder(const TreeNodes& nodes, const TreeShape& shape) : nodes(nodes), on_chain(0) {
    while (on_chain < nodes.chain_length && nodes.chain[on_chain + 1] < shape.nodes) ++on_chain;
  }
  PASS_EXT_HOST_DEVICE bool is_on_chain(int32_t node) const { return nodes.on_chain[node] == nodes.depth[node]; }
  PASS_EXT_HOST_DEVICE int32_t row_of(int32_t node) const {
    if (is_on_chain(node)) return nodes.depth[node];
    int32_t behind = 0;
    while (behind < on_chain && nodes.chain[on_chain - behind] > node) ++behind;
    return node + behind;
  }
  PASS_EXT_HOST_DEVICE int32_t node_at(int32_t row) const {
    if (row <= on_chain) return nodes.chain[row];
    int32_t node = row;
    while (is_on_chain(node) || row_of(node) != row) --node;
    return node;
  }
};

// The root, candidates, the slots behind the root, those behind the chain's node, rows that are not in use.
PASS_EXT_HOST_DEVICE TreeRow tree_row(const TreeNodes& nodes, const TreeShape& shape, const NextRoot& root,
                                      int32_t row) {
  if (row == 0) return {root.token, root.token, -1, 0};
  if (row < shape.nodes) {
    const RowOrder order(nodes, shape);
    const int32_t node = order.node_at(row);
    return {nodes.token[node], nodes.token[node], order.row_of(nodes.parent[node]), nodes.depth[node]};
  }
  const int32_t behind_chain = shape.nodes + shape.behind_root;
  if (row >= shape.rows) return {0, -1, 0, 1};
  const bool is_roots = row < behind_chain;
  const int32_t slot = row - (is_roots ? shape.nodes : behind_chain), depth = is_roots ? 0 : shape.depth;
  return {-1 - int64_t{slot}, -1, slot == 0 ? depth : row - 1, depth + 1 + slot};  // depth: the row of chain[depth]
}

// A row that is kept.
PASS_EXT_HOST_DEVICE TreeRow kept_row(const TreeNodes& nodes, const JudgedRows& judged, const NextRoot& root,
                                      int32_t row) {
  if (row == 0) return {root.token, root.token, -1, 0};
  const int64_t token = nodes.token[row], slot = judged.slots[row];
  return {slot >= 0 ? -1 - slot : token < 0 ? 0 : token, token, nodes.parent[row], nodes.depth[row]};
}

PASS_EXT_HOST_DEVICE int32_t count_tokens(const TreeNodes& nodes) {
  int32_t count = 1;
  for (int32_t row = 1; row < nodes.count; ++row) count += nodes.token[row] >= 0;
  return count;
}

PASS_EXT_HOST_DEVICE void write_tree_row(const NextTreeProblem& problem, int64_t request, const NextRoot& root,
                                         int32_t row, const TreeRow& values) {
  *id_of(problem.step, request, row) = values.id;
  *token_of(problem.step, request, row) = values.token;
  *position_of(problem.step, request, row) = root.length - 1 + values.depth;
  problem.parents[request * problem.step.row_count + row] = values.parent;
}

}  // namespace pass_ext
