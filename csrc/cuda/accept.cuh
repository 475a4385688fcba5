// The accept step on the GPU: one block per request walks its tree. The rules: core/accept.h; how a row is read:
// cuda/rows.cuh. Called by cuda/accept.cu, and by the emulator in the tests.
#pragma once

#include <cstdint>

#include "core/accept.h"
#include "cuda/primitives.cuh"
#include "cuda/rows.cuh"

namespace pass_ext::gpu {

// Rows by slot: node i's target row, then the rows that the children of node i were drawn from.
struct AcceptSource {
  AcceptProblem problem;

  PASS_EXT_DEVICE bool find(int64_t slot, LogitRow& row, float& scale) const {
    const bool is_draft = slot >= problem.nodes;
    const int64_t packed = is_draft ? slot - problem.nodes : slot;
    const AcceptRequest request = request_of(problem, owner_of(packed));
    const int32_t node = static_cast<int32_t>(packed - request.first);
    if (node < 0 || node >= request.nodes) return false;
    if (!is_draft) {
      row = request.target_row(node);
      scale = parameters_of(problem.target_law, request.index, row.vocabulary, 0.0f).scale;
      return true;
    }
    const int32_t draft_index = request.draft_index(node);
    if (draft_index < 0 || draft_index >= problem.draft_row_count) return false;
    row = request.draft_row(node, draft_index);
    scale = parameters_of(problem.draft_law, request.index, row.vocabulary, 0.0f).scale;
    return true;
  }

 private:
  // The last request that begins at or before a packed node; cu_nodes that are not in order find some request.
  PASS_EXT_DEVICE int64_t owner_of(int64_t packed) const {
    if (problem.is_chain) return packed / problem.chain_nodes;
    int64_t low = 0, high = problem.requests;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (problem.cu_nodes[middle] <= packed ? low : high) = middle;
    }
    return low;
  }
};

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(512)
    accept_kernel(PASS_EXT_PARAMETER AcceptProblem problem, PASS_EXT_PARAMETER RowsWorkspace workspace) {
  BlockRows rows(workspace, *dynamic_shared<BlockShared>());
  const AcceptRequest request = request_of(problem, block_index().x);
  rows.begin(request.first);
  AcceptWalk<BlockRows>(rows, request).run();
}

constexpr int64_t kRequestsThatLookThemselves = 1024;  // at whether cu_nodes divides the rows; for more, one block does

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(512) check_bounds_kernel(AcceptProblem problem, int32_t* divided) {
  bool broken = false;
  for (int64_t i = thread_rank(); i < problem.requests; i += block_size().x)
    broken = broken || breaks_bounds(problem, i);
  const int count = sync_block_count(broken);
  if (thread_rank() == 0) *divided = count == 0;
}

inline RowsPlan plan_accept(const AcceptProblem& problem, int multiprocessors) {
  const int64_t rows =
      problem.nodes * (!problem.has_draft || problem.rule == Rule::coupled || problem.rule == Rule::typical ? 1 : 2);
  return plan_rows(rows, problem.requests, problem.nodes, problem.target.vocabulary, multiprocessors);
}

inline void launch_accept(const AcceptProblem& given, const RowsWorkspace& workspace, Stream stream) {
  AcceptProblem problem = given;
  if (problem.requests == 0) return;
  if (!problem.is_chain && problem.requests > kRequestsThatLookThemselves) {
    launch("accept (bounds)", check_bounds_kernel, LaunchShape{{1}, {512}}, stream, problem, workspace.divided);
    problem.divided = workspace.divided;
  }
  if (workspace.rows > 0)
    launch_scan_rows("accept (scan)", AcceptSource{problem}, workspace,
                     problem.rule != Rule::coupled || problem.target_law.top_p != nullptr, stream);
  launch("accept", accept_kernel,
         LaunchShape{
             {static_cast<unsigned>(problem.requests)}, {threads_for(problem.target.vocabulary)}, sizeof(BlockShared)},
         stream, problem, workspace);
}

}  // namespace pass_ext::gpu
