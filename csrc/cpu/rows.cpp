// Rows of logits on the CPU, see rows.h: slices and threads, filters, races. The inner loops: cpu/rows_kernels.h.
#include "cpu/rows.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>

#define PASS_EXT_KERNELS "cpu/rows_kernels.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

constexpr int32_t kSliceGroups = 128;    // 8,192 tokens: what one task reads at least
constexpr int32_t kFewCandidates = 2048;  // sorted at once; more are first divided into bins
constexpr int32_t kBins = 1024;

int32_t groups_of(int32_t vocabulary) { return (vocabulary + kGroup - 1) / kGroup; }

// The order of filters: larger logits first, lower ids first among equals.
bool comes_before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

void cut_behind(Law& law, const Candidate& last) {
  law.cut = last.logit;
  law.tie = last.id;
}

uint64_t mass_of_candidate(const Law& law, const Candidate& candidate) {
  return integer_mass(exponential(log_weight(law, candidate.logit)));
}

// Cuts behind the candidate at which the mass reaches `wanted`; [begin, end) in order, `before` lies in front of it.
void cut_at_mass(Law& law, const Candidate* begin, const Candidate* end, uint64_t before, uint64_t wanted) {
  for (const Candidate* candidate = begin; candidate != end; ++candidate) {
    before += mass_of_candidate(law, *candidate);
    if (before >= wanted || candidate + 1 == end) {
      cut_behind(law, *candidate);
      return;
    }
  }
}

// The same for candidates in any order: bins by logit first, then the bin in which the mass is reached.
void cut_at_mass_unordered(Law& law, std::vector<Candidate>& candidates, float lowest, uint64_t wanted) {
  if (candidates.size() > static_cast<size_t>(kFewCandidates)) {
    const float width = std::max((law.maximum - lowest) / kBins, 1e-30f), per_bin = 1.0f / width;
    const auto bin_of = [&](float logit) {
      return std::min(kBins - 1, static_cast<int32_t>((law.maximum - logit) * per_bin));
    };
    uint64_t masses[kBins] = {};
    for (const Candidate& candidate : candidates) masses[bin_of(candidate.logit)] += mass_of_candidate(law, candidate);
    uint64_t before = 0;
    int32_t bin = 0;
    while (bin + 1 < kBins && before + masses[bin] < wanted) before += masses[bin++];
    const auto end = std::partition(candidates.begin(), candidates.end(),
                                    [&](const Candidate& candidate) { return bin_of(candidate.logit) == bin; });
    if (end != candidates.begin()) {
      std::sort(candidates.begin(), end, comes_before);
      cut_at_mass(law, candidates.data(), candidates.data() + (end - candidates.begin()), before, wanted);
      return;
    }
  }
  std::sort(candidates.begin(), candidates.end(), comes_before);
  cut_at_mass(law, candidates.data(), candidates.data() + candidates.size(), 0, wanted);
}

// Keeps the smallest logit z with (z - maximum) scale >= ln(min_p), whatever its id.
void cut_at_floor(Law& law, float min_p) {
  const float floor = logarithm(maximum(min_p, 0x1p-126f));
  float lowest = law.maximum + floor / law.scale;
  while (lowest > -kInfinity && log_weight(law, lowest) >= floor) lowest = std::nextafter(lowest, -kInfinity);
  while (log_weight(law, lowest) < floor) lowest = std::nextafter(lowest, kInfinity);
  if (lowest > law.cut) {
    law.cut = lowest;
    law.tie = INT32_MAX;
  }
}

}  // namespace

CpuRows& thread_rows(bool parallel) {
  thread_local CpuRows rows(false);
  return rows.begin(parallel);
}

// function(slice, first group, last group)
template <typename Function>
void CpuRows::for_each_slice(int32_t groups, Function&& function) const {
  const int32_t slices = (groups + kSliceGroups - 1) / kSliceGroups;
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t slice = begin; slice < end; ++slice) {
      const int32_t first = static_cast<int32_t>(slice) * kSliceGroups;
      function(static_cast<int32_t>(slice), first, std::min(first + kSliceGroups, groups));
    }
  };
  if (parallel_ && slices > 1)
    torch::stable::parallel_for(0, slices, 1, run);
  else
    run(0, slices);
}

