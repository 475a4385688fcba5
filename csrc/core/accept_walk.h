// The accept step: from logits to accepted tokens. Every rule, once, for all devices. p is the target's distribution at
// a node, q the distribution its children were drawn from, (x)+ = max(x, 0), u a fresh uniform in [0, 1) for each child
// or leaf.
//
//   coupled    the token at a node is argmax(ln p - ln E), E the noise of seed and position;
//              go on at the child that is it
//   rejection  child x: accept iff u < p(x) / q(x), else p <- norm((p - q)+), q <- norm(q without x); none: y ~ p
//   rejection_with_replacement    the same, q stays
//   kseq       beta(rho) = sum min(p / rho, q); the smallest rho in [1, K] with 1 - (1 - beta)^K <= rho beta;
//              accept iff rho u q(x) < p(x); none: y ~ norm((p - min(p / rho, q) (1 - (1 - beta)^K) / beta)+)
//   traversal  w(root) = 1, w(x) = min(1, w p(x) / q(x)); the first leaf in depth-first order:
//              accept its whole path iff u < w, y ~ p there; else delete it, and at its parent,
//              with S = sum (w p - q)+: p <- norm((w p - q)+), q <- norm(q without x), w <- S / (S + 1 - w);
//              go on with the next leaf
//   block      traversal on a chain, which is block verification
//   coupled_inverse    coupled, but the token is the least v with F(v) > u, F the sums of p in the order of ids and u
//              one number for seed and position
//   adaptive_rejection    rejection, but accept iff u < p(x) / q(x) + alpha (1 - max p), p before any rejection
//   typical    accept iff p(x) > min(threshold, alpha exp(-H(p))); the longest accepted path, then y ~ p
//   joint      w(root) = 1, w(x) = w p(x) / q(x); the longest path that ends with w > threshold, then y ~ p
//
// A child outside q's remaining support is a fixed proposal: q is one at it. Rejecting it takes its p away. After
// rejections p is proportional to (p_0 - beta q_0)+, one beta per node. A deleted token keeps the beta it had then: its
// cut. So a rule needs sums over a row, never a stored distribution.
//
// `Rows` is how a device works on rows: all its threads run this code together, and every method returns the same value
// to all of them. One that sweeps over a row may take the Judge and put it back unchanged.
#pragma once

#include <cstdint>

#include "core/accept.h"
#include "core/distribution.h"
#include "core/noise.h"
#include "core/platform.h"
#include "core/tree.h"

namespace pass_ext {

template <typename Rows>
class AcceptWalk {
 public:
  PASS_EXT_HOST_DEVICE AcceptWalk(Rows& rows, const AcceptRequest& request) : rows_(rows), request_(request) {}

  // `divided`: cu_nodes divides the rows. If it does not, no row has a known owner.
  template <Route known = Route::any>
  PASS_EXT_HOST_DEVICE void run(bool divided) {
    const AcceptProblem& problem = request_.problem;
    if (!divided) return write(-1, -1, kBadTree);
    if (request_.nodes == 0) return write(-1, -1, 0);
    int32_t status = 0;
    if (!is_tree()) {  // the drafts are ignored, the target still gives its token
      status = kBadTree;
      request_.nodes = 1;
    }
    const bool greedy = problem.target_sampling.temperature == nullptr ||
                        is_greedy(problem.target_sampling.temperature[request_.index]);
    p_parameters_ = parameters_of(problem.target_sampling, request_.index, problem.target.vocabulary, 0.0f);
    q_parameters_ = parameters_of(problem.draft_sampling, request_.index, problem.target.vocabulary, 0.0f);
    seed_ = problem.seeds == nullptr ? 0 : static_cast<uint64_t>(problem.seeds[request_.index]);
    position_ = problem.positions == nullptr ? 0 : problem.positions[request_.index];
    if (greedy || goes<known>(Route::coupled))
      walk_coupled<false>(greedy);  // at temperature 0 every rule is this walk
    else if (goes<known>(Route::inverse))
      walk_coupled<true>(false);
    else if (goes<known>(Route::traversal))
      walk_traversal();
    else if (goes<known>(Route::longest))
      walk_longest();
    else if (goes<known>(Route::kseq))
      walk_down<true>();
    else if (goes<known>(Route::down))
      walk_down<false>();
    write(stop_, token_, status | status_);
  }

