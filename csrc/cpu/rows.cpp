// Rows of logits on the CPU, see rows.h: slices and threads, filters, races. The inner loops: cpu/rows_kernels-inl.h.
#include "cpu/rows.h"

#include <algorithm>
#include <cmath>

#include "cpu/workers.h"

#define PASS_EXT_KERNELS "cpu/rows_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

constexpr int32_t kSliceGroups = kSliceColumns / kGroup;  // 8,192 tokens: the least that a task reads
constexpr int64_t kFewCandidates = 512;                   // sorted at once; more are first divided into bins
constexpr int32_t kBins = 2048;
constexpr int32_t kPadding = 16;  // no vector is longer

// The order of filters: larger logits first, lower ids first among equals.
bool comes_before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

void cut_behind(Distribution& distribution, const Candidate& last) {
  distribution.cut = last.logit;
  distribution.tie = last.id;
}

// Cuts behind the candidate at which the mass reaches `needed`. `before` is the mass in front of all candidates.
// Returns the mass that is kept.
uint64_t cut_at_mass(Distribution& distribution, Candidate* begin, Candidate* end, uint64_t before, uint64_t needed) {
  std::sort(begin, end, comes_before);
  for (const Candidate* candidate = begin; candidate != end; ++candidate) {
    before += integer_mass(exponential(log_weight(distribution, candidate->logit)));
    cut_behind(distribution, *candidate);
    if (before >= needed) break;
  }
  return before;
}

}  // namespace

CpuRows& thread_rows(bool parallel) {
  thread_local CpuRows rows;
  return rows.begin(parallel);
}

// function(slice, first group, last group)
template <typename Function>
void CpuRows::for_each_slice(int32_t groups, Function&& function) const {
  const int32_t slices = (groups + kSliceGroups - 1) / kSliceGroups;
  const auto run = [&](int64_t slice) {
    const int32_t first = static_cast<int32_t>(slice) * kSliceGroups;
    function(static_cast<int32_t>(slice), first, std::min(first + kSliceGroups, groups));
  };
  if (parallel_)
    for_each_piece(slices, run);
  else
    for (int64_t slice = 0; slice < slices; ++slice) run(slice);
}

CpuRows::Maxima& CpuRows::maxima_of(const LogitRow& row) {
  for (Maxima& recent : recent_)
    if (recent.row.logits != nullptr && recent.row.slot == row.slot) return recent;
  Maxima& maxima = recent_[next_recent_];
  next_recent_ ^= 1;
  const int32_t groups = groups_of(row.vocabulary);
  maxima.row = row;
  maxima.values.resize(groups + kPadding);
  std::fill(maxima.values.begin() + groups, maxima.values.end(), -kInfinity);
  partial_.assign(groups / kSliceGroups + 1, 1.0);
  for_each_slice(groups, [&](int32_t slice, int32_t begin, int32_t end) {
    bool good = true;
    PASS_EXT_AT_ISA(scan_groups(row, begin, end, maxima.values.data(), &good));
    if (!good) partial_[slice] = 0.0;
  });
  maxima.good = std::find(partial_.begin(), partial_.end(), 0.0) == partial_.end();
  return maxima;
}

// The sum over slices of function(first group, last group), added in order.
template <typename Function>
double CpuRows::sum_slices(int32_t groups, Function&& function) {
  partial_.assign(groups / kSliceGroups + 1, 0.0);
  for_each_slice(groups, [&](int32_t slice, int32_t begin, int32_t end) { partial_[slice] = function(begin, end); });
  double sum = 0.0;
  for (double part : partial_) sum += part;
  return sum;
}

double CpuRows::mass_of(const LogitRow& row, const float* maxima, const Distribution& distribution) {
  return sum_slices(groups_of(row.vocabulary), [&](int32_t begin, int32_t end) {
    double mass;
    PASS_EXT_AT_ISA(sum_mass(row, distribution, maxima, begin, end, &mass));
    return mass;
  });
}

double CpuRows::mass_of(const Maxima& maxima, const Distribution& distribution) {
  return mass_of(maxima.row, maxima.values.data(), distribution);
}

