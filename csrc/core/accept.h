// An accept step: its logits, trees and results, one request's part of them, and what is known at a node while its
// children are judged. The rules: core/accept_walk.h.
#pragma once

#include <cstdint>

#include "core/distribution.h"
#include "core/noise.h"
#include "core/platform.h"
#include "core/tree.h"

namespace pass_ext {

// The order of ACCEPT_RULES in pass_ext/ops/common/rules.py. Those up to traversal are verified from shards too.
enum class Rule : int32_t {
  coupled,
  rejection,
  rejection_with_replacement,
  block,
  traversal,
  kseq,
  typical,
  coupled_inverse,
  adaptive_rejection,
  joint
};
constexpr int64_t kRules = 10;

constexpr int kOverlaps = 7;  // values of rho tried in one sweep over a row

struct AcceptProblem {
  LogitRows target, draft;
  bool is_chain, has_draft;
  // Trees: parents and tokens [nodes], cu_nodes [requests + 1]; without parents they are chains. A chain: tokens
  // [requests, chain_nodes - 1], and row i of request b lies b request strides behind row i of the first.
  const int64_t* tokens;
  const int32_t* parents;
  const int32_t* cu_nodes;
  const int32_t* draft_rows;                            // [nodes] or null: a node's own index
  int64_t target_request_stride, draft_request_stride;  // for chains, in elements
  int32_t chain_nodes;
  int32_t draft_row_count;
  SamplingParameterArrays target_sampling, draft_sampling;
  const int64_t* seeds;      // [requests] or null: 0
  const int64_t* positions;  // [requests] or null: 0
  int64_t requests, nodes;
  int32_t max_depth;
  Rule rule;
  float threshold, alpha;
  int64_t* emitted;  // [requests, max_depth + 1]
  int32_t* path;     // [requests, max_depth + 1]
  int32_t* num_accepted;
  int32_t* status;
  Distribution* described;  // [nodes] or null: the walk writes what it finds out about a target row
};

// The way of a rule through a tree. A kernel compiled for `any` reads the rule at run time.
enum class Route { coupled, inverse, down, kseq, traversal, longest, any };

PASS_EXT_HOST_DEVICE constexpr Route route_of(Rule rule) {
  switch (rule) {
    case Rule::coupled: return Route::coupled;
    case Rule::coupled_inverse: return Route::inverse;
    case Rule::block:
    case Rule::traversal: return Route::traversal;
    case Rule::typical:
    case Rule::joint: return Route::longest;
    case Rule::kseq: return Route::kseq;
    default: return Route::down;
  }
}

// Each node's children are judged by the distribution they were drawn from, if they were drawn.
PASS_EXT_HOST_DEVICE constexpr bool reads_drafts(Rule rule) {
  return rule != Rule::coupled && rule != Rule::coupled_inverse && rule != Rule::typical;
}
// The mass of a row decides, not the order of its tokens alone.
PASS_EXT_HOST_DEVICE constexpr bool needs_mass(Rule rule) {
  return rule != Rule::coupled && rule != Rule::coupled_inverse;
}

// The noise of the race or of the final draw, `depth` levels below a request's root. Computed unsigned, so that a
// position past the end of int64 wraps to its beginning.
PASS_EXT_HOST_DEVICE Noise noise_at(const AcceptProblem& problem, int64_t request, Purpose purpose, int32_t depth) {
  const NoiseKey key = noise_key(problem.seeds, problem.positions, request);
  return {key.seed, static_cast<int64_t>(key.position + static_cast<uint64_t>(depth)), purpose, 0, 0};
}

// True if a request's range in cu_nodes is invalid: then cu_nodes does not divide the rows.
PASS_EXT_HOST_DEVICE bool breaks_bounds(const AcceptProblem& problem, int64_t request) {
  const int32_t begin = problem.cu_nodes[request], end = problem.cu_nodes[request + 1];
  return begin < 0 || end < begin || end > problem.nodes;
}

// One request's part of a problem.
struct AcceptRequest {
  const AcceptProblem& problem;
  int64_t index, first;
  int32_t nodes;

  PASS_EXT_HOST_DEVICE int32_t parent(int32_t node) const {
    return problem.parents == nullptr ? node - 1 : problem.parents[first + node];
  }
  PASS_EXT_HOST_DEVICE int64_t token(int32_t node) const {  // the root has none
    return problem.is_chain ? problem.tokens[index * (problem.chain_nodes - 1) + node - 1]
                            : problem.tokens[first + node];
  }
  PASS_EXT_HOST_DEVICE LogitRow target_row(int32_t node) const {
    const int64_t row = first + node, stride = problem.target.stride;
    const int64_t offset = problem.is_chain ? index * problem.target_request_stride + node * stride : row * stride;
    return row_at(problem.target, offset, row, row);
  }
  // The row that the node's children were drawn from, or -1.
  PASS_EXT_HOST_DEVICE int32_t draft_index(int32_t node) const {
    if (!problem.has_draft) return -1;
    if (problem.is_chain) return node;
    return problem.draft_rows == nullptr ? static_cast<int32_t>(first) + node : problem.draft_rows[first + node];
  }
  PASS_EXT_HOST_DEVICE LogitRow draft_row(int32_t node, int32_t draft_index) const {
    const int64_t stride = problem.draft.stride, slot = problem.nodes + first + node;
    if (!problem.is_chain) return row_at(problem.draft, draft_index * stride, draft_index, slot);
    return row_at(problem.draft, index * problem.draft_request_stride + draft_index * stride,
                  index * (problem.chain_nodes - 1) + draft_index, slot);
  }
};

// p and q at a node while its children are judged. p is (p_0 - beta q_0)+ / total, q is q_0 / remaining.
struct Judge {
  int32_t node;
  bool has_q;
  bool changed;  // a child was rejected
  LogitRow p_row, q_row;
  Distribution p, q;
  double weight;     // w of the node; 1 where the rule goes from the root down
  double total;      // sum of (p_0 - beta q_0)+
  double remaining;  // sum of q_0 over tokens not deleted
  double beta;
};

// Sums over a row: (p_0 - beta q_0)+, and q_0 without the deleted tokens.
struct ResidualSums {
  double weight, remaining;
};

// The weights of a final draw: p, or the rest of p after drafts from q were rejected.
struct Weight {
  enum Kind : int32_t { plain, residual, kseq } kind;
  float first, second;  // residual: beta; kseq: 1 / rho, share
};

#include "core/weights-inl.h"

constexpr float kNotCut = -1.0f;

// The request at `index`; the walk checks that its range is valid.
PASS_EXT_HOST_DEVICE AcceptRequest request_of(const AcceptProblem& problem, int64_t index) {
  if (problem.is_chain) return {problem, index, index * problem.chain_nodes, problem.chain_nodes};
  const int64_t first = problem.cu_nodes[index], nodes = problem.cu_nodes[index + 1] - first;
  return {problem, index, first, nodes > INT32_MAX ? INT32_MAX : static_cast<int32_t>(nodes)};
}

}  // namespace pass_ext
