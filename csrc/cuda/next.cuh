// The rows of the next step on the GPU, in one launch: a block for each request. The formulas: core/next.h.
//
// The tree is filled level by level, because a node's token depends on its parent's. A warp works on one parent: it
// scores the offered tokens, a token at a time with a lane for every 32nd number of a product, and takes the best of
// them for the children.
//
// Malformed input raises nothing, because an error message would need a synchronisation: rows with malformed parents
// hang below the root, and an accepted node or a group that does not exist offers nothing.
#pragma once

#include <cstdint>

#include "core/next.h"
#include "cuda/block.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kNextThreads = 128;
constexpr int kNextWarps = kNextThreads / 32;

// Shared memory of a block.
struct NextShared {
  int32_t* depths;  // [row_count]
  int32_t* tokens;  // [nodes], -1: none
  float* scores;    // [kNextWarps, count], with transition scores
};

PASS_EXT_DEVICE NextShared carve_next(void* shared, const NextProblem& problem) {
  int32_t* const depths = static_cast<int32_t*>(shared);
  int32_t* const tokens = depths + problem.row_count;
  return {depths, tokens, reinterpret_cast<float*>(tokens + problem.nodes)};
}

inline size_t next_bytes(const NextProblem& problem) {
  const int64_t scores = problem.scores == nullptr ? 0 : int64_t{kNextWarps} * problem.count;
  return static_cast<size_t>(problem.row_count + problem.nodes + scores) * 4;
}

PASS_EXT_DEVICE uint64_t sum_words_of_warp(uint64_t value) {
  for (int step = 16; step > 0; step /= 2) value += shuffle_xor(value, step);
  return value;
}

// The offered tokens of one row with their scores, worked on by a warp: the `List` of core/next.h. A lane owns every
// 32nd of them.
struct WarpOffers {
  const int64_t* tokens;
  float* scores;
  int32_t count;

  PASS_EXT_DEVICE Offer at(int32_t k) const { return {scores[k], static_cast<int32_t>(tokens[k])}; }

  PASS_EXT_DEVICE Offer best(const Offer& last) const {
    Best best{-kInfinity, -1};
    for (int32_t k = static_cast<int32_t>(lane_index()); k < count; k += 32) {
      const Offer offer = at(k);
      if (offer.score > -kInfinity && ranks_before(last, offer) &&
          (best.id < 0 || ranks_before(offer, {best.score, best.id})))
        best = {offer.score, offer.id};
    }
    best = best_of_warp(best);
    return {best.score, best.id};
  }

  template <typename Term>
  PASS_EXT_DEVICE uint64_t sum(const Term& term) const {
    uint64_t sum = 0;
    for (int32_t k = static_cast<int32_t>(lane_index()); k < count; k += 32)
      if (scores[k] > -kInfinity) sum += term(at(k));
    return sum_words_of_warp(sum);
  }

  template <typename Score>
  PASS_EXT_DEVICE void replace(const Score& score) {
    for (int32_t k = static_cast<int32_t>(lane_index()); k < count; k += 32) scores[k] = score(at(k));
  }
};

// In the order of core/next.h: a lane is a partial sum.
PASS_EXT_DEVICE float product_of_warp(const float* left, const float* right, int32_t rank) {
  float sum = 0.0f;
  for (int32_t i = static_cast<int32_t>(lane_index()); i < rank; i += kPartialProducts)
    sum = fused(left[i], right[i], sum);
  for (int step = kPartialProducts / 2; step > 0; step /= 2) sum += shuffle_xor(sum, step);
  return sum;
}

PASS_EXT_DEVICE void score_offered(const NextProblem& problem, const WarpOffers& offers, const float* given,
                                   int64_t before) {
  const float* const left = problem.left + before * problem.left_stride;
  for (int32_t k = 0; k < offers.count; ++k) {
    const int64_t token = offers.tokens[k];
    float score = -kInfinity;
    if (has_transition(problem, token))
      score = given[k] + product_of_warp(left, problem.right + token * problem.right_stride, problem.rank);
    if (static_cast<int32_t>(lane_index()) == k % 32) offers.scores[k] = score;  // the lane that owns it
  }
}