CpuRows::Maxima& CpuRows::maxima_of(const LogitRow& row) {
  for (Maxima& kept : kept_)
    if (kept.row.logits == row.logits && kept.row.allowed == row.allowed) return kept;
  Maxima& maxima = kept_[next_kept_];
  next_kept_ ^= 1;
  const int32_t groups = groups_of(row.vocabulary);
  maxima.row = row;
  maxima.values.resize(groups);
  partial_.assign(groups / kSliceGroups + 1, 1.0);
  for_each_slice(groups, [&](int32_t slice, int32_t begin, int32_t end) {
    bool good = true;
    PASS_EXT_AT_ISA(scan_groups(row, begin, end, maxima.values.data(), &good));
    if (!good) partial_[slice] = 0.0;
  });
  maxima.good = std::find(partial_.begin(), partial_.end(), 0.0) == partial_.end();
  return maxima;
}

double CpuRows::mass_of(const Maxima& maxima, const Law& law, double* log_moment) {
  const int32_t groups = groups_of(maxima.row.vocabulary), slices = groups / kSliceGroups + 1;
  partial_.assign(2 * slices, 0.0);
  for_each_slice(groups, [&](int32_t slice, int32_t begin, int32_t end) {
    PASS_EXT_AT_ISA(sum_mass(maxima.row, law, maxima.values.data(), begin, end, &partial_[slice],
                             log_moment == nullptr ? nullptr : &partial_[slices + slice]));
  });
  double mass = 0.0;
  for (int32_t slice = 0; slice < slices; ++slice) mass += partial_[slice];
  if (log_moment != nullptr)
    for (int32_t slice = 0; slice < slices; ++slice) *log_moment += partial_[slices + slice];
  return mass;
}

Law CpuRows::describe(const LogitRow& row, const LawParameters& parameters, bool needs_mass) {
  Maxima& maxima = maxima_of(row);
  Law law{-kInfinity, parameters.scale, -kInfinity, -1, 0.0f, 0.0f, 0};
  for (float value : maxima.values) law.maximum = maximum(value, law.maximum);
  if (!maxima.good) law.status = kBadLogits;
  if (law.status == 0 && law.maximum == -kInfinity) law.status = kEmptySupport;
  if (law.status != 0) return law;
  if (has_filter(parameters)) select_support(maxima, parameters, law);
  if (needs_mass) set_mass(law, mass_of(maxima, law, nullptr));
  return law;
}

