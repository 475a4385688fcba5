// The jobs of a walk: what takes a whole row, such as the race behind a rejection, by all warps of a block together.
#pragma once

#include <cstdint>

#include "core/accept.h"
#include "core/inverse.h"
#include "cuda/primitives.cuh"
#include "cuda/rows.cuh"

namespace pass_ext::gpu {

enum class JobKind : int32_t { none, describe, draw, invert, entropy, residual_sums, overlap_sums };

// One job in shared memory: its kind, its arguments, then its results from `distribution` on.
struct Job {
  JobKind kind;
  LogitRow row;
  SamplingParameters parameters;
  bool needs_mass, rejected;
  Judge judge;
  Weight weight;
  Noise noise;
  float inverse_rho[kOverlaps];
  uint64_t uniform;
  int32_t nodes;  // of the request
  Distribution distribution;
  int32_t id;
  double sums[kOverlaps];
  uint64_t masses[32];  // of the warps' parts of a range
};

struct AcceptShared {
  RowShared row;  // first: row_shared() expects it at the beginning of shared memory
  Job job;
  float cuts[kMaxTreeNodes];
  int32_t removed_count;  // deleted children of the node being judged; their ids and cuts follow
  int32_t removed_ids[kMaxTreeNodes];
  float removed_cuts[kMaxTreeNodes];
  uint32_t read_ahead[32 * kScanWarps];  // of each thread that walks
};

// True if a node has a child. All lanes of a warp call it together.
PASS_EXT_DEVICE bool has_child(const AcceptRequest& request, int32_t node) {
  if (request.problem.parents == nullptr) return node + 1 < request.nodes;
  bool has_child = false;
  const int32_t lane = static_cast<int32_t>(lane_index());
  for (int32_t base = node + 1; base < request.nodes && !has_child; base += 32)
    has_child = any(base + lane < request.nodes && request.parent(base + lane) == node);
  return has_child;
}

// The race of a walk that ends at a node, as far as the scan can tell: it draws the noise of that one. A node with
// children is an end if all of them are rejected.
PASS_EXT_DEVICE Purpose expected_race(const AcceptRequest& request, int32_t node) {
  const Rule rule = request.problem.rule;
  if (rule == Rule::coupled) return Purpose::coupled;
  return route_of(rule) != Route::longest && has_child(request, node) ? Purpose::residual : Purpose::bonus;
}

PASS_EXT_DEVICE AcceptShared& accept_shared() { return *dynamic_shared<AcceptShared>(); }

// True if walks of this route and scan have jobs of this kind; those of `any` have the jobs of all.
PASS_EXT_HOST_DEVICE constexpr bool has_job(Route route, Scan scan, JobKind kind) {
  if (kind == JobKind::describe) return scan == Scan::on_the_way;
  // After a scan beforehand a coupled walk reads the winners of the races from the workspace.
  if (kind == JobKind::draw) return route != Route::inverse && (scan == Scan::on_the_way || route != Route::coupled);
  if (route == Route::any) return true;
  if (kind == JobKind::invert) return route == Route::inverse;
  if (kind == JobKind::entropy) return route == Route::longest;
  if (kind == JobKind::residual_sums) return route == Route::down || route == Route::traversal || route == Route::kseq;
  return kind == JobKind::overlap_sums && route == Route::kseq;
}

// True if a walk has no jobs: then it needs no warp but its own.
template <Route route, Scan scan>
PASS_EXT_HOST_DEVICE constexpr bool walks_alone() {
  constexpr bool has_none = !has_job(route, scan, JobKind::describe) && !has_job(route, scan, JobKind::draw) &&
                            !has_job(route, scan, JobKind::invert);
  static_assert(!has_none || route == Route::coupled, "other walks have jobs beside describe and draw");
  return has_none;
}

// Threads of a walk's block.
template <Route route, Scan scan>
unsigned walk_threads(int32_t vocabulary) {
  return walks_alone<route, scan>() ? 32 : threads_for(vocabulary);
}

// The jobs. All threads of a block call every method together.
template <Route route, Scan scan>
class JobRows : public BlockRows<scan> {
  using Base = BlockRows<scan>;

