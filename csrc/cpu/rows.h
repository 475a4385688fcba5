// Work on rows of logits on the CPU: describe a row as a distribution, sum over it, draw from it. It is the `Rows` of
// core/accept_walk.h and core/draft.h. Sweeps over a row are vectorised (cpu/rows_kernels-inl.h). If `parallel` says
// that requests do not fill the threads, sweeps are split into slices whose results are merged in order: same bits with
// any number of threads. Buffers belong to the thread and outlive the call, so a call allocates nothing once they are
// large enough.
#pragma once

#include <cstdint>
#include <vector>

#include "core/accept.h"
#include "core/distribution.h"
#include "core/draft.h"
#include "core/inverse.h"
#include "core/shard.h"

namespace pass_ext {

struct Candidate {
  float logit;
  int32_t id;
};

// Deleted children of the node being judged: the ids, and the beta at which each was cut.
struct Removed {
  const int32_t* ids;
  const float* cuts;
  int32_t count;
};

class CpuRows {
 public:
  // Begins a problem: forgets the maxima of the last one's rows.
  CpuRows& begin(bool parallel) {
    parallel_ = parallel;
    for (Maxima& recent : recent_) recent.row = {};
    return *this;
  }

  bool is_leader() const { return true; }

  // The smallest index in [from, count) for which predicate(index) holds, or -1.
  template <typename Predicate>
  int32_t first_node(int32_t from, int32_t count, Predicate&& predicate) const {
    for (int32_t i = from; i < count; ++i)
      if (predicate(i)) return i;
    return -1;
  }

  // One number per node, see AcceptWalk.
  void reset_cuts(int32_t nodes) { cuts_.assign(nodes, kNotCut); }
  float cut(int32_t node) const { return cuts_[node]; }
  void set_cut(int32_t node, float value) { cuts_[node] = value; }

  void save(int32_t node, const Judge& judge) {
    if (static_cast<size_t>(node) >= judges_.size()) judges_.resize(kMaxTreeNodes);
    judges_[node] = judge;
  }
  const Judge& saved(int32_t node) const { return judges_[node]; }

  Distribution describe(const LogitRow& row, const SamplingParameters& parameters, bool needs_mass);
  float logit(const LogitRow& row, int32_t id) const { return logit_at(row, id); }
  // Sum over the support of exp((z - maximum) scale).
  double mass(const LogitRow& row, const Distribution& distribution);
  // The number of tokens in the support. Their ids, in ascending order, go to `ids` if there is room for all.
  int32_t support(const LogitRow& row, const Distribution& distribution, int32_t room, int32_t* ids);
  double entropy(const Judge& judge);
  ResidualSums residual_sums(const Judge& judge, const AcceptRequest& request);
  void overlap_sums(const Judge& judge, const float* inverse_rho, double* sums);
  // The token at the place `uniform` of p, in units of 2^-64 (core/inverse.h).
  int32_t invert(const Judge& judge, uint64_t uniform);
  // A token with probability proportional to its weight, or -1 if none has any. `rejected`: deleted children count.
  int32_t draw(const Judge& judge, const Weight& weight, const AcceptRequest& request, bool rejected,
               const Noise& noise);

  // The `count` best of a race, or without noise of the logits, and their log probabilities. -1 and -inf fill the rest.
  void best(const LogitRow& row, const Distribution& distribution, const Noise* noise, int32_t count, int64_t* tokens,
            float* logprobs);
  // The same, with the scores.
  int32_t rank(const LogitRow& row, const Distribution& distribution, const Noise* noise, int32_t count);
  const Candidate& ranked(int32_t place) const { return candidates_[place]; }  // `logit` holds the score
  void fill(int64_t* tokens, float* logprobs, int32_t begin, int32_t end);
  void concentrate(float* logprobs, int32_t count, bool everywhere);

  // Parts of sums and searches over a row, for a shard of its columns (core/shard.h).

  // The largest logit and its id, the lowest of equals; NaN if a logit is NaN or +inf; id -1 if all are -inf.
  Candidate peak(const LogitRow& row);
  // Per slice: the sum over the support, or of `everything` as top-p sees it.
  void slice_masses(const LogitRow& row, const Distribution& distribution, bool everything, double* masses);
  // Adds the counts, or integer masses, of the tokens with a key in the range, which `start` columns lie in front of.
  void select_bins(const LogitRow& row, const Distribution& distribution, int32_t start, const SelectRange& range,
                   bool by_mass, uint64_t* bins);
  // Per slice: two numbers, those of ResidualSums.
  void slice_residual_sums(const Judge& judge, const Removed& removed, double* sums);
  // The best token of a race over the weights, and its score.
  Candidate race(const Judge& judge, const Weight& weight, const Removed& removed, const Noise& noise);

 private:
  // The largest logit of each group of a row, stored for the two rows used last.
  struct Maxima {
    LogitRow row{};
    std::vector<float> values;
    bool good = false;
  };

  Maxima& maxima_of(const LogitRow& row);
  double mass_of(const Maxima& maxima, const Distribution& distribution);
  double mass_of(const LogitRow& row, const float* maxima, const Distribution& distribution);
  double mass_above(const Maxima& maxima, const Distribution& distribution, float floor, double& above);
  int32_t count_groups(const Maxima& maxima, float threshold) const;
  Candidate* gather(const Maxima& maxima, const Distribution& distribution, float floor, float ceiling, int64_t limit);
  void cut_top_k(const Maxima& maxima, int32_t top_k, Distribution& distribution);
  double cut_top_p(const Maxima& maxima, float top_p, Distribution& distribution);
  Removed removed_of(const Judge& judge, const AcceptRequest& request);
  template <typename Function>
  void for_each_slice(int32_t groups, Function&& function) const;
  template <typename Function>
  double sum_slices(int32_t groups, Function&& function);
  template <typename Visit>
  void visit_groups(int32_t groups, int32_t count, const Visit& visit);

  bool parallel_ = false;
  Maxima recent_[2];
  int next_recent_ = 0;
  std::vector<float> cuts_, bounds_;
  std::vector<Judge> judges_;
  std::vector<Candidate> candidates_;
  std::vector<int32_t> removed_ids_;
  std::vector<float> removed_cuts_;
  std::vector<double> partial_;
  std::vector<uint64_t> bins_, masses_;
};

// This thread's rows. Their buffers live from call to call.
CpuRows& thread_rows(bool parallel);

}  // namespace pass_ext