 private:
  struct Odds {
    double p, q;   // current, for the child's token; q = 0: a fixed proposal
    double left;   // (p_0 - cut q_0)+, unnormalised
    int32_t twin;  // an earlier deleted child with the same token, or -1
  };

  template <Route known>
  PASS_EXT_HOST_DEVICE bool goes(Route route) const {
    return (known == Route::any ? route_of(request_.problem.rule) : known) == route;
  }

  PASS_EXT_HOST_DEVICE bool is_tree() {
    if (request_.nodes > kMaxTreeNodes) return false;
    if (request_.problem.parents == nullptr) return true;
    const bool chain_only = request_.problem.rule == Rule::block;
    return rows_.first_node(0, request_.nodes, [&](int32_t i) {
      const int32_t parent = request_.parent(i);
      return i == 0 ? parent != -1 : parent < 0 || parent >= i || (chain_only && parent != i - 1);
    }) < 0;
  }

  PASS_EXT_HOST_DEVICE bool is_token(int64_t token) const {
    return token >= 0 && token < request_.problem.target.vocabulary;
  }

  // The first child of `node` with index `from` or above whose token is in the vocabulary, or -1.
  PASS_EXT_HOST_DEVICE int32_t next_child(int32_t node, int32_t from) {
    return rows_.first_node(from, request_.nodes,
                            [&](int32_t i) { return request_.parent(i) == node && is_token(request_.token(i)); });
  }

  PASS_EXT_HOST_DEVICE Distribution describe_target(int32_t node, bool needs_mass) {
    const Distribution distribution = rows_.describe(request_.target_row(node), p_parameters_, needs_mass);
    status_ |= distribution.status;
    Distribution* const described = request_.problem.described;
    if (described != nullptr && rows_.is_leader()) described[request_.first + node] = distribution;
    return distribution;
  }

  // Describes p at a node and, if it has children to judge, q. Returns false if they cannot be judged: their draft row
  // does not exist or is no distribution.
  PASS_EXT_HOST_DEVICE bool open(int32_t node, bool has_children, Judge& judge) {
    judge = {};
    judge.node = node;
    judge.weight = judge.total = judge.remaining = 1.0;
    judge.p_row = request_.target_row(node);
    judge.p = describe_target(node, true);
    const int32_t draft_index = has_children ? request_.draft_index(node) : -1;
    if (judge.p.status != 0 || draft_index == -1) return true;
    if (draft_index < 0 || draft_index >= request_.problem.draft_row_count) {
      status_ |= kBadTree;
      return false;
    }
    judge.q_row = request_.draft_row(node, draft_index);
    judge.q = rows_.describe(judge.q_row, q_parameters_, true);
    status_ |= judge.q.status;
    judge.has_q = judge.q.status == 0;
    return judge.has_q;
  }

  PASS_EXT_HOST_DEVICE float target_probability(const Judge& judge, int32_t id) {
    return probability(judge.p, rows_.logit(judge.p_row, id), id);
  }
  PASS_EXT_HOST_DEVICE float draft_probability(const Judge& judge, int32_t id) {
    return judge.has_q ? probability(judge.q, rows_.logit(judge.q_row, id), id) : 0.0f;
  }