 public:
  using Base::is_leader;

  PASS_EXT_DEVICE explicit JobRows(const RowsWorkspace& workspace, int64_t area) : Base(workspace, area) {}

  PASS_EXT_DEVICE_CALL void run(AcceptRequest whole) {
    Job& job = accept_shared().job;
    [[maybe_unused]] const AcceptRequest request{whole.problem, whole.index, whole.first, job.nodes};
    if constexpr (has(JobKind::describe))
      if (job.kind == JobKind::describe) {
        const Distribution distribution = this->describe(job.row, job.parameters, job.needs_mass);
        if (is_leader()) job.distribution = distribution;
      }
    if constexpr (has(JobKind::draw))
      if (job.kind == JobKind::draw) {
        const int32_t id = draw(job.judge, job.weight, request, job.rejected, job.noise, is_drawn(whole, job));
        if (is_leader()) job.id = id;
      }
    if constexpr (has(JobKind::invert))
      if (job.kind == JobKind::invert) {
        const int32_t id = invert(job.judge, job.uniform);
        if (is_leader()) job.id = id;
      }
    if constexpr (has(JobKind::entropy))
      if (job.kind == JobKind::entropy) {
        const double sum = entropy(job.judge);
        if (is_leader()) job.sums[0] = sum;
      }
    if constexpr (has(JobKind::residual_sums))
      if (job.kind == JobKind::residual_sums) {
        const ResidualSums sums = residual_sums(job.judge, request);
        if (is_leader()) {
          job.sums[0] = sums.weight;
          job.sums[1] = sums.remaining;
        }
      }
    if constexpr (has(JobKind::overlap_sums))
      if (job.kind == JobKind::overlap_sums) {
        double sums[kOverlaps];
        overlap_sums(job.judge, job.inverse_rho, sums);
        if (is_leader())
          for (int k = 0; k < kOverlaps; ++k) job.sums[k] = sums[k];
      }
  }

 private:
  using Base::first_index;
  using Base::stride;
  using Base::summary_of_row;

  PASS_EXT_DEVICE static constexpr bool has(JobKind kind) { return has_job(route, scan, kind); }

  // True if the scan has drawn the noise of a final race. `whole`: the request as the scan saw it.
  PASS_EXT_DEVICE bool is_drawn(const AcceptRequest& whole, const Job& job) const {
    if constexpr (scan == Scan::on_the_way) return false;
    return this->workspace_.log_firsts != nullptr && job.noise.purpose == expected_race(whole, job.judge.node);
  }

  // Every warp adds up its part of a range of the row; the part that holds the place is the next range, until one warp
  // holds a piece in each lane. It ends because a block with this job has several warps (walk_threads).
  PASS_EXT_DEVICE int32_t invert(const Judge& judge, uint64_t uniform) {
    const LogitRow& row = judge.p_row;
    const int32_t warps = static_cast<int32_t>(warps_in_block()), warp = static_cast<int32_t>(warp_index());
    int32_t begin = 0, strips = (row.vocabulary + kStrip - 1) / kStrip;
    uint64_t place = 0;
    for (bool is_whole = true; is_whole || strips > 1; is_whole = false) {
      const int32_t part = (strips + warps - 1) / warps, used = (strips + part - 1) / part;
      const int32_t last = (warp + 1) * part < strips ? (warp + 1) * part : strips;
      uint64_t mass = 0;
      for (int32_t strip = warp * part; strip < last; ++strip) mass += mass_of_piece(judge, begin + strip * kStrip);
      for (int step = 16; step > 0; step /= 2) mass += shuffle_xor(mass, step);
      uint64_t* const masses = accept_shared().job.masses;
      if (lane_index() == 0) masses[warp] = mass;
      sync_block();
      if (is_whole) {
        for (int32_t i = 0; i < used; ++i) place += masses[i];
        place = high_product(uniform, place);
      }
      int32_t chosen = 0;
      for (; place >= masses[chosen]; ++chosen) place -= masses[chosen];
      begin += chosen * part * kStrip;
      strips = (chosen + 1) * part < strips ? part : strips - chosen * part;
      sync_block();
    }
    return find_in_strip(judge, begin, place);
  }