// A warp: the tokens of a parent's children.
PASS_EXT_DEVICE void fill_children(const NextProblem& problem, const NextShared& shared, int64_t request,
                                   const NextRoot& root, int32_t parent, const int64_t* offered) {
  WarpOffers offers{offered, shared.scores + warp_index() * problem.count, problem.count};
  score_offered(problem, offers, problem.scores + (offered - problem.offered), shared.tokens[parent]);
  race(offers, problem, request, root.length + shared.depths[parent]);
  Offer last = before_all();
  for (int32_t child = parent + 1; child < problem.nodes; ++child) {
    if (parent_of_row(problem, child) != parent) continue;
    last = offers.best(last);
    if (last.id < 0) return;
    if (lane_index() == 0) shared.tokens[child] = last.id;
  }
}

// All threads of the block: the tokens of the level below `depth`.
PASS_EXT_DEVICE void fill_level(const NextProblem& problem, const NextShared& shared, int64_t request,
                                const NextRoot& root, int32_t depth) {
  const int64_t* const offered = offered_at(problem, request, root, depth);
  if (offered == nullptr) return;
  if (problem.scores == nullptr) {
    for (int32_t node = 1 + thread_rank(); node < problem.nodes; node += kNextThreads) {
      if (shared.depths[node] != depth + 1 || shared.tokens[parent_of_row(problem, node)] < 0) continue;
      const int32_t number = number_of_child(problem, node);
      if (number < problem.count && offered[number] >= 0) shared.tokens[node] = static_cast<int32_t>(offered[number]);
    }
    return;
  }
  for (int32_t parent = warp_index(); parent < problem.nodes; parent += kNextWarps)
    if (shared.depths[parent] == depth && has_transition(problem, shared.tokens[parent]))
      fill_children(problem, shared, request, root, parent, offered);
}

PASS_EXT_DEVICE void report_step(const NextProblem& problem, int64_t request, const NextRoot& root, int32_t drafted) {
  int64_t* const report = problem.report + request * (kReportNumbers + problem.report_width);
  if (thread_rank() == 0) {
    report[0] = root.at_limit ? -1 : problem.num_accepted[request];
    report[1] = problem.status[request];
    report[2] = drafted;
  }
  for (int32_t i = thread_rank(); i < problem.report_width; i += kNextThreads)
    report[kReportNumbers + i] = i < problem.width ? problem.emitted[request * problem.width + i] : -1;
}

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kNextThreads) next_kernel(PASS_EXT_PARAMETER NextProblem problem) {
  const int64_t request = block_index().x;
  const NextShared shared = carve_next(dynamic_shared<unsigned char>(), problem);
  const NextRoot root = next_root(problem, request);
  int32_t drafted = 0, deepest = 0;
  for (int32_t first = 0; first < problem.row_count; first += kNextThreads) {
    const int32_t row = first + static_cast<int32_t>(thread_rank());
    drafted += sync_block_count(row > 0 && row < problem.row_count && *token_of(problem, request, row) >= 0);
    if (row >= problem.row_count) continue;
    shared.depths[row] = depth_of_row(problem, row);
    if (row < problem.nodes) shared.tokens[row] = row == 0 ? static_cast<int32_t>(root.token) : -1;
  }
  sync_block();  // all threads have read the former state; depths are there
  report_step(problem, request, root, drafted);
  for (int32_t node = 0; node < problem.nodes; ++node)
    deepest = shared.depths[node] > deepest ? shared.depths[node] : deepest;
  for (int32_t depth = 0; depth < deepest; ++depth) {
    fill_level(problem, shared, request, root, depth);
    sync_block();
  }
  if (thread_rank() == 0) {
    problem.lengths[request] = root.length;
    problem.prefix_lens[request] = static_cast<int32_t>(root.length - 1);
    *id_of(problem, request, 0) = *token_of(problem, request, 0) = root.token;
  }
  for (int32_t row = thread_rank(); row < problem.row_count; row += kNextThreads) {
    *position_of(problem, request, row) = root.length - 1 + shared.depths[row];
    if (row == 0 || row >= problem.nodes) continue;
    *token_of(problem, request, row) = shared.tokens[row];
    *id_of(problem, request, row) = shared.tokens[row] < 0 ? 0 : shared.tokens[row];
  }
}

inline void launch_next_rows(const NextProblem& problem, Stream stream) {
  launch("next_rows_", next_kernel, LaunchShape{{problem.requests}, {kNextThreads}, next_bytes(problem)}, stream,
         problem);
}

}  // namespace pass_ext::gpu
