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
#include "cuda/next_offers.cuh"
#include "cuda/next_tree.cuh"
#include "cuda/primitives.cuh"
#include "cuda/recall_counts.cuh"

namespace pass_ext::gpu {

constexpr int kNextThreads = 128;
constexpr int kNextWarps = kNextThreads / 32;

// Shared memory of a block.
struct NextShared {
  int32_t* depths;  // [row_count]
  int32_t* tokens;  // [nodes], -1: none
  float* scores;    // [kNextWarps, count], if candidates have scores
  int32_t* recall;  // [kNextWarps, recall_numbers], if there is a text too
};

PASS_EXT_DEVICE NextShared carve_next(void* shared, const NextProblem& problem) {
  int32_t* const depths = static_cast<int32_t*>(shared);
  int32_t* const tokens = depths + problem.row_count;
  float* const scores = reinterpret_cast<float*>(tokens + problem.nodes);
  return {depths, tokens, scores, reinterpret_cast<int32_t*>(scores + kNextWarps * problem.count)};
}

inline size_t next_bytes(const NextProblem& problem) {
  const int64_t of_scores = problem.count + (problem.text == nullptr ? 0 : recall_numbers(problem.count));
  const int64_t scores = problem.scores == nullptr ? 0 : kNextWarps * of_scores;
  return static_cast<size_t>(problem.row_count + problem.nodes + scores) * 4;
}

// A warp: raises the scores below a parent by what the text recalls.
PASS_EXT_DEVICE void recall_below(const NextProblem& problem, const NextShared& shared, int64_t request,
                                  const NextRoot& root, int32_t parent, const WarpOffers& offers) {
  const int32_t lane = static_cast<int32_t>(lane_index());
  const RecallCounts counts = carve_recall(shared.recall + warp_index() * recall_numbers(problem.count));
  const RecallText text = text_of(problem, request, root);
  const RecallContext path = path_behind(
      text, root, parent, [&](int32_t node) { return int64_t{shared.tokens[node]}; },
      [&](int32_t node) { return parent_of_row(problem, node); });
  clear_recall(counts, offers.count, lane, 32);
  sync_warp();
  count_recall(counts, text, path, offers.tokens, offers.count, lane, 32);
  sync_warp();
#pragma unroll 1
  for (int32_t k = lane; k < offers.count; k += 32)
    offers.scores[k] += recall_of(counts.places, counts.followed + k, offers.count);
  sync_warp();  // the next parent's counts begin
}

// A warp: the tokens of a parent's children.
PASS_EXT_DEVICE void fill_children(const NextProblem& problem, const NextShared& shared, int64_t request,
                                   const NextRoot& root, int32_t parent, const int64_t* offered) {
  WarpOffers offers{offered, shared.scores + warp_index() * problem.count, problem.count};
  const float* const given = problem.scores + (offered - problem.offered);
  if (problem.left == nullptr) {
#pragma unroll 1
    for (int32_t k = static_cast<int32_t>(lane_index()); k < problem.count; k += 32)
      offers.scores[k] = has_transition(problem, offered[k]) ? given[k] : -kInfinity;
  } else {
    const float* const left = problem.left + shared.tokens[parent] * problem.left_stride;
    for (int32_t k = 0; k < problem.count; ++k) score_offered(problem, offers, given, left, k);
  }
  if (problem.text != nullptr) recall_below(problem, shared, request, root, parent, offers);
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

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kNextThreads) next_kernel(PASS_EXT_PARAMETER NextProblem problem) {
  begin_kernel(problem);
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
  if (problem.text != nullptr && root.moves)
    for (int32_t i = thread_rank(); i <= problem.num_accepted[request]; i += kNextThreads)
      write_text(problem, request, root, i);
  sync_block();  // all threads have read the former state; depths and the text are there
  report_step<kReportNumbers, kNextThreads>(problem, request, root, drafted);
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
