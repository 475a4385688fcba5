// Drawing candidates on the GPU. The modes: core/draft.h. If there are few rows, many blocks scan each row and the last
// of them draws from it, all in one launch. Otherwise one block scans a row and draws from it.
#pragma once

#include <cstdint>

#include "core/draft.h"
#include "cuda/primitives.cuh"
#include "cuda/rows.cuh"

namespace pass_ext::gpu {

// The rows of a problem. A row's `slot`, its index in the workspace, is its index in the problem.
struct DraftSource {
  DraftProblem problem;

  PASS_EXT_DEVICE bool find(int64_t slot, LogitRow& row) const {
    row = row_at(problem.logits, slot * problem.logits.stride, slot, slot);
    return true;
  }
  PASS_EXT_DEVICE ScanSettings scan_settings(int64_t slot) const {
    const SamplingParameters parameters = draft_parameters(problem, slot);
    const bool races = is_race(problem.mode, is_greedy_draft(problem, slot));
    return {parameters.scale, is_sum_needed(parameters, true), races, races && !is_shortlisted(parameters),
            draft_noise(problem, slot)};
  }
  // Not inlined: the scan would need registers for it.
  PASS_EXT_DEVICE_CALL void finish(BlockRows<Scan::beforehand>& rows, const LogitRow& row, const RowsWorkspace&) const {
    draft_row(rows, problem, row.slot);
  }
};

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(256, kBlocksPerMultiprocessor)
    draft_kernel(PASS_EXT_PARAMETER DraftProblem problem, PASS_EXT_PARAMETER RowsWorkspace workspace) {
  begin_kernel(problem, workspace);
  BlockRows<Scan::on_the_way> rows(workspace, block_index().x);
  for (int64_t index = block_index().x; index < problem.rows; index += grid_size().x) draft_row(rows, problem, index);
}

inline RowsPlan plan_draft(const DraftProblem& problem, int multiprocessors) {
  return plan_rows(problem.rows, problem.rows, 1, 0, problem.logits.vocabulary, problem.mode != DraftMode::top,
                   multiprocessors);
}

inline void launch_draft(const DraftProblem& problem, const RowsPlan& plan, const RowsWorkspace& workspace,
                         Stream stream) {
  if (problem.rows == 0) return;
  if (workspace.rows > 0) return launch_scan_rows("draft_sample", DraftSource{problem}, workspace, stream);
  launch("draft_sample", draft_kernel,
         LaunchShape{{plan.blocks}, {threads_for(problem.logits.vocabulary)}, sizeof(RowShared)}, stream, problem,
         workspace);
}

}  // namespace pass_ext::gpu
