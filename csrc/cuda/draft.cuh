// Drawing candidates on the GPU: one block per row of logits. What is drawn: core/draft.h; how a row is read:
// cuda/rows.cuh. Called by cuda/draft.cu, and by the emulator in the tests.
#pragma once

#include <cstdint>

#include "core/draft.h"
#include "cuda/primitives.cuh"
#include "cuda/rows.cuh"

namespace pass_ext::gpu {

struct DraftSource {
  DraftProblem problem;

  PASS_EXT_DEVICE bool find(int64_t index, LogitRow& row, float& scale) const {
    row = row_at(problem.logits, index * problem.logits.stride, index, index);
    const float temperature = problem.mode == DraftMode::coupled ? 0.0f : 1.0f;
    scale = parameters_of(problem.law, index, row.vocabulary, temperature).scale;
    return true;
  }
};

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(512)
    draft_kernel(PASS_EXT_PARAMETER DraftProblem problem, PASS_EXT_PARAMETER RowsWorkspace workspace) {
  BlockRows rows(workspace, *dynamic_shared<BlockShared>());
  draft_row(rows, problem, block_index().x);
}

inline RowsPlan plan_draft(const DraftProblem& problem, int multiprocessors) {
  return plan_rows(problem.rows, problem.rows, 0, problem.logits.vocabulary, multiprocessors);
}

inline void launch_draft(const DraftProblem& problem, const RowsWorkspace& workspace, Stream stream) {
  if (problem.rows == 0) return;
  if (workspace.rows > 0) launch_scan_rows("draft_sample (scan)", DraftSource{problem}, workspace, true, stream);
  launch(
      "draft_sample", draft_kernel,
      LaunchShape{{static_cast<unsigned>(problem.rows)}, {threads_for(problem.logits.vocabulary)}, sizeof(BlockShared)},
      stream, problem, workspace);
}

}  // namespace pass_ext::gpu
