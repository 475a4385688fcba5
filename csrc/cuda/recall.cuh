// Recall on the GPU: a block for each row. The formula: core/recall.h.
//
// Malformed input raises nothing, because an error message would need a synchronisation: a request that does not exist
// recalls nothing, and lengths are cut to the columns of the text.
#pragma once

#include <cstdint>

#include "core/recall.h"
#include "cuda/primitives.cuh"
#include "cuda/recall_counts.cuh"

namespace pass_ext::gpu {

constexpr int kRecallThreads = 128;

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kRecallThreads) recall_kernel(PASS_EXT_PARAMETER RecallProblem problem) {
  begin_kernel(problem);
  const RecallCounts counts = carve_recall(dynamic_shared<int32_t>());
  const int64_t row = block_index().x, request = problem.requests[row];
  const int64_t* const tokens = problem.tokens + row * problem.count;
  const int32_t thread = static_cast<int32_t>(thread_rank());
  clear_recall(counts, problem.count, thread, kRecallThreads);
  sync_block();
  if (request >= 0 && request < problem.request_count) {
    const RecallText text = recall_text(problem.text + request * problem.room, problem.lengths[request], problem.room);
    count_recall(counts, text, recall_context(problem, row), tokens, problem.count, thread, kRecallThreads);
  }
  sync_block();
  for (int32_t k = thread; k < problem.count; k += kRecallThreads)
    problem.scores[row * problem.count + k] = recall_of(counts.places, counts.followed + k, problem.count);
}

inline void launch_recall_scores(const RecallProblem& problem, Stream stream) {
  if (problem.count == 0) return;
  const size_t bytes = sizeof(int32_t) * static_cast<size_t>(recall_numbers(problem.count));
  launch("recall_scores", recall_kernel, LaunchShape{{problem.rows}, {kRecallThreads}, bytes}, stream, problem);
}

}  // namespace pass_ext::gpu