double CpuRows::mass(const LogitRow& row, const Distribution& distribution) {
  for (const Maxima& recent : recent_)
    if (recent.row.logits != nullptr && recent.row.slot == row.slot) return mass_of(recent, distribution);
  if (distribution.cut != -kInfinity) return mass_of(maxima_of(row), distribution);
  // Without a cut nearly every group counts: a pass to find the groups' maxima would save less than it costs.
  bounds_.assign(groups_of(row.vocabulary), distribution.maximum);
  return mass_of(row, bounds_.data(), distribution);
}

// The mass of the whole row, and in `above` that of its tokens with a logit of at least `floor`.
double CpuRows::mass_above(const Maxima& maxima, const Distribution& distribution, float floor, double& above) {
  const int32_t groups = groups_of(maxima.row.vocabulary), slices = groups / kSliceGroups + 1;
  partial_.assign(2 * slices, 0.0);
  for_each_slice(groups, [&](int32_t slice, int32_t begin, int32_t end) {
    PASS_EXT_AT_ISA(sum_mass_above(maxima.row, distribution, maxima.values.data(), floor, begin, end, &partial_[slice],
                                   &partial_[slices + slice]));
  });
  double mass = 0.0;
  for (int32_t slice = 0; slice < slices; ++slice) {
    mass += partial_[slice];
    above += partial_[slices + slice];
  }
  return mass;
}

Candidate CpuRows::peak(const LogitRow& row) {
  const Maxima& maxima = maxima_of(row);
  if (!maxima.good) return {float_of(0x7fc00000u), -1};
  int32_t group, place;
  PASS_EXT_AT_ISA(find_largest(maxima.values.data(), static_cast<int32_t>(maxima.values.size()), &group));
  if (group < 0) return {-kInfinity, -1};
  const int32_t first = group * kGroup, last = std::min(first + kGroup, row.vocabulary);
  for (place = first; place < last && logit_at(row, place) != maxima.values[group]; ++place) {
  }
  return {maxima.values[group], place};
}

void CpuRows::slice_masses(const LogitRow& row, const Distribution& distribution, bool everything, double* masses) {
  const Maxima& maxima = maxima_of(row);
  for_each_slice(groups_of(row.vocabulary), [&](int32_t slice, int32_t begin, int32_t end) {
    double above;
    if (everything)
      PASS_EXT_AT_ISA(sum_mass_above(row, distribution, maxima.values.data(), distribution.maximum, begin, end,
                                     masses + slice, &above));
    else
      PASS_EXT_AT_ISA(sum_mass(row, distribution, maxima.values.data(), begin, end, masses + slice));
  });
}

void CpuRows::select_bins(const LogitRow& row, const Distribution& distribution, int32_t start,
                          const SelectRange& range, bool by_mass, uint64_t* bins) {
  const Maxima& maxima = maxima_of(row);
  PASS_EXT_AT_ISA(
      add_select_bins(row, distribution, maxima.values.data(), groups_of(row.vocabulary), start, range, by_mass, bins));
}

Distribution CpuRows::describe(const LogitRow& row, const SamplingParameters& parameters, bool needs_mass) {
  Maxima& maxima = maxima_of(row);
  Distribution distribution{-kInfinity, parameters.scale, -kInfinity, -1, 0.0f, 0.0f, 0};
  int32_t largest;
  PASS_EXT_AT_ISA(find_largest(maxima.values.data(), static_cast<int32_t>(maxima.values.size()), &largest));
  if (largest >= 0) distribution.maximum = maxima.values[largest];
  if (!maxima.good) distribution.status = kBadLogits;
  if (distribution.status == 0 && distribution.maximum == -kInfinity) distribution.status = kEmptySupport;
  if (distribution.status != 0) return distribution;
  double mass = 0.0;  // not known yet
  if (parameters.top_k > 0) cut_top_k(maxima, parameters.top_k, distribution);
  if (parameters.top_p < 1.0f) mass = cut_top_p(maxima, parameters.top_p, distribution);
  if (parameters.min_p > 0.0f && cut_at_floor(distribution, parameters.min_p)) mass = 0.0;
  if (needs_mass) set_mass(distribution, mass > 0.0 ? mass : mass_of(maxima, distribution));
  return distribution;
}

// Puts the tokens of the support with floor <= logit <= ceiling into candidates_ and returns their end. If there are
// `limit` or more, some may be missing.
Candidate* CpuRows::gather(const Maxima& maxima, const Distribution& distribution, float floor, float ceiling,
                           int64_t limit) {
  const size_t room = static_cast<size_t>(maxima.row.vocabulary);
  if (candidates_.size() < room) candidates_.resize(room);
  int64_t count = 0;
  PASS_EXT_AT_ISA(collect(maxima.row, distribution, maxima.values.data(), 0, groups_of(maxima.row.vocabulary), floor,
                          ceiling, limit, candidates_.data(), &count));
  return candidates_.data() + count;
}

