// The accept step on the GPU. The rules: core/accept.h. Where rows are few, one kernel scans all of them and describes
// each as a distribution, and a second one walks the trees; else a block scans the rows that its request comes to.
#pragma once

#include <cstdint>

#include "core/accept.h"
#include "cuda/accept_rows.cuh"
#include "cuda/primitives.cuh"
#include "cuda/rows.cuh"

namespace pass_ext::gpu {

// Rows by slot: node i's target row, then the rows that the children of node i were drawn from.
struct AcceptSource {
  AcceptProblem problem;

  PASS_EXT_DEVICE bool find(int64_t slot, LogitRow& row) const {
    // The way to the request is longer than the way to the row: the row's loads go first.
    if (slot < problem.nodes && !problem.is_chain) {
      row = row_at(problem.target, slot * problem.target.stride, slot, slot);
      return true;
    }
    const AcceptRequest request = request_of_row(slot);
    const int32_t node = node_of_row(slot, request);
    if (slot < problem.nodes) {
      row = request.target_row(node);
      return true;
    }
    if (!holds(request, node) || !is_judged(request, node)) return false;
    const int32_t draft_index = request.draft_index(node);
    if (draft_index < 0 || draft_index >= problem.draft_row_count) return false;
    row = request.draft_row(node, draft_index);
    return true;
  }

  PASS_EXT_DEVICE ScanWish wish(int64_t slot) const {
    const SamplingParameters parameters = parameters_of_row(slot);
    ScanWish wish{parameters.scale, is_sum_needed(parameters, needs_mass(slot)), false, {}};
    if (slot >= problem.nodes || problem.rule != Rule::coupled) return wish;
    const AcceptRequest request = request_of_row(slot);
    const int32_t node = node_of_row(slot, request);
    wish.races = holds(request, node) && !is_greedy_request(request.index);
    if (wish.races) wish.noise = noise_at(problem, request.index, Purpose::coupled, depth_of(request, node));
    return wish;
  }

  PASS_EXT_DEVICE void finish(BlockRows<Scan::beforehand>& rows, const LogitRow& row,
                              const RowsWorkspace& workspace) const {
    const Distribution distribution = rows.describe(row, parameters_of_row(row.slot), needs_mass(row.slot));
    if (rows.is_leader()) workspace.distributions[row.slot] = distribution;
    if (distribution.status != 0) return;
    const ScanWish wished = wish(row.slot);  // again: to keep it would take registers that the scan needs
    if (!wished.races) return;
    const int32_t winner = rows.winner(row, distribution, wished.noise);
    if (rows.is_leader()) workspace.winners[row.slot] = winner;
  }

 private:
  // The last request that begins at or before a row's node; cu_nodes that are not in order find some request.
  PASS_EXT_DEVICE AcceptRequest request_of_row(int64_t slot) const {
    const int64_t packed = slot < problem.nodes ? slot : slot - problem.nodes;
    if (problem.is_chain)
      return request_of(problem, static_cast<uint32_t>(packed) / static_cast<uint32_t>(problem.chain_nodes));
    int64_t low = 0, high = problem.requests;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (problem.cu_nodes[middle] <= packed ? low : high) = middle;
    }
    return request_of(problem, low);
  }

  PASS_EXT_DEVICE int32_t node_of_row(int64_t slot, const AcceptRequest& request) const {
    return static_cast<int32_t>((slot < problem.nodes ? slot : slot - problem.nodes) - request.first);
  }

  // Whether there is such a node. Bounds that divide nothing may point anywhere, and rows may belong to nobody.
  PASS_EXT_DEVICE bool holds(const AcceptRequest& request, int32_t node) const {
    return node >= 0 && node < request.nodes && (problem.is_chain || !breaks_bounds(problem, request.index));
  }

  PASS_EXT_DEVICE bool is_greedy_request(int64_t request) const {
    return problem.target_sampling.temperature == nullptr || is_greedy(problem.target_sampling.temperature[request]);
  }

  PASS_EXT_DEVICE SamplingParameters parameters_of_row(int64_t slot) const {
    const bool is_draft = slot >= problem.nodes;
    const int64_t request = request_of_row(slot).index;
    return parameters_of(is_draft ? problem.draft_sampling : problem.target_sampling, request,
                         problem.target.vocabulary, 0.0f);
  }

  PASS_EXT_DEVICE bool needs_mass(int64_t slot) const { return slot >= problem.nodes || problem.rule != Rule::coupled; }