  PASS_EXT_HOST_DEVICE Odds odds_of(const Judge& judge, int32_t child) {
    const int64_t token = request_.token(child);
    const int32_t id = static_cast<int32_t>(token);
    const float p = target_probability(judge, id), q = draft_probability(judge, id);
    const int32_t twin = rows_.first_node(judge.node + 1, child, [&](int32_t i) {
      return request_.parent(i) == judge.node && request_.token(i) == token && rows_.cut(i) != kNotCut;
    });
    const float beta = twin < 0 ? static_cast<float>(judge.beta) : rows_.cut(twin);
    Odds odds;
    odds.twin = twin;
    odds.left = beta == kInfinity ? 0.0 : residual_weight(p, q, beta);
    odds.p = judge.total > 0.0 ? odds.left / judge.total : 0.0;
    odds.q = twin < 0 && judge.remaining > 0.0 ? q / judge.remaining : 0.0;
    return odds;
  }

  // Rejects a child: updates p, q and w of its parent. `replaced`: drafts are drawn with replacement, so q stays.
  // Without `needs_sums` only a draw from p follows, and that needs neither total nor remaining.
  PASS_EXT_HOST_DEVICE void reject(Judge& judge, int32_t child, const Odds& odds, bool replaced, bool needs_sums) {
    const double weight = judge.weight, total = judge.total;
    judge.changed = true;
    if (!(weight > 0.0) || !(total > 0.0)) {
      judge.weight = weight >= 1.0 ? 1.0 : 0.0;
      return;
    }
    double mass;  // S
    if (odds.q > 0.0) {
      judge.beta += total / (weight * judge.remaining);
      if (!replaced) rows_.set_cut(child, static_cast<float>(judge.beta));
      if (!needs_sums) return;
      const ResidualSums sums = rows_.residual_sums(judge, request_);
      judge.total = sums.weight;
      if (!replaced) judge.remaining = sums.remaining;
      mass = weight * judge.total / total;
    } else {
      rows_.set_cut(odds.twin < 0 ? child : odds.twin, kInfinity);
      judge.total = total - odds.left;
      mass = weight * judge.total / total;
    }
    const double rest = mass + 1.0 - weight;
    judge.weight = weight >= 1.0 ? 1.0 : rest > 0.0 ? mass / rest : 0.0;
  }

  PASS_EXT_HOST_DEVICE Noise noise(Purpose purpose, int32_t depth) const {
    return noise_at(request_.problem, request_.index, purpose, depth);
  }

  // Draws y from p as it stands at a node; from p_0 if rounding left nothing of p.
  PASS_EXT_HOST_DEVICE int32_t draw(Judge& judge, const Weight& weight, bool rejected, int32_t depth) {
    const Noise chosen = noise(rejected ? Purpose::residual : Purpose::bonus, depth);
    const int32_t id = rows_.draw(judge, weight, request_, rejected, chosen);
    return id >= 0 ? id : rows_.draw(judge, {Weight::plain, 0, 0}, request_, false, chosen);
  }
  PASS_EXT_HOST_DEVICE int32_t draw(Judge& judge, bool rejected, int32_t depth) {
    const Weight weight{judge.beta > 0.0 ? Weight::residual : Weight::plain, static_cast<float>(judge.beta), 0};
    return draw(judge, weight, rejected, depth);
  }

  PASS_EXT_HOST_DEVICE auto throw_coin(int32_t node) const { return coin(seed_, position_, node); }

  // Ends the walk at a row that is no distribution: the token that led there is the last one emitted.
  PASS_EXT_HOST_DEVICE void stop_before(int32_t node) {
    stop_ = node == 0 ? 0 : request_.parent(node);
    token_ = node == 0 ? -1 : request_.token(node);
  }
  PASS_EXT_HOST_DEVICE void stop_at(int32_t node, int64_t token) {
    stop_ = node;
    token_ = token;
  }

  template <bool is_inverse>
  PASS_EXT_HOST_DEVICE void walk_coupled(bool greedy) {
    int32_t node = 0;
    for (int32_t depth = 0;; ++depth) {
      Judge judge{};
      judge.node = node;
      judge.p_row = request_.target_row(node);
      judge.p = describe_target(node, false);
      if (judge.p.status != 0) return stop_before(node);
      int64_t token;
      if constexpr (is_inverse)
        token = rows_.invert(judge, uniform_bits(noise(Purpose::inverse, depth)));
      else
        token = greedy ? judge.p.tie
                       : rows_.draw(judge, {Weight::plain, 0, 0}, request_, false, noise(Purpose::coupled, depth));
      const int32_t child =
          depth == request_.problem.max_depth ? -1 : rows_.first_node(node + 1, request_.nodes, [&](int32_t i) {
            return request_.parent(i) == node && request_.token(i) == token;
          });
      if (child < 0) return stop_at(node, token);
      node = child;
    }
  }