  static constexpr int32_t kStrip = 32 * kPiece;  // a piece for each lane

  // The integer mass of this lane's piece of a strip.
  PASS_EXT_DEVICE uint64_t mass_of_piece(const Judge& judge, int32_t strip) {
    const int32_t first = strip + static_cast<int32_t>(lane_index()) * kPiece;
    uint64_t mass = 0;
    if (first < judge.p_row.vocabulary) {
      float z[kPiece];
      load_piece(judge.p_row, first, z);
      for (int i = 0; i < kPiece; ++i) mass += token_mass(judge.p, z[i], first + i);
    }
    return mass;
  }

  // All warps do this together, on the same strip.
  PASS_EXT_DEVICE int32_t find_in_strip(const Judge& judge, int32_t strip, uint64_t place) {
    const uint64_t mass = mass_of_piece(judge, strip);
    uint64_t up_to = mass;
    for (unsigned step = 1; step < 32; step *= 2) {
      const uint64_t before = shuffle_up(up_to, step);
      if (lane_index() >= step) up_to += before;
    }
    const int32_t lane = first_set_bit(ballot(place < up_to));
    place -= shuffle(up_to - mass, lane);
    int32_t id = strip + lane * kPiece;
    for (uint64_t next; place >= (next = token_mass(judge.p, logit_at(judge.p_row, id), id)); ++id) place -= next;
    return id;
  }

  PASS_EXT_DEVICE double entropy(const Judge& judge) {
    double moment = 0.0;
    for_each_piece(judge.p_row, [&](int32_t first, const float (&z)[kPiece]) {
      float sum = 0.0f;
      for (int i = 0; i < kPiece; ++i)
        if (in_support(judge.p, z[i], first + i)) {
          const float exponent = maximum(log_weight(judge.p, z[i]), -100.0f);
          sum += exponential(exponent) * exponent;
        }
      moment += sum;
    });
    moment = sum_of_block(row_shared().block, moment);
    return judge.p.log_mass - moment * judge.p.inverse_mass;
  }

  PASS_EXT_DEVICE ResidualSums residual_sums(const Judge& judge, const AcceptRequest& request) {
    collect_removed(judge, request);
    const float beta = static_cast<float>(judge.beta);
    double weights = 0.0, remaining = 0.0;
    for_each_pair(judge, [&](int32_t first, float (&p)[kPiece], float (&q)[kPiece]) {
      float weight[kPiece];
      for (int i = 0; i < kPiece; ++i) weight[i] = residual_weight(p[i], q[i], beta);
      for (int32_t k = 0; k < accept_shared().removed_count; ++k) {
        const int32_t place = accept_shared().removed_ids[k] - first;
        if (place < 0 || place >= kPiece) continue;
        const float cut = accept_shared().removed_cuts[k];
        for (int i = 0; i < kPiece; ++i)  // not weight[place]: such an index would put the arrays into local memory
          if (i == place) {
            weight[i] = cut == kInfinity ? 0.0f : residual_weight(p[i], q[i], cut);
            q[i] = 0.0f;
          }
      }
      float weight_sum = 0.0f, q_sum = 0.0f;
      for (int i = 0; i < kPiece; ++i) {
        weight_sum += weight[i];
        q_sum += q[i];
      }
      weights += weight_sum;
      remaining += q_sum;
    });
    weights = sum_of_block(row_shared().block, weights);
    return {weights, sum_of_block(row_shared().block, remaining)};
  }

  PASS_EXT_DEVICE void overlap_sums(const Judge& judge, const float* inverse_rho, double (&sums)[kOverlaps]) {
    for (int k = 0; k < kOverlaps; ++k) sums[k] = 0.0;
    for_each_pair(judge, [&](int32_t, float (&p)[kPiece], float (&q)[kPiece]) {
#pragma unroll
      for (int k = 0; k < kOverlaps; ++k) {
        float sum = 0.0f;
        for (int i = 0; i < kPiece; ++i) sum += kseq_overlap(p[i], q[i], inverse_rho[k]);
        sums[k] += sum;
      }
    });
#pragma unroll
    for (int k = 0; k < kOverlaps; ++k) sums[k] = sum_of_block(row_shared().block, sums[k]);
  }

