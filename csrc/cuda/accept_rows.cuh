// The `Rows` of core/accept_walk.h on the GPU. One warp of a block walks a request's tree and searches it with ballots,
// without a barrier of the block. Work on a whole row is a job of all warps (accept_jobs.cuh).
#pragma once

#include <cstdint>

#include "core/accept.h"
#include "cuda/accept_jobs.cuh"
#include "cuda/primitives.cuh"
#include "cuda/rows.cuh"

namespace pass_ext::gpu {

// The `Rows` of a walk. All lanes of the walking warp call every method together, except run_jobs and read_ahead: those
// are for the other warps too. After a job the walk takes its Judge back from shared memory, which is cheaper than
// registers that keep it meanwhile.
template <Route route, Scan scan>
class WalkRows {
 public:
  PASS_EXT_DEVICE WalkRows(const RowsWorkspace& workspace, JobRows<route, scan>& jobs, const AcceptRequest& request)
      : workspace_(workspace), jobs_(jobs), request_(request) {}

  PASS_EXT_DEVICE bool is_leader() const { return lane_index() == 0; }

  // Reads what a walk may read of each node, all nodes side by side: a level then waits for L1 four times, not for L2.
  // `cu_nodes` divides the rows.
  PASS_EXT_DEVICE void read_ahead() const {
    static_assert(scan == Scan::beforehand, "the scan has written it");
    constexpr int32_t kMostNodes = 64;
    const AcceptProblem& problem = request_.problem;
    if (request_.nodes > kMostNodes) return;
    const bool greedy = problem.target_sampling.temperature == nullptr ||
                        is_greedy(problem.target_sampling.temperature[request_.index]);
    uint32_t seen = 0;  // goes to shared memory: loads whose results nobody wants are left out
    const auto see = [&](int64_t slot) {
      const Distribution& distribution = workspace_.distributions[slot];
      seen ^= bits_of(distribution.maximum) ^ static_cast<uint32_t>(distribution.status);  // it may lie in two lines
      return distribution.status == 0;
    };
#pragma unroll 1
    for (int32_t node = static_cast<int32_t>(lane_index()); node < request_.nodes; node += 32) {
      const bool is_drawn = see(request_.first + node) && !greedy;
      if (route == Route::coupled && is_drawn) seen ^= static_cast<uint32_t>(workspace_.winners[request_.first + node]);
      if (node == 0) continue;
      const int32_t parent = request_.parent(node);
      const int64_t token = request_.token(node);
      seen ^= static_cast<uint32_t>(token);
      if (route == Route::coupled || greedy || parent < 0 || parent >= node) continue;
      if (token < 0 || token >= problem.target.vocabulary) continue;
      const int32_t id = static_cast<int32_t>(token), draft = request_.draft_index(parent);
      seen ^= bits_of(logit_at(request_.target_row(parent), id));
      if (!reads_drafts(problem.rule) || draft < 0 || draft >= problem.draft_row_count) continue;
      see(problem.nodes + request_.first + parent);
      seen ^= bits_of(logit_at(request_.draft_row(parent, draft), id));
    }
    accept_shared().read_ahead[thread_rank()] = seen;
  }

  template <typename Predicate>
  PASS_EXT_DEVICE int32_t first_node(int32_t from, int32_t count, const Predicate& predicate) {
#pragma unroll 1
    for (int32_t base = from; base < count; base += 32) {
      const int32_t i = base + static_cast<int32_t>(lane_index());
      const unsigned matches = ballot(i < count && predicate(i));
      if (matches != 0) return base + first_set_bit(matches);
    }
    return -1;
  }

  PASS_EXT_DEVICE void reset_cuts(int32_t nodes) {
#pragma unroll 1
    for (int32_t i = static_cast<int32_t>(lane_index()); i < nodes; i += 32) accept_shared().cuts[i] = kNotCut;
    sync_warp();
  }
  PASS_EXT_DEVICE float cut(int32_t node) const { return accept_shared().cuts[node]; }
  PASS_EXT_DEVICE void set_cut(int32_t node, float value) {
    sync_warp();
    if (is_leader()) accept_shared().cuts[node] = value;
    sync_warp();
  }
  PASS_EXT_DEVICE void save(int32_t node, const Judge& judge) {
    sync_warp();
    if (is_leader()) workspace_.judges[request_.first + node] = judge;
    sync_warp();
  }
  PASS_EXT_DEVICE Judge saved(int32_t node) const { return workspace_.judges[request_.first + node]; }