  template <bool is_kseq>
  PASS_EXT_HOST_DEVICE void walk_down() {
    reset_cuts();
    int32_t node = 0;
    for (int32_t depth = 0;; ++depth) {
      const int32_t first = first_child(node, depth);
      Judge judge;
      const bool judged = open(node, first >= 0, judge);
      if (judge.p.status != 0) return stop_before(node);
      if (first < 0 || !judged) return stop_at(node, draw(judge, false, depth));
      Weight weight{Weight::plain, 0, 0};
      int32_t accepted;
      if constexpr (is_kseq)
        accepted = judge.has_q ? judge_kseq(judge, first, weight) : judge_in_turn(judge, first, weight);
      else
        accepted = judge_in_turn(judge, first, weight);
      if (accepted < 0) return stop_at(node, draw(judge, weight, true, depth));
      node = accepted;
    }
  }

  // Rejection, with and without replacement. Returns the accepted child; or -1, and in `weight` the weights of the
  // final draw.
  PASS_EXT_HOST_DEVICE int32_t judge_in_turn(Judge& judge, int32_t child, Weight& weight) {
    const bool replaced = request_.problem.rule == Rule::rejection_with_replacement;
    // The largest logit has weight 1, so max p is one over the mass.
    const bool adapts = request_.problem.rule == Rule::adaptive_rejection;
    const double tolerance = adapts ? request_.problem.alpha * (1.0 - judge.p.inverse_mass) : 0.0;
    while (child >= 0) {
      const Odds odds = odds_of(judge, child);
      const double bound = (odds.q > 0.0 ? odds.p / odds.q : odds.p) + tolerance;
      if (odds.p > 0.0 && throw_coin(child) < bound) return child;
      const int32_t next = next_child(judge.node, child + 1);
      reject(judge, child, odds, replaced, next >= 0);
      child = next;
    }
    if (judge.beta > 0.0) weight = {Weight::residual, static_cast<float>(judge.beta), 0};
    return -1;
  }

  PASS_EXT_HOST_DEVICE int32_t judge_kseq(Judge& judge, int32_t first, Weight& weight) {
    int32_t count = 0;
    for (int32_t child = first; child >= 0; child = next_child(judge.node, child + 1))
      count += draft_probability(judge, static_cast<int32_t>(request_.token(child))) > 0.0f;
    double rho = 1.0, share = 1.0;                        // share: 1 - (1 - beta)^K over beta
    if (count > 1) choose_rho(judge, count, rho, share);  // for one child both are 1
    for (int32_t child = first; child >= 0; child = next_child(judge.node, child + 1)) {
      const int32_t id = static_cast<int32_t>(request_.token(child));
      const double p = target_probability(judge, id), q = draft_probability(judge, id);
      if (q > 0.0 && rho * throw_coin(child) * q < p) return child;
    }
    if (count > 0) weight = {Weight::kseq, static_cast<float>(1.0 / rho), static_cast<float>(share)};
    return -1;
  }