  PASS_EXT_DEVICE int32_t draw(const Judge& judge, const Weight& weight, const AcceptRequest& request, bool rejected,
                               const Noise& noise, bool is_drawn) {
    if (rejected) collect_removed(judge, request);
    const bool is_plain = weight.kind == Weight::plain;
    const auto best = [&](const auto& score) {
      if constexpr (scan == Scan::beforehand)
        if (this->workspace_.supports != nullptr && this->workspace_.support_sizes[judge.p_row.slot] > 0)
          return this
              ->best_of_keys(this->workspace_.supports + judge.p_row.slot * kSupport,
                             this->workspace_.support_sizes[judge.p_row.slot], noise, score)
              .id;
      return this->race(judge.p_row, judge.p, noise, is_drawn, score, is_plain ? 0.0f : -judge.p.log_mass);
    };
    if constexpr (!has(JobKind::residual_sums)) return best(PlainScore{judge.p});
    const auto score = [&](int32_t id, float z, float log_e) {
      float cut = kNotCut;
      if (rejected)
        for (int32_t k = 0; k < accept_shared().removed_count; ++k)
          if (accept_shared().removed_ids[k] == id) cut = accept_shared().removed_cuts[k];
      if (cut == kInfinity) return -kInfinity;
      if (is_plain) return PlainScore{judge.p}(id, z, log_e);
      const float p = probability(judge.p, z, id);
      const float q = judge.has_q ? probability(judge.q, logit_at(judge.q_row, id), id) : 0.0f;
      const float left = cut != kNotCut                ? residual_weight(p, q, cut)
                         : weight.kind == Weight::kseq ? kseq_weight(p, q, weight.first, weight.second)
                                                       : residual_weight(p, q, weight.first);
      return left < 0x1p-126f ? -kInfinity : logarithm(left) - log_e;
    };
    return best(score);
  }

  // function(first id, eight logits): one thread per piece.
  template <typename Function>
  PASS_EXT_DEVICE void for_each_piece(const LogitRow& row, const Function& function) {
    for (int32_t first = first_index() * kPiece; first < row.vocabulary; first += stride() * kPiece) {
      float z[kPiece];
      load_piece(row, first, z);
      function(first, z);
    }
  }

  // function(first id, eight probabilities of p, eight probabilities of q): one thread per piece.
  template <typename Function>
  PASS_EXT_DEVICE void for_each_pair(const Judge& judge, const Function& function) {
    for (int32_t first = first_index() * kPiece; first < judge.p_row.vocabulary; first += stride() * kPiece) {
      const RawPiece raw_p = load_raw(judge.p_row, first), raw_q = load_raw(judge.q_row, first);
      float p[kPiece], q[kPiece];
      convert(judge.p_row.type, raw_p, p);
      convert(judge.q_row.type, raw_q, q);
      if (judge.p_row.allowed != nullptr) forbid(load_allowed(judge.p_row, first), p);
      if (judge.q_row.allowed != nullptr) forbid(load_allowed(judge.q_row, first), q);
      for (int i = 0; i < kPiece; ++i) {
        p[i] = probability(judge.p, p[i], first + i);
        q[i] = probability(judge.q, q[i], first + i);
      }
      function(first, p, q);
    }
  }

  // Lists the deleted children of judge.node with their cuts in shared memory.
  PASS_EXT_DEVICE void collect_removed(const Judge& judge, const AcceptRequest& request) {
    sync_block();
    if (is_leader()) accept_shared().removed_count = 0;
    sync_block();
    for (int32_t i = judge.node + 1 + first_index(); i < request.nodes; i += stride())
      if (request.parent(i) == judge.node && accept_shared().cuts[i] != kNotCut) {
        const int32_t place = atomic_add(&accept_shared().removed_count, 1);
        accept_shared().removed_ids[place] = static_cast<int32_t>(request.token(i));
        accept_shared().removed_cuts[place] = accept_shared().cuts[i];
      }
    sync_block();
  }
};

}  // namespace pass_ext::gpu