  // Whether a node's children are held against the distribution they were drawn from.
  PASS_EXT_DEVICE bool is_judged(const AcceptRequest& request, int32_t node) const {
    if (is_greedy_request(request.index)) return false;
    if (problem.is_chain) return node + 1 < request.nodes;
    bool found = false;
    const int32_t lane = static_cast<int32_t>(lane_index());
    for (int32_t base = node + 1; base < request.nodes && !found; base += 32)
      found = any(base + lane < request.nodes && request.parent(base + lane) == node);
    return found;
  }

  PASS_EXT_DEVICE int32_t depth_of(const AcceptRequest& request, int32_t node) const {
    int32_t depth = 0;
    while (node > 0 && depth < problem.max_depth) {
      const int32_t parent = request.parent(node);
      if (parent < 0 || parent >= node) break;  // no tree: the walk will not come here
      node = parent;
      ++depth;
    }
    return depth;
  }
};

template <Route route, Scan scan>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(256, kBlocksPerMultiprocessor)
    accept_kernel(PASS_EXT_PARAMETER AcceptProblem problem, PASS_EXT_PARAMETER RowsWorkspace workspace,
                  bool are_bounds_checked) {
  bool divided = true;
  if (are_bounds_checked) {
    divided = *workspace.divided != 0;
  } else if (!problem.is_chain) {
    bool broken = false;
    for (int64_t i = thread_rank(); i < problem.requests; i += block_size().x)
      broken = broken || breaks_bounds(problem, i);
    divided = sync_block_count(broken) == 0;
  }
  for (int64_t index = block_index().x; index < problem.requests; index += grid_size().x) {
    const AcceptRequest request = request_of(problem, index);
    JobRows<route, scan> jobs(workspace);
    WalkRows<route, scan> rows(workspace, jobs, request);
    if (warp_index() == 0) {
      AcceptWalk<WalkRows<route, scan>>(rows, request).template run<route>(divided);
      rows.dismiss();
    } else {
      rows.serve();
    }
    sync_block();
  }
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
  const bool uses_draft = problem.has_draft && problem.rule != Rule::coupled && problem.rule != Rule::typical;
  const int64_t rows_of_node = uses_draft ? 2 : 1;
  const int64_t levels = 1 + (problem.max_depth < 3 ? problem.max_depth : 3);  // that a walk comes to: a guess
  return plan_rows(problem.nodes * rows_of_node, problem.requests, levels * rows_of_node, problem.nodes,
                   problem.target.vocabulary, problem.rule == Rule::coupled, multiprocessors);
}

template <Route route>
void launch_walk(const AcceptProblem& problem, const RowsWorkspace& workspace, int64_t blocks, bool are_bounds_checked,
                 Stream stream) {
  const auto walk = [&](auto kernel, unsigned threads) {
    launch("accept", kernel, LaunchShape{{blocks}, {threads}, sizeof(AcceptShared)}, stream, problem, workspace,
           are_bounds_checked);
  };
  const int32_t vocabulary = problem.target.vocabulary;
  if (workspace.rows > 0)
    walk(accept_kernel<route, Scan::beforehand>, walk_threads<route, Scan::beforehand>(vocabulary));
  else
    walk(accept_kernel<route, Scan::on_the_way>, walk_threads<route, Scan::on_the_way>(vocabulary));
}

inline void launch_accept(const AcceptProblem& problem, const RowsPlan& plan, const RowsWorkspace& workspace,
                          Stream stream) {
  if (problem.requests == 0) return;
  const bool is_checked = !problem.is_chain && problem.requests > kRequestsThatLookThemselves;
  if (is_checked)
    launch("accept (bounds)", check_bounds_kernel, LaunchShape{{1}, {512}}, stream, problem, workspace.divided);
  if (workspace.rows > 0) launch_scan_rows("accept (scan)", AcceptSource{problem}, workspace, stream);
  const Route route = route_of(problem.rule);
  const auto walk = route == Route::coupled     ? launch_walk<Route::coupled>
                    : route == Route::traversal ? launch_walk<Route::traversal>
                    : route == Route::typical   ? launch_walk<Route::typical>
                    : route == Route::kseq      ? launch_walk<Route::kseq>
                                                : launch_walk<Route::down>;
  walk(problem, workspace, plan.blocks, is_checked, stream);
}

}  // namespace pass_ext::gpu