void CpuRows::select_support(const Maxima& maxima, const LawParameters& parameters, Law& law) {
  const int32_t groups = groups_of(maxima.row.vocabulary);
  const float* values = maxima.values.data();
  const auto gather = [&](float floor) {
    candidates_.resize(maxima.row.vocabulary);
    int64_t count = 0;
    PASS_EXT_AT_ISA(collect(maxima.row, law, values, 0, groups, floor, candidates_.data(), &count));
    candidates_.resize(count);
  };
  bool gathered = false;
  if (parameters.top_k > 0) {
    // k groups have a largest logit that is at least the k-th largest of these: no token below it is among the top k.
    float floor = -kInfinity;
    if (parameters.top_k <= groups) {
      scratch_.assign(values, values + groups);
      std::nth_element(scratch_.begin(), scratch_.begin() + parameters.top_k - 1, scratch_.end(), std::greater<>());
      floor = scratch_[parameters.top_k - 1];
    }
    gather(floor);
    if (candidates_.size() > static_cast<size_t>(parameters.top_k)) {
      const auto last = candidates_.begin() + parameters.top_k - 1;
      std::nth_element(candidates_.begin(), last, candidates_.end(), comes_before);
      cut_behind(law, *last);
      candidates_.resize(parameters.top_k);
    }
    gathered = true;
  }
  if (parameters.top_p < 1.0f) {
    uint64_t total = 0;
    if (gathered) {
      for (const Candidate& candidate : candidates_) total += mass_of_candidate(law, candidate);
    } else {
      integer_sums_.assign(groups / kSliceGroups + 1, 0);
      for_each_slice(groups, [&](int32_t slice, int32_t begin, int32_t end) {
        PASS_EXT_AT_ISA(sum_integer_mass(maxima.row, law, values, begin, end, &integer_sums_[slice]));
      });
      for (uint64_t sum : integer_sums_) total += sum;
    }
    const uint64_t wanted = mass_to_reach(parameters.top_p, total);
    if (!gathered) {
      // Tokens so improbable that even the whole vocabulary of them weighs less than what top-p leaves out.
      const double spare = static_cast<double>(total - wanted) / kMassUnit / maxima.row.vocabulary;
      const float floor = law.maximum + logarithm(maximum(static_cast<float>(spare), 0x1p-100f)) / law.scale - 1.0f;
      gather(spare > 0x1p-100 ? std::min(floor, law.maximum) : -kInfinity);
    }
    float lowest = law.maximum;
    for (const Candidate& candidate : candidates_) lowest = std::min(lowest, candidate.logit);
    cut_at_mass_unordered(law, candidates_, lowest, wanted);
  }
  if (parameters.min_p > 0.0f) cut_at_floor(law, parameters.min_p);
}

double CpuRows::entropy(const Judge& judge) {
  double log_moment = 0.0;
  const double mass = mass_of(maxima_of(judge.p_row), judge.p, &log_moment);
  return std::log(mass) - log_moment / mass;
}

Removed CpuRows::removed_of(const Judge& judge, const AcceptRequest& request) {
  removed_ids_.clear();
  removed_cuts_.clear();
  for (int32_t i = judge.node + 1; i < request.nodes; ++i)
    if (request.parent(i) == judge.node && cuts_[i] != kNotCut) {
      removed_ids_.push_back(static_cast<int32_t>(request.token(i)));
      removed_cuts_.push_back(cuts_[i]);
    }
  return {removed_ids_.data(), removed_cuts_.data(), static_cast<int32_t>(removed_ids_.size())};
}

ResidualSums CpuRows::residual_sums(const Judge& judge, const AcceptRequest& request) {
  const Removed removed = removed_of(judge, request);
  const int32_t groups = groups_of(judge.p_row.vocabulary), slices = groups / kSliceGroups + 1;
  partial_.assign(2 * slices, 0.0);
  for_each_slice(groups, [&](int32_t slice, int32_t begin, int32_t end) {
    PASS_EXT_AT_ISA(sum_residual(judge, removed, begin, end, &partial_[slice], &partial_[slices + slice]));
  });
  ResidualSums sums{0.0, 0.0};
  for (int32_t slice = 0; slice < slices; ++slice) {
    sums.weight += partial_[slice];
    sums.remaining += partial_[slices + slice];
  }
  return sums;
}

void CpuRows::overlap_sums(const Judge& judge, const float* inverse_rho, double* sums) {
  const int32_t groups = groups_of(judge.p_row.vocabulary), slices = groups / kSliceGroups + 1;
  partial_.assign(kOverlaps * slices, 0.0);
  for_each_slice(groups, [&](int32_t slice, int32_t begin, int32_t end) {
    PASS_EXT_AT_ISA(sum_overlaps(judge, inverse_rho, begin, end, &partial_[kOverlaps * slice]));
  });
  for (int k = 0; k < kOverlaps; ++k) {
    sums[k] = 0.0;
    for (int32_t slice = 0; slice < slices; ++slice) sums[k] += partial_[kOverlaps * slice + k];
  }
}