// The number of groups that have a logit of at least `threshold`.
int32_t CpuRows::count_groups(const Maxima& maxima, float threshold) const {
  int32_t count;
  PASS_EXT_AT_ISA(count_at_least(maxima.values.data(), groups_of(maxima.row.vocabulary), threshold, &count));
  return count;
}

void CpuRows::cut_top_k(const Maxima& maxima, int32_t top_k, Distribution& distribution) {
  const int32_t groups = groups_of(maxima.row.vocabulary);
  // If k groups have a largest logit of at least some floor, no token below it is among the top k. A floor that few
  // more groups reach is good enough.
  float floor = -kInfinity;
  if (top_k <= groups) {
    float low = -kInfinity, high = distribution.maximum;
    for (float step = 4.0f; low == -kInfinity && step < 1e6f; step *= 2.0f) {
      const float tried = distribution.maximum - step;
      (count_groups(maxima, tried) >= top_k ? low : high) = tried;
    }
    for (int halving = 0; halving < 24 && low > -kInfinity; ++halving) {
      const float middle = low + 0.5f * (high - low);
      const int32_t count = count_groups(maxima, middle);
      (count >= top_k ? low : high) = middle;
      if (count >= top_k && count <= top_k + top_k / 4 + 4) break;
    }
    floor = low;
  }
  Candidate* const end = gather(maxima, distribution, floor, distribution.maximum, maxima.row.vocabulary);
  Candidate* const begin = candidates_.data();
  if (end - begin < top_k) return;
  std::nth_element(begin, begin + top_k - 1, end, comes_before);
  cut_behind(distribution, begin[top_k - 1]);
}

// Returns the mass that is kept.
double CpuRows::cut_top_p(const Maxima& maxima, float top_p, Distribution& distribution) {
  const int32_t vocabulary = maxima.row.vocabulary, groups = groups_of(vocabulary);
  // A floor below which the cut cannot lie: tokens so improbable that a whole vocabulary of them weighs less than what
  // top-p leaves out. Or a guess, if the tokens above it prove to weigh enough.
  float guess = distribution.maximum;
  double mass, above = 0.0;
  if (distribution.cut == -kInfinity) {
    PASS_EXT_AT_ISA(guess_floor(maxima.row, distribution, groups, 0.5f + 0.5f * top_p, &guess));
    mass = mass_above(maxima, distribution, guess, above);
  } else {
    mass = mass_of(maxima, distribution);
  }
  const uint64_t needed = mass_to_reach(top_p, mass);
  const float spare = static_cast<float>((1.0 - static_cast<double>(top_p)) * mass / vocabulary * 0.99);
  float floor =
      std::min(distribution.maximum + logarithm(maximum(spare, 0x1p-60f)) / distribution.scale, distribution.maximum);
  if (above > mass * (top_p + 1e-4) && guess > floor) floor = guess;
  Candidate* end = gather(maxima, distribution, floor, distribution.maximum, kFewCandidates);
  Candidate* const begin = candidates_.data();
  if (end - begin < kFewCandidates)
    return static_cast<double>(cut_at_mass(distribution, begin, end, 0, needed)) / kMassUnit;
  const float per_bin = kBins / std::max(distribution.maximum - floor, 1e-30f);
  const int32_t slices = groups / kSliceGroups + 1;
  bins_.assign(parallel_ ? slices * kBins : kBins, 0);
  for_each_slice(groups, [&](int32_t slice, int32_t begin, int32_t end) {
    uint64_t* slice_bins = bins_.data() + (parallel_ ? slice * kBins : 0);
    PASS_EXT_AT_ISA(
        fill_bins(maxima.row, distribution, maxima.values.data(), begin, end, floor, per_bin, kBins, slice_bins));
  });
  for (size_t i = kBins; i < bins_.size(); ++i) bins_[i % kBins] += bins_[i];
  uint64_t before = 0;
  int32_t bin = 0, last = kBins - 1;
  while (last > 0 && bins_[last] == 0) --last;
  while (bin < last && before + bins_[bin] < needed) before += bins_[bin++];
  // The bin's tokens, with a margin for the rounding of its edges: those that belong to a bin in front are dropped.
  const auto bin_of = [&](float logit) {
    return static_cast<int32_t>(std::min((distribution.maximum - logit) * per_bin, static_cast<float>(kBins - 1)));
  };
  end = gather(maxima, distribution, std::max(floor, distribution.maximum - (bin + 1.5f) / per_bin),
               distribution.maximum - (bin - 0.5f) / per_bin, vocabulary);
  end = std::remove_if(begin, end, [&](const Candidate& candidate) { return bin_of(candidate.logit) != bin; });
  return static_cast<double>(cut_at_mass(distribution, begin, end, before, needed)) / kMassUnit;
}