  PASS_EXT_DEVICE Distribution describe(const LogitRow& row, const SamplingParameters& parameters, bool needs_mass) {
    if constexpr (scan == Scan::beforehand) return workspace_.distributions[row.slot];
    if (is_leader()) {
      accept_shared().job.row = row;
      accept_shared().job.parameters = parameters;
      accept_shared().job.needs_mass = needs_mass;
    }
    run_job(JobKind::describe, request_.nodes);
    return accept_shared().job.distribution;
  }

  PASS_EXT_DEVICE float logit(const LogitRow& row, int32_t id) const { return logit_at(row, id); }

  PASS_EXT_DEVICE double entropy(Judge& judge) {
    run_job_at(judge, JobKind::entropy, request_.nodes);
    return accept_shared().job.sums[0];
  }

  PASS_EXT_DEVICE ResidualSums residual_sums(Judge& judge, const AcceptRequest& request) {
    run_job_at(judge, JobKind::residual_sums, request.nodes);
    return {accept_shared().job.sums[0], accept_shared().job.sums[1]};
  }

  PASS_EXT_DEVICE void overlap_sums(Judge& judge, const float* inverse_rho, double* sums) {
    if (is_leader())
      for (int k = 0; k < kOverlaps; ++k) accept_shared().job.inverse_rho[k] = inverse_rho[k];
    run_job_at(judge, JobKind::overlap_sums, request_.nodes);
    for (int k = 0; k < kOverlaps; ++k) sums[k] = accept_shared().job.sums[k];
  }

  PASS_EXT_DEVICE int32_t draw(Judge& judge, const Weight& weight, const AcceptRequest& request, bool rejected,
                               const Noise& noise) {
    if constexpr (scan == Scan::beforehand && route == Route::coupled) return workspace_.winners[judge.p_row.slot];
    if (is_leader()) {
      accept_shared().job.weight = weight;
      accept_shared().job.rejected = rejected;
      accept_shared().job.noise = noise;
    }
    run_job_at(judge, JobKind::draw, request.nodes);
    return accept_shared().job.id;
  }

  PASS_EXT_DEVICE int32_t invert(Judge& judge, uint64_t uniform) {
    if (is_leader()) accept_shared().job.uniform = uniform;
    run_job_at(judge, JobKind::invert, request_.nodes);
    return accept_shared().job.id;
  }

  // For the warps that do not walk: runs their part of each job, until end_jobs.
  PASS_EXT_DEVICE void run_jobs() {
    for (;;) {
      sync_block();
      if (accept_shared().job.kind == JobKind::none) return;
      jobs_.run(request_);
      sync_block();
    }
  }
  PASS_EXT_DEVICE void end_jobs() {
    if (is_leader()) accept_shared().job.kind = JobKind::none;
    sync_block();
  }

 private:
  PASS_EXT_DEVICE void run_job_at(Judge& judge, JobKind kind, int32_t nodes) {
    Judge& shared = accept_shared().job.judge;
    sync_warp();  // lanes may still take the last one back
    if (is_leader()) shared = judge;
    run_job(kind, nodes);
    judge = shared;
  }

  // Runs a job, whose arguments are in shared memory, on all warps of the block.
  PASS_EXT_DEVICE_CALL void run_job(JobKind kind, int32_t nodes) {
    if (is_leader()) {
      accept_shared().job.kind = kind;
      accept_shared().job.nodes = nodes;
    }
    sync_block();
    jobs_.run(request_);
    sync_block();
  }

  const RowsWorkspace& workspace_;
  JobRows<route, scan>& jobs_;
  AcceptRequest request_;
};

}  // namespace pass_ext::gpu