  // Any rho that meets the condition is exact; the smallest accepts most. Three sweeps narrow it to (K - 1) / 448.
  PASS_EXT_HOST_DEVICE void choose_rho(Judge& judge, int32_t count, double& rho, double& share) {
    double low = 1.0, high = count;
    bool done = false;
    for (int sweep = 0; sweep < 3 && !done; ++sweep) {
      float inverse[kOverlaps];
      double tried[kOverlaps], overlap[kOverlaps];
      for (int i = 0; i < kOverlaps; ++i) {  // the first sweep tries its lower end too
        tried[i] = low + (high - low) * (sweep == 0 ? i / 7.0 : (i + 1) / 8.0);
        inverse[i] = static_cast<float>(1.0 / tried[i]);
      }
      rows_.overlap_sums(judge, inverse, overlap);
      const double former_high = high;
      double new_low = low;
      bool found = false;
      for (int i = 0; i < kOverlaps && !found; ++i) {
        const double accepted = accepted_by_any(overlap[i], count);
        if (accepted <= tried[i] * overlap[i]) {
          high = rho = tried[i];
          share = overlap[i] > 0.0 ? accepted / overlap[i] : 0.0;
          found = true;
          done = sweep == 0 && i == 0;
        } else {
          new_low = tried[i];
        }
      }
      low = new_low;
      if (!found) {
        high = former_high;
        if (sweep == 0) {  // rho = K always meets the condition; its share is not known yet
          const float last[kOverlaps] = {1.0f / count, 1.0f / count, 1.0f / count, 1.0f / count,
                                         1.0f / count, 1.0f / count, 1.0f / count};
          rows_.overlap_sums(judge, last, overlap);
          rho = count;
          share = overlap[0] > 0.0 ? accepted_by_any(overlap[0], count) / overlap[0] : 0.0;
        }
      }
    }
  }

  // 1 - (1 - beta)^K
  PASS_EXT_HOST_DEVICE static double accepted_by_any(double beta, int32_t count) {
    double all_rejected = 1.0;
    for (int32_t i = 0; i < count; ++i) all_rejected *= 1.0 - beta;
    return 1.0 - all_rejected;
  }

  PASS_EXT_HOST_DEVICE void walk_traversal() {
    reset_cuts();
    int32_t node = 0, depth = 0;
    int32_t child = first_child(0, 0);  // the next node to visit
    Judge judge;
    if (!open(0, child >= 0, judge)) child = -1;
    if (judge.p.status != 0) return stop_before(0);
    bool opened = true;  // a leaf's row matters only if its coin accepts it
    for (;;) {
      if (child >= 0) {  // down: the child inherits its weight
        const Odds odds = odds_of(judge, child);
        const double weight = judge.weight * (odds.q > 0.0 ? odds.p / odds.q : odds.p);
        rows_.save(node, judge);
        node = child;
        ++depth;
        child = weight > 0.0 ? first_child(node, depth) : -1;
        opened = child >= 0;
        if (!opened)
          judge = {};
        else if (!open(node, true, judge) || judge.p.status != 0)
          child = -1;
        judge.weight = weight < 1.0 ? weight : 1.0;
        continue;
      }
      if (node == 0 || throw_coin(node) < judge.weight) {
        if (!opened) open(node, false, judge);
        if (judge.p.status != 0) return stop_before(node);
        return stop_at(node, draw(judge, judge.changed, depth));
      }
      const int32_t deleted = node;  // up: delete it at its parent
      node = request_.parent(node);
      --depth;
      judge = rows_.saved(node);
      opened = true;
      child = next_child(node, deleted + 1);
      const bool last = node == 0 && child < 0;
      reject(judge, deleted, odds_of(judge, deleted), false, !last);
    }
  }

  PASS_EXT_HOST_DEVICE int32_t first_child(int32_t node, int32_t depth) {
    return depth < request_.problem.max_depth ? next_child(node, node + 1) : -1;
  }