int32_t CpuRows::support(const LogitRow& row, const Distribution& distribution, int32_t room, int32_t* ids) {
  const Candidate* const end = gather(maxima_of(row), distribution, -kInfinity, kInfinity, row.vocabulary);
  const Candidate* const begin = candidates_.data();
  const int32_t count = static_cast<int32_t>(end - begin);
  for (int32_t i = 0; i < count && count <= room; ++i) ids[i] = begin[i].id;
  return count;
}

double CpuRows::entropy(const Judge& judge) {
  const Maxima& maxima = maxima_of(judge.p_row);
  const double mass = mass_of(maxima, judge.p);
  const double log_moment = sum_slices(groups_of(judge.p_row.vocabulary), [&](int32_t begin, int32_t end) {
    double moment;
    PASS_EXT_AT_ISA(sum_log_moment(judge.p_row, judge.p, maxima.values.data(), begin, end, &moment));
    return moment;
  });
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

void CpuRows::slice_residual_sums(const Judge& judge, const Removed& removed, double* sums) {
  for_each_slice(groups_of(judge.p_row.vocabulary), [&](int32_t slice, int32_t begin, int32_t end) {
    PASS_EXT_AT_ISA(sum_residual(judge, removed, begin, end, sums + 2 * slice, sums + 2 * slice + 1));
  });
}

int32_t CpuRows::invert(const Judge& judge, uint64_t uniform) {
  const LogitRow& row = judge.p_row;
  const Maxima& maxima = maxima_of(row);
  const int32_t groups = groups_of(row.vocabulary);
  const auto mass_of_groups = [&](int32_t begin, int32_t end) {
    uint64_t mass;
    PASS_EXT_AT_ISA(sum_integer_mass(row, judge.p, maxima.values.data(), begin, end, &mass));
    return mass;
  };
  masses_.assign(groups / kSliceGroups + 1, 0);
  for_each_slice(groups,
                 [&](int32_t slice, int32_t begin, int32_t end) { masses_[slice] = mass_of_groups(begin, end); });
  uint64_t place = 0;
  for (uint64_t mass : masses_) place += mass;
  place = high_product(uniform, place);
  int32_t slice = 0;
  for (; place >= masses_[slice]; ++slice) place -= masses_[slice];
  int32_t group = slice * kSliceGroups;
  for (uint64_t mass; place >= (mass = mass_of_groups(group, group + 1)); ++group) place -= mass;
  int32_t id = group * kGroup;
  for (uint64_t mass; place >= (mass = token_mass(judge.p, logit_at(row, id), id)); ++id) place -= mass;
  return id;
}

ResidualSums CpuRows::residual_sums(const Judge& judge, const AcceptRequest& request) {
  const Removed removed = removed_of(judge, request);
  const int32_t slices = groups_of(judge.p_row.vocabulary) / kSliceGroups + 1;
  partial_.assign(2 * slices, 0.0);
  slice_residual_sums(judge, removed, partial_.data());
  ResidualSums sums{0.0, 0.0};
  for (int32_t slice = 0; slice < slices; ++slice) {
    sums.weight += partial_[2 * slice];
    sums.remaining += partial_[2 * slice + 1];
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

// Visits every group that may hold one of the `count` best of a race, given bounds_. visit(group) returns the score to
// reach from then on, -inf while fewer than `count` are known. The most promising groups come first, then the others in
// turn.
template <typename Visit>
void CpuRows::visit_groups(int32_t groups, int32_t count, const Visit& visit) {
  float threshold = -kInfinity;
  int32_t group;
  for (int32_t pick = 0; threshold == -kInfinity || pick < 3 + 2 * count; ++pick) {
    PASS_EXT_AT_ISA(find_largest(bounds_.data(), groups, &group));
    if (group < 0 || bounds_[group] < threshold) return;
    bounds_[group] = -kInfinity;
    threshold = visit(group);
  }
  for (int32_t from = 0;; from = group + 1) {
    PASS_EXT_AT_ISA(find_at_least(bounds_.data(), from, groups, threshold, &group));
    if (group < 0) return;
    threshold = visit(group);
  }
}

int32_t CpuRows::draw(const Judge& judge, const Weight& weight, const AcceptRequest& request, bool rejected,
                      const Noise& noise) {
  const Removed removed = rejected ? removed_of(judge, request) : Removed{nullptr, nullptr, 0};
  return race(judge, weight, removed, noise).id;
}

Candidate CpuRows::race(const Judge& judge, const Weight& weight, const Removed& removed, const Noise& noise) {
  const Maxima& maxima = maxima_of(judge.p_row);
  const int32_t groups = groups_of(judge.p_row.vocabulary);
  const bool is_plain = weight.kind == Weight::plain;
  bounds_.resize(groups + kPadding);
  PASS_EXT_AT_ISA(
      bound_groups(judge.p, maxima.values.data(), groups, &noise, is_plain ? 0.0f : -judge.p.log_mass, bounds_.data()));
  float best_score = -kInfinity;
  int32_t best_id = -1;
  visit_groups(groups, 1, [&](int32_t group) {
    float scores[kGroup];
    if (is_plain) {
      PASS_EXT_AT_ISA(score_group(judge.p_row, judge.p, &noise, group, best_score, scores));
      for (int32_t k = 0; k < removed.count; ++k)
        if (removed.ids[k] / kGroup == group) scores[removed.ids[k] % kGroup] = -kInfinity;
    } else {
      PASS_EXT_AT_ISA(score_group_left(judge, weight, removed, noise, group, scores));
    }
    int32_t i;
    PASS_EXT_AT_ISA(find_largest(scores, kGroup, &i));
    const int32_t id = group * kGroup + i;
    if (i >= 0 && (scores[i] > best_score || (scores[i] == best_score && id < best_id))) {
      best_score = scores[i];
      best_id = id;
    }
    return best_score;
  });
  return {best_score, best_id};
}

int32_t CpuRows::rank(const LogitRow& row, const Distribution& distribution, const Noise* noise, int32_t count) {
  const Maxima& maxima = maxima_of(row);
  const int32_t groups = groups_of(row.vocabulary);
  bounds_.resize(groups + kPadding);
  PASS_EXT_AT_ISA(bound_groups(distribution, maxima.values.data(), groups, noise, 0.0f, bounds_.data()));
  if (candidates_.size() < static_cast<size_t>(count))
    candidates_.resize(count);  // the best so far, in order; `logit` holds the score
  int32_t filled = 0;
  visit_groups(groups, count, [&](int32_t group) {
    float scores[kGroup], threshold = filled < count ? -kInfinity : candidates_[count - 1].logit;
    PASS_EXT_AT_ISA(score_group(row, distribution, noise, group, threshold, scores));
    int32_t i = -1;
    for (;;) {
      if (threshold == -kInfinity)
        while (++i < kGroup && scores[i] == -kInfinity) {
        }
      else
        PASS_EXT_AT_ISA(find_at_least(scores, i + 1, kGroup, threshold, &i));
      if (i < 0 || i >= kGroup) return threshold;
      const Candidate candidate{scores[i], group * kGroup + i};
      if (filled == count && !comes_before(candidate, candidates_[count - 1])) continue;
      int32_t at = filled < count ? filled++ : count - 1;
      for (; at > 0 && comes_before(candidate, candidates_[at - 1]); --at) candidates_[at] = candidates_[at - 1];
      candidates_[at] = candidate;
      if (filled == count) threshold = candidates_[count - 1].logit;
    }
  });
  return filled;
}

void CpuRows::best(const LogitRow& row, const Distribution& distribution, const Noise* noise, int32_t count,
                   int64_t* tokens, float* logprobs) {
  const int32_t filled = rank(row, distribution, noise, count);
  for (int32_t i = 0; i < filled; ++i) {
    tokens[i] = candidates_[i].id;
    logprobs[i] = log_weight(distribution, logit_at(row, candidates_[i].id)) - distribution.log_mass;
  }
  fill(tokens, logprobs, filled, count);
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