int32_t CpuRows::draw(const Judge& judge, const Weight& weight, const AcceptRequest& request, bool rejected,
                      const Noise& noise) {
  const Maxima& maxima = maxima_of(judge.p_row);
  const Removed removed = rejected ? removed_of(judge, request) : Removed{nullptr, nullptr, 0};
  const int32_t groups = groups_of(judge.p_row.vocabulary);
  const bool is_plain = weight.kind == Weight::plain;
  bounds_.resize(groups);
  PASS_EXT_AT_ISA(
      bound_groups(judge.p, maxima.values.data(), groups, &noise, is_plain ? 0.0f : -judge.p.log_mass, bounds_.data()));
  float best_score = -kInfinity;
  int32_t best_id = -1;
  for (;;) {
    int32_t group;
    PASS_EXT_AT_ISA(find_largest(bounds_.data(), groups, &group));
    if (group < 0 || bounds_[group] < best_score) return best_id;
    bounds_[group] = -kInfinity;
    float scores[kGroup];
    if (is_plain) {
      PASS_EXT_AT_ISA(score_group(judge.p_row, judge.p, &noise, group, scores));
      for (int32_t k = 0; k < removed.count; ++k)
        if (removed.ids[k] / kGroup == group) scores[removed.ids[k] % kGroup] = -kInfinity;
    } else {
      PASS_EXT_AT_ISA(score_group_left(judge, weight, removed, noise, group, scores));
    }
    for (int32_t i = 0; i < kGroup; ++i)
      if (scores[i] > best_score || (scores[i] == best_score && scores[i] > -kInfinity && group * kGroup + i < best_id)) {
        best_score = scores[i];
        best_id = group * kGroup + i;
      }
  }
}

void CpuRows::best(const LogitRow& row, const Law& law, const Noise* noise, int32_t count, int64_t* tokens,
                   float* logprobs) {
  const Maxima& maxima = maxima_of(row);
  const int32_t groups = groups_of(row.vocabulary);
  bounds_.resize(groups);
  PASS_EXT_AT_ISA(bound_groups(law, maxima.values.data(), groups, noise, 0.0f, bounds_.data()));
  // The best so far, in order; scores beside candidates because a candidate keeps its logit.
  int32_t found = 0;
  scratch_.resize(count);
  candidates_.resize(count);
  for (;;) {
    int32_t group;
    PASS_EXT_AT_ISA(find_largest(bounds_.data(), groups, &group));
    if (group < 0 || (found == count && bounds_[group] < scratch_[count - 1])) break;
    bounds_[group] = -kInfinity;
    float scores[kGroup];
    PASS_EXT_AT_ISA(score_group(row, law, noise, group, scores));
    for (int32_t i = 0; i < kGroup; ++i) {
      const int32_t id = group * kGroup + i;
      const float score = scores[i];
      if (score == -kInfinity) continue;
      const auto is_worse = [&](int32_t at) {
        return scratch_[at] < score || (scratch_[at] == score && candidates_[at].id > id);
      };
      if (found == count && !is_worse(count - 1)) continue;
      int32_t at = found < count ? found++ : count - 1;
      for (; at > 0 && is_worse(at - 1); --at) {
        scratch_[at] = scratch_[at - 1];
        candidates_[at] = candidates_[at - 1];
      }
      scratch_[at] = score;
      candidates_[at] = {0.0f, id};
    }
  }
  for (int32_t i = 0; i < found; ++i) {
    tokens[i] = candidates_[i].id;
    logprobs[i] = log_weight(law, logit_at(row, candidates_[i].id)) - law.log_mass;
  }
  fill(tokens, logprobs, found, count);
}

void CpuRows::fill(int64_t* tokens, float* logprobs, int32_t begin, int32_t end) {
  for (int32_t i = begin; i < end; ++i) {
    tokens[i] = -1;
    logprobs[i] = -kInfinity;
  }
}

void CpuRows::concentrate(float* logprobs, int32_t count, bool everywhere) {
  for (int32_t i = 0; i < count; ++i) logprobs[i] = i == 0 || everywhere ? 0.0f : -kInfinity;
}

}  // namespace pass_ext
