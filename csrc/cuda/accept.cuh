// The accept step on the GPU. The rules: core/accept_walk.h. How a call runs, by the number of its rows (plan_accept):
//
//   few     accept_step_kernel, one launch. Up to 32 blocks scan a row: a warp summarises 1,024 logits (row_scan.cuh)
//           and draws noise of the row's race. The last block to come finishes the row: it describes it as a
//           distribution (rows.cuh) and, under rule coupled, runs its race. The block that finishes the last of all
//           rows walks the tree.
//   more    scan_rows_kernel does the same without the walk; accept_kernel walks, a block for each request.
//   many    accept_kernel alone: each block scans the rows that its walk visits.
//
// One warp walks (core/accept_walk.h); what takes a whole row, such as the race behind a rejection, is a job of
// all warps of its block (accept_jobs.cuh). With log-probabilities one more launch follows (logprobs.cuh).
#pragma once

#include <cstdint>

#include "core/accept.h"
#include "core/accept_walk.h"
#include "cuda/accept_rows.cuh"
#include "cuda/primitives.cuh"
#include "cuda/rows.cuh"
#include "cuda/rows_plan.cuh"

namespace pass_ext::gpu {

// The rows of a problem. A row's `slot` is its index in the workspace: i for node i's target row, nodes + i for the
// draft row that node i's children were drawn from.
struct AcceptSource {
  AcceptProblem problem;