  // A node's cut is kNotCut if no path goes on at it; else its w under rule joint, its depth under rule typical. Nodes
  // come after their parents.
  PASS_EXT_HOST_DEVICE void walk_longest() {
    const bool is_joint = request_.problem.rule == Rule::joint;
    reset_cuts();
    int32_t best = 0, best_depth = 0;
    for (int32_t node = 0; node >= 0; node = next_uncut(node)) {
      const int32_t depth = node == 0 ? 0 : is_joint ? depth_of(node) : static_cast<int32_t>(rows_.cut(node));
      const bool is_accepted = node == 0 || !is_joint || rows_.cut(node) > request_.problem.threshold;
      if (is_accepted && depth > best_depth) {
        best = node;
        best_depth = depth;
      }
      const int32_t first = first_child(node, depth);
      if (first < 0) continue;
      const int32_t status = status_;
      Judge judge;
      const bool judged = open(node, is_joint, judge);
      if (judge.p.status != 0) status_ = status;  // its children are ignored; it matters where the path ends at it
      if (judge.p.status != 0 || !judged) continue;
      if (is_joint)
        weigh_jointly(judge, first, node == 0 ? 1.0f : rows_.cut(node));
      else
        accept_typical(judge, first, depth + 1);
    }
    Judge judge{};
    judge.node = best;
    judge.p_row = request_.target_row(best);
    judge.p = describe_target(best, false);
    if (judge.p.status != 0) return stop_before(best);
    stop_at(best, draw(judge, {Weight::plain, 0, 0}, false, best_depth));
  }

  PASS_EXT_HOST_DEVICE void accept_typical(Judge& judge, int32_t child, int32_t depth) {
    const float entropy = static_cast<float>(rows_.entropy(judge));
    const float bound =
        minimum(request_.problem.threshold, request_.problem.alpha * exponential(minimum(-entropy, 0.0f)));
    for (; child >= 0; child = next_child(judge.node, child + 1)) {
      const float p = target_probability(judge, static_cast<int32_t>(request_.token(child)));
      if (p > bound && p > 0.0f) rows_.set_cut(child, static_cast<float>(depth));
    }
  }

  PASS_EXT_HOST_DEVICE void weigh_jointly(const Judge& judge, int32_t child, float weight) {
    for (; child >= 0; child = next_child(judge.node, child + 1)) {
      const int32_t id = static_cast<int32_t>(request_.token(child));
      const float p = target_probability(judge, id), q = draft_probability(judge, id);
      const float w = weight * (q > 0.0f ? p / q : p);
      if (w > 0.0f) rows_.set_cut(child, minimum(w, 0x1p96f));  // an infinite w times p = 0 would be NaN
    }
  }

  PASS_EXT_HOST_DEVICE int32_t depth_of(int32_t node) const {
    int32_t depth = 0;
    for (; node > 0; node = request_.parent(node)) ++depth;
    return depth;
  }

  PASS_EXT_HOST_DEVICE int32_t next_uncut(int32_t node) {
    return rows_.first_node(node + 1, request_.nodes, [&](int32_t i) { return rows_.cut(i) != kNotCut; });
  }

  PASS_EXT_HOST_DEVICE void reset_cuts() { rows_.reset_cuts(request_.nodes); }

  // Writes the path to node `stop` (-1: none at all), `token` behind it, and -1 in the rest.
  PASS_EXT_HOST_DEVICE void write(int32_t stop, int64_t token, int32_t status) {
    if (!rows_.is_leader()) return;
    const int64_t width = request_.problem.max_depth + 1;
    int64_t* emitted = request_.problem.emitted + request_.index * width;
    int32_t* path = request_.problem.path + request_.index * width;
    const int32_t depth = depth_of(stop);
    for (int64_t i = depth + (stop < 0 ? 0 : 1); i < width; ++i) emitted[i] = path[i] = -1;
    if (stop >= 0) emitted[depth] = token;
    int32_t node = stop;
    for (int32_t i = depth; i >= 0 && stop >= 0; --i) {
      path[i] = node;
      if (i > 0) emitted[i - 1] = request_.token(node);
      node = node > 0 ? request_.parent(node) : 0;
    }
    request_.problem.num_accepted[request_.index] = depth;
    request_.problem.status[request_.index] = status;
  }

  Rows& rows_;
  AcceptRequest request_;
  SamplingParameters p_parameters_, q_parameters_;
  uint64_t seed_;
  int64_t position_;
  int32_t stop_ = -1, status_ = 0;
  int64_t token_ = -1;
};

}  // namespace pass_ext