  PASS_EXT_DEVICE bool find(int64_t slot, LogitRow& row) const {
    // A tree's target row is known before its request, which takes a search: so the row's loads begin earlier.
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

  PASS_EXT_DEVICE ScanSettings scan_settings(int64_t slot) const {
    const SamplingParameters parameters = parameters_of_row(slot);
    ScanSettings settings{parameters.scale, is_sum_needed(parameters, needs_mass(slot)), false, false, {}};
    if (slot >= problem.nodes || problem.rule == Rule::coupled_inverse) return settings;
    const AcceptRequest request = request_of_row(slot);
    const int32_t node = node_of_row(slot, request);
    settings.races = holds(request, node) && !is_greedy_request(request.index);
    settings.crowns = settings.races && !is_shortlisted(parameters);
    if (settings.races)
      settings.noise = noise_at(problem, request.index, expected_race(request, node), depth_of(request, node));
    return settings;
  }

  PASS_EXT_DEVICE void finish(BlockRows<Scan::beforehand>& rows, const LogitRow& row,
                              const RowsWorkspace& workspace) const {
#pragma unroll 1
    for (int time = 0; time < kFinishes; ++time) {
      if (time > 0) sync_block();
      finish_once(rows, row, workspace, time > 0);
    }
  }

 private:
  PASS_EXT_DEVICE void finish_once(BlockRows<Scan::beforehand>& rows, const LogitRow& row,
                                   const RowsWorkspace& workspace, bool again) const {
    const Distribution distribution = rows.describe(row, parameters_of_row(row.slot), needs_mass(row.slot));
    stamp(workspace, again ? Phase::described_again : Phase::described);
    if (rows.is_leader()) workspace.distributions[row.slot] = distribution;
    if (distribution.status != 0) return;
    if (workspace.supports != nullptr && row.slot < problem.nodes) rows.keep_support(row.slot);
    if (problem.rule != Rule::coupled) return;  // the walk draws, once
    // Computed again: keeping the settings would take registers that the scan needs.
    const ScanSettings settings = scan_settings(row.slot);
    if (!settings.races) return;
    const int32_t winner = rows.winner(row, distribution, settings.noise);
    if (rows.is_leader()) workspace.winners[row.slot] = winner;
    stamp(workspace, again ? Phase::finished_again : Phase::finished);
  }

  // The last request that begins at or before a row's node. If cu_nodes is not ascending, the result is some request.
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

  // True if the request has this node. Invalid bounds may point anywhere, and a row may lie in no request.
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

  PASS_EXT_DEVICE bool needs_mass(int64_t slot) const {
    return slot >= problem.nodes || pass_ext::needs_mass(problem.rule);
  }

  // True if a node's children are judged by the distribution they were drawn from: only then is its draft row read.
  PASS_EXT_DEVICE bool is_judged(const AcceptRequest& request, int32_t node) const {
    return !is_greedy_request(request.index) && has_child(request, node);
  }

  PASS_EXT_DEVICE int32_t depth_of(const AcceptRequest& request, int32_t node) const {
    int32_t depth = 0;
    while (node > 0 && depth < problem.max_depth) {
      const int32_t parent = request.parent(node);
      if (parent < 0 || parent >= node) break;  // no tree: the walk does not reach this node
      node = parent;
      ++depth;
    }
    return depth;
  }
};

// True if cu_nodes divides the rows: each request's range is valid. All threads of a block call it together.
PASS_EXT_DEVICE bool divides_rows(const AcceptProblem& problem) {
  if (problem.is_chain) return true;
  bool broken = false;
#pragma unroll 1
  for (int64_t i = thread_rank(); i < problem.requests; i += block_size().x)
    broken = broken || breaks_bounds(problem, i);
  return sync_block_count(broken) == 0;
}

// A block walks one request: its first warp walks, and the others wait for jobs. `area`: see BlockRows.
template <Route route, Scan scan>
PASS_EXT_DEVICE void walk_request(const AcceptProblem& problem, const RowsWorkspace& workspace, int64_t area,
                                  int64_t index, bool divided) {
  const AcceptRequest request = request_of(problem, index);
  JobRows<route, scan> jobs(workspace, area);
  WalkRows<route, scan> rows(workspace, jobs, request);
  if constexpr (scan == Scan::beforehand)  // not by the warp that walks, if there is another
    if (divided && warp_index() == (walks_alone<route, scan>() ? 0 : 1)) rows.read_ahead();
  if (warp_index() == 0) {
    AcceptWalk<WalkRows<route, scan>>(rows, request).template run<route>(divided);
    rows.end_jobs();
  } else {
    rows.run_jobs();
  }
  sync_block();
}

// A whole step in one launch. It is for few rows: its blocks have the registers of a walk, so that fewer are resident.
constexpr int kStepsPerMultiprocessor = 2;  // blocks

template <Route route>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(32 * kScanWarps, kStepsPerMultiprocessor)
    accept_step_kernel(PASS_EXT_PARAMETER AcceptSource source, PASS_EXT_PARAMETER RowsWorkspace workspace) {
  begin_kernel(source, workspace);
  if (!scan_row(source, workspace)) return;
  int32_t* const finished = workspace.counters + workspace.rows;
  if (!block_comes_last(finished, static_cast<int32_t>(workspace.rows), &row_shared().block.is_last)) return;
  stamp(workspace, Phase::last_of_step);
  const AcceptProblem& problem = source.problem;
  const bool divided = divides_rows(problem);
  stamp(workspace, Phase::divided);
  if constexpr (route == Route::coupled) {  // a walk without jobs: a warp for each
    for (int64_t index = warp_index(); index < problem.requests; index += kScanWarps) {
      const AcceptRequest request = request_of(problem, index);
      JobRows<route, Scan::beforehand> jobs(workspace, 0);
      WalkRows<route, Scan::beforehand> rows(workspace, jobs, request);
      if (divided) rows.read_ahead();
      AcceptWalk<WalkRows<route, Scan::beforehand>>(rows, request).template run<route>(divided);
    }
  } else {
    for (int64_t index = 0; index < problem.requests; ++index)
      walk_request<route, Scan::beforehand>(problem, workspace, 0, index, divided);
  }
  stamp(workspace, Phase::walked);
}

// `are_bounds_checked`: check_bounds_kernel has written workspace.divided.
template <Route route, Scan scan>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(256, kBlocksPerMultiprocessor)
    accept_kernel(PASS_EXT_PARAMETER AcceptProblem problem, PASS_EXT_PARAMETER RowsWorkspace workspace,
                  bool are_bounds_checked) {
  begin_kernel(problem, workspace);
  const bool divided = are_bounds_checked ? *workspace.divided != 0 : divides_rows(problem);
  for (int64_t index = block_index().x; index < problem.requests; index += grid_size().x)
    walk_request<route, scan>(problem, workspace, block_index().x, index, divided);
}

// Up to 1,024 requests every block checks cu_nodes itself; above, one extra kernel does.
constexpr int64_t kMaxRequestsCheckedByEveryBlock = 1024;

// divided: 1 if every request's range in cu_nodes is valid, else 0.
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(512) check_bounds_kernel(AcceptProblem problem, int32_t* divided) {
  begin_kernel();
  const bool divides = divides_rows(problem);
  if (thread_rank() == 0) *divided = divides;
}

inline RowsPlan plan_accept(const AcceptProblem& problem, int multiprocessors) {
  const bool uses_draft = problem.has_draft && reads_drafts(problem.rule);
  const int64_t rows_of_node = uses_draft ? 2 : 1;
  const int64_t levels = 1 + (problem.max_depth < 3 ? problem.max_depth : 3);  // a guess at the levels a walk visits
  RowsPlan plan = plan_rows(problem.nodes * rows_of_node, problem.requests, levels * rows_of_node, problem.nodes,
                            problem.target.vocabulary, problem.rule != Rule::coupled_inverse, multiprocessors);
  const SamplingParameterArrays& sampling = problem.target_sampling;
  plan.lists_supports =
      plan.rows > 0 && needs_mass(problem.rule) && (sampling.top_k != nullptr || sampling.top_p != nullptr);
  // A step of few rows, where a launch costs more than the blocks that it could have more of.
  const Route route = route_of(problem.rule);
  const int64_t walks = route == Route::coupled ? kScanWarps : route == Route::down ? 1 : 0;
  plan.is_one_launch = plan.rows > 0 && plan.rows < kMaxRowsBeforehand && problem.requests <= walks &&
                       plan.rows * plan.scan_blocks <= kStepsPerMultiprocessor * int64_t{multiprocessors};
  return plan;
}

// Walks that scan on the way are those of many requests. The default rule has a kernel for them, and all others one
// together: of its code a walk runs what it would run of a kernel of its own, and five kernels, each with the scan and
// all jobs, would be most of what is compiled here.
template <Route route>
void launch_walk(const AcceptProblem& problem, const RowsWorkspace& workspace, int64_t blocks, bool are_bounds_checked,
                 Stream stream) {
  constexpr Route on_the_way = route == Route::coupled ? route : Route::any;
  const auto walk = [&](auto kernel, unsigned threads) {
    launch("accept", kernel, LaunchShape{{blocks}, {threads}, sizeof(AcceptShared)}, stream, problem, workspace,
           are_bounds_checked);
  };
  const int32_t vocabulary = problem.target.vocabulary;
  if (workspace.rows > 0)
    walk(accept_kernel<route, Scan::beforehand>, walk_threads<route, Scan::beforehand>(vocabulary));
  else
    walk(accept_kernel<on_the_way, Scan::on_the_way>, walk_threads<on_the_way, Scan::on_the_way>(vocabulary));
}

inline void launch_accept(const AcceptProblem& problem, const RowsPlan& plan, const RowsWorkspace& workspace,
                          Stream stream) {
  if (problem.requests == 0) return;
  const bool is_checked = !problem.is_chain && problem.requests > kMaxRequestsCheckedByEveryBlock;
  if (is_checked)
    launch("accept (bounds)", check_bounds_kernel, LaunchShape{{1}, {512}}, stream, problem, workspace.divided);
  if (plan.is_one_launch) {
    const auto step =
        route_of(problem.rule) == Route::coupled ? accept_step_kernel<Route::coupled> : accept_step_kernel<Route::down>;
    return launch("accept", step, LaunchShape{{plan.scan_blocks, plan.rows}, {32 * kScanWarps}, sizeof(AcceptShared)},
                  stream, AcceptSource{problem}, workspace);
  }
  if (workspace.rows > 0) launch_scan_rows("accept (scan)", AcceptSource{problem}, workspace, stream);
  const Route route = route_of(problem.rule);
  const auto walk = route == Route::coupled     ? launch_walk<Route::coupled>
                    : route == Route::inverse   ? launch_walk<Route::inverse>
                    : route == Route::traversal ? launch_walk<Route::traversal>
                    : route == Route::longest   ? launch_walk<Route::longest>
                    : route == Route::kseq      ? launch_walk<Route::kseq>
                                                : launch_walk<Route::down>;
  walk(problem, workspace, plan.blocks, is_checked, stream);
}

}  // namespace pass_ext::gpu
