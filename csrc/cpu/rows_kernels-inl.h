// Sweeps over one or two rows of logits at one instruction set (see each_isa.h), in units of groups of 64 tokens, and
// the noise of a group. The order of additions depends on nothing but the slice.

constexpr int kVectors = kGroup / Floats::width;
constexpr float kNegligible = -40.0f;  // e^-40 of the largest, 2^22 times, is below the last bit of a sum

inline Floats splat(float value) { return constant(Floats{}, value); }

template <typename T>
inline void widen(float* to, const T* from, int32_t count) {
  if (count == kGroup)
    for (int i = 0; i < kGroup; i += Floats::width) store(to + i, load(from + i));
  else
    for (int i = 0; i < kGroup; ++i) to[i] = i < count ? to_float(from[i]) : -kInfinity;
}

// Loads the group's 64 logits; -inf for tokens that are not allowed or lie behind the end of the vocabulary.
inline void load_group(const LogitRow& row, int32_t group, float* to) {
  const int64_t first = static_cast<int64_t>(group) * kGroup;
  const int32_t count = row.vocabulary - first < kGroup ? static_cast<int32_t>(row.vocabulary - first) : kGroup;
  if (row.type == LogitType::bfloat16)
    widen(to, static_cast<const bfloat16*>(row.logits) + first, count);
  else if (row.type == LogitType::float16)
    widen(to, static_cast<const float16*>(row.logits) + first, count);
  else
    widen(to, static_cast<const float*>(row.logits) + first, count);
  if (row.allowed == nullptr) return;
  for (int i = 0; i < kGroup && i < count; i += Floats::width) {
    const uint32_t bits = row.allowed[(first + i) / 32] >> (first + i) % 32;
    store(to + i, select(mask_of_bits(bits), load(to + i), splat(-kInfinity)));
  }
}

template <typename T>
inline bool scan_whole_groups(const T* logits, int32_t begin, int32_t end, float* maxima) {
  const Floats infinity = splat(kInfinity);
  Mask fine = mask_of_bits(0xffffu);
  for (int32_t group = begin; group < end; ++group) {
    const T* from = logits + static_cast<int64_t>(group) * kGroup;
    Floats largest = load(from);
    fine = fine & less(largest, infinity);
    for (int i = 1; i < kVectors; ++i) {
      const Floats z = load(from + i * Floats::width);
      fine = fine & less(z, infinity);
      largest = maximum(largest, z);
    }
    maxima[group] = largest_lane(largest);
  }
  return bits_of_mask(fine) == bits_of_mask(mask_of_bits(0xffffu));
}

// The lanes of z, ids from `first` on, that are in the distribution's support.
inline Mask support_of(const Distribution& distribution, Floats z, int32_t first) {
  const Floats cut = splat(distribution.cut);
  const Mask above = less(cut, z);
  const uint32_t bits = bits_of_mask(above), below = bits_of_mask(less(z, cut));
  uint32_t ties = bits_of_mask(mask_of_bits(0xffffu)) & ~(bits | below);
  if (ties == 0) return above;
  for (int i = 0; i < Floats::width; ++i)
    if (first + i > distribution.tie) ties &= ~(1u << i);
  return mask_of_bits(bits | ties);
}

inline Floats weights_in_support(const Distribution& distribution, Floats z, int32_t first) {
  const Floats weight = exponential((z - splat(distribution.maximum)) * splat(distribution.scale));
  return select(support_of(distribution, z, first), weight, splat(0.0f));
}

inline bool is_negligible(const Distribution& distribution, float group_maximum) {
  return group_maximum < distribution.cut || !(log_weight(distribution, group_maximum) > kNegligible);
}

// function(logits, first group, last group) for the part of [begin, end) that lies in memory as whole unmasked groups
// of a typed row, and per_group(group) for the others.
template <typename Whole, typename Single>
inline void split_groups(const LogitRow& row, int32_t begin, int32_t end, const Whole& on_whole, const Single& on_one) {
  const int32_t whole = row.allowed == nullptr ? row.vocabulary / kGroup : 0;
  const int32_t direct = whole < begin ? begin : whole < end ? whole : end;
  if (row.type == LogitType::bfloat16)
    on_whole(static_cast<const bfloat16*>(row.logits), begin, direct);
  else if (row.type == LogitType::float16)
    on_whole(static_cast<const float16*>(row.logits), begin, direct);
  else
    on_whole(static_cast<const float*>(row.logits), begin, direct);
  for (int32_t group = direct; group < end; ++group) on_one(group);
}

// The largest logit of each group. good: no logit is NaN or +inf.
void scan_groups(const LogitRow& row, int32_t begin, int32_t end, float* maxima, bool* good) {
  *good = true;
  split_groups(
      row, begin, end,
      [&](const auto* logits, int32_t first, int32_t last) { *good = scan_whole_groups(logits, first, last, maxima); },
      [&](int32_t group) {
        float z[kGroup];
        load_group(row, group, z);
        *good = scan_whole_groups(z, 0, 1, maxima + group) && *good;
      });
}

// Adds one group to sums over the whole vocabulary. A logit of -inf counts e^-86, too little to change a sum.
template <typename T>
inline void add_mass(const T* z, const Distribution& distribution, Floats (&sum)[2]) {
  const Floats largest = splat(distribution.maximum), scale = splat(distribution.scale), lowest = splat(-86.0f);
  for (int i = 0; i < kVectors; i += 2) {
    sum[0] = sum[0] + exponential_in_range(maximum((load(z + i * Floats::width) - largest) * scale, lowest));
    sum[1] = sum[1] + exponential_in_range(maximum((load(z + (i + 1) * Floats::width) - largest) * scale, lowest));
  }
}

// Sum over the support of exp((z - maximum) scale).
void sum_mass(const LogitRow& row, const Distribution& distribution, const float* maxima, int32_t begin, int32_t end,
              double* mass) {
  Floats sum[2] = {splat(0.0f), splat(0.0f)};
  const bool everything = distribution.cut == -kInfinity;
  const auto add_one = [&](int32_t group) {
    if (is_negligible(distribution, maxima[group])) return;
    float z[kGroup];
    load_group(row, group, z);
    if (everything) return add_mass(z, distribution, sum);
    for (int i = 0; i < kGroup; i += Floats::width)
      sum[0] = sum[0] + weights_in_support(distribution, load(z + i), group * kGroup + i);
  };
  const auto add_whole = [&](const auto* logits, int32_t first, int32_t last) {
    for (int32_t group = first; group < last; ++group) {
      if (!everything)
        add_one(group);
      else if (!is_negligible(distribution, maxima[group]))
        add_mass(logits + static_cast<int64_t>(group) * kGroup, distribution, sum);
    }
  };
  split_groups(row, begin, end, add_whole, add_one);
  *mass = sum_lanes(sum[0] + sum[1]);
}

// The same without a cut, and a second sum over the tokens with a logit of at least `floor`.
void sum_mass_above(const LogitRow& row, const Distribution& distribution, const float* maxima, float floor,
                    int32_t begin, int32_t end, double* mass, double* above) {
  const Floats largest = splat(distribution.maximum), scale = splat(distribution.scale), lowest = splat(-86.0f),
               zero = splat(0.0f);
  Floats sum = zero, high = zero;
  const auto add = [&](const auto* z) {
    for (int i = 0; i < kGroup; i += Floats::width) {
      const Floats value = load(z + i);
      const Floats weight = exponential_in_range(maximum((value - largest) * scale, lowest));
      sum = sum + weight;
      high = high + select(less(value, splat(floor)), zero, weight);
    }
  };
  split_groups(
      row, begin, end,
      [&](const auto* logits, int32_t first, int32_t last) {
        for (int32_t group = first; group < last; ++group)
          if (!is_negligible(distribution, maxima[group])) add(logits + static_cast<int64_t>(group) * kGroup);
      },
      [&](int32_t group) {
        if (is_negligible(distribution, maxima[group])) return;
        float z[kGroup];
        load_group(row, group, z);
        add(z);
      });
  *mass = sum_lanes(sum);
  *above = sum_lanes(high);
}

// A logit above which about `share` of the mass lies, estimated from a sample of the groups.
void guess_floor(const LogitRow& row, const Distribution& distribution, int32_t groups, float share, float* floor) {
  constexpr int32_t kSample = 16;
  float z[kSample * kGroup], weight[kSample * kGroup];
  const int32_t step = groups / kSample > 0 ? groups / kSample : 1, count = groups < kSample ? groups : kSample;
  Floats total = splat(0.0f);
  float low = distribution.maximum, high = distribution.maximum;
  for (int32_t k = 0; k < count; ++k) {
    load_group(row, k * step, z + k * kGroup);
    for (int i = k * kGroup; i < (k + 1) * kGroup; i += Floats::width) {
      store(weight + i, weights_in_support(distribution, load(z + i), (k * step) * kGroup + i - k * kGroup));
      total = total + load(weight + i);
    }
  }
  const float needed = sum_lanes(total) * share;
  low = distribution.maximum - 30.0f / distribution.scale;
  for (int halving = 0; halving < 10; ++halving) {  // 30 nats to 0.03
    const float middle = 0.5f * (low + high);
    Floats sum = splat(0.0f);
    for (int32_t i = 0; i < count * kGroup; i += Floats::width)
      sum = sum + select(less(load(z + i), splat(middle)), splat(0.0f), load(weight + i));
    (sum_lanes(sum) >= needed ? low : high) = middle;
  }
  *floor = low;
}

// Counts the values of at least `threshold`.
void count_at_least(const float* values, int32_t count, float threshold, int32_t* result) {
  int32_t total = 0, i = 0;
  for (; i + Floats::width <= count; i += Floats::width)
    total += Floats::width - __builtin_popcount(bits_of_mask(less(load(values + i), splat(threshold))));
  for (; i < count; ++i) total += values[i] >= threshold;
  *result = total;
}

// Sum over the support of w (z - maximum) scale, w = exp((z - maximum) scale).
void sum_log_moment(const LogitRow& row, const Distribution& distribution, const float* maxima, int32_t begin,
                    int32_t end, double* log_moment) {
  Floats moment = splat(0.0f);
  for (int32_t group = begin; group < end; ++group) {
    if (is_negligible(distribution, maxima[group])) continue;
    float z[kGroup];
    load_group(row, group, z);
    for (int i = 0; i < kGroup; i += Floats::width) {
      const Floats weight = weights_in_support(distribution, load(z + i), group * kGroup + i);
      const Floats exponent =
          maximum((load(z + i) - splat(distribution.maximum)) * splat(distribution.scale), splat(-100.0f));
      moment = fused(weight, exponent, moment);
    }
  }
  *log_moment = sum_lanes(moment);
}

// Adds the integer mass (core/distribution.h) of each of `count` logits to its bin. `z` needs room for a vector behind
// them.
inline void add_to_bins(float* z, int32_t count, const Distribution& distribution, float per_bin, int32_t bins,
                        uint64_t* masses) {
  const Floats last = splat(static_cast<float>(bins - 1));
  float weight[Floats::width];
  uint32_t bin[Words::width];
  store(z + count, splat(distribution.maximum));
  for (int32_t i = 0; i < count; i += Floats::width) {
    const Floats distance = splat(distribution.maximum) - load(z + i);
    store(weight,
          exponential((load(z + i) - splat(distribution.maximum)) * splat(distribution.scale)) * splat(kMassUnit));
    store_words(bin, truncated(minimum(distance * splat(per_bin), last)));
    const int32_t lanes = count - i < Floats::width ? count - i : Floats::width;
    for (int32_t lane = 0; lane < lanes; ++lane) masses[bin[lane]] += static_cast<uint64_t>(weight[lane]);
  }
}

// Sum of the tokens' integer masses (core/inverse.h).
void sum_integer_mass(const LogitRow& row, const Distribution& distribution, const float* maxima, int32_t begin,
                      int32_t end, uint64_t* mass) {
  uint64_t sum = 0;
  float z[kGroup], weight[kGroup];
  for (int32_t group = begin; group < end; ++group) {
    if (maxima[group] < distribution.cut || log_weight(distribution, maxima[group]) < kWeightless) continue;
    load_group(row, group, z);
    for (int i = 0; i < kGroup; i += Floats::width)
      store(weight + i, weights_in_support(distribution, load(z + i), group * kGroup + i) * splat(kMassUnit));
    for (int i = 0; i < kGroup; ++i) sum += static_cast<uint64_t>(weight[i]);
  }
  *mass = sum;
}

// Adds every token in the support with a logit of at least `floor` to its bin. Bin 0 holds the largest; `per_bin` is
// one over a bin's width.
void fill_bins(const LogitRow& row, const Distribution& distribution, const float* maxima, int32_t begin, int32_t end,
               float floor, float per_bin, int32_t bins, uint64_t* masses) {
  constexpr int32_t kRoom = 1024;
  float selected[kRoom + kGroup + Floats::width];
  int32_t count = 0;
  const Mask all = mask_of_bits(0xffffu);
  for (int32_t group = begin; group < end; ++group) {
    if (maxima[group] < floor || maxima[group] < distribution.cut) continue;
    float z[kGroup];
    load_group(row, group, z);
    for (int i = 0; i < kGroup; i += Floats::width) {
      const Floats value = load(z + i);
      const uint32_t high = ~bits_of_mask(less(value, splat(floor))) & bits_of_mask(all);
      if (high == 0) continue;
      const Mask chosen = support_of(distribution, value, group * kGroup + i) & mask_of_bits(high);
      count += store_selected(selected + count, value, chosen);
    }
    if (count < kRoom) continue;
    add_to_bins(selected, count, distribution, per_bin, bins, masses);
    count = 0;
  }
  add_to_bins(selected, count, distribution, per_bin, bins, masses);
}

// Appends (z, id) of every token in the support with floor <= z <= ceiling; stops soon after `limit` of them.
void collect(const LogitRow& row, const Distribution& distribution, const float* maxima, int32_t begin, int32_t end,
             float floor, float ceiling, int64_t limit, Candidate* to, int64_t* count) {
  int64_t filled = *count;
  for (int32_t group = begin; group < end && filled < limit; ++group) {
    if (maxima[group] < floor || maxima[group] < distribution.cut) continue;
    float z[kGroup];
    load_group(row, group, z);
    for (int i = 0; i < kGroup; i += Floats::width) {
      const Floats value = load(z + i);
      uint32_t bits = ~(bits_of_mask(less(value, splat(floor))) | bits_of_mask(less(splat(ceiling), value)));
      bits &= bits_of_mask(mask_of_bits(0xffffu));
      if (bits != 0) bits &= bits_of_mask(support_of(distribution, value, group * kGroup + i));
      for (; bits != 0; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        to[filled++] = {z[i + lane], group * kGroup + i + lane};
      }
    }
  }
  *count = filled;
}

// Adds 1, or its integer mass, to the bin of every token with a key in the range. The row's first id is `start`.
void add_select_bins(const LogitRow& row, const Distribution& distribution, const float* maxima, int32_t groups,
                     int32_t start, const SelectRange& range, bool by_mass, uint64_t* bins) {
  const float floor = logit_of_select_key(range.low);
  const int shift = range.shift();
  for (int32_t group = 0; group < groups; ++group) {
    if (maxima[group] < floor) continue;
    float z[kGroup];
    load_group(row, group, z);
    for (int i = 0; i < kGroup; ++i) {
      if (!(z[i] >= floor)) continue;
      const uint64_t key = select_key(z[i], start + group * kGroup + i);
      if (key < range.low || key > range.high) continue;
      bins[(range.high - key) >> shift] +=
          by_mass ? integer_mass(exponential(log_weight(distribution, z[i]))) : uint64_t{1};
    }
  }
}

// p and q of one group. Without q: zeros.
inline void load_probabilities(const LogitRow& row, const Distribution& distribution, int32_t group, float* to) {
  float z[kGroup];
  load_group(row, group, z);
  for (int i = 0; i < kGroup; i += Floats::width)
    store(to + i, weights_in_support(distribution, load(z + i), group * kGroup + i) * splat(distribution.inverse_mass));
}

// The same for sums: if nothing is filtered, a token of probability 0 counts e^-86 of the largest.
inline void load_terms(const LogitRow& row, const Distribution& distribution, int32_t group, float* to) {
  if (distribution.cut != -kInfinity) return load_probabilities(row, distribution, group, to);
  load_group(row, group, to);
  const Floats largest = splat(distribution.maximum), scale = splat(distribution.scale), lowest = splat(-86.0f);
  for (int i = 0; i < kGroup; i += Floats::width)
    store(to + i,
          exponential_in_range(maximum((load(to + i) - largest) * scale, lowest)) * splat(distribution.inverse_mass));
}

inline bool touches(const Removed& removed, int32_t group) {
  for (int32_t i = 0; i < removed.count; ++i)
    if (removed.ids[i] / kGroup == group) return true;
  return false;
}

// Sum of (p - beta q)+, and of q over the tokens that are not removed. Removed tokens count with the beta of their cut.
void sum_residual(const Judge& judge, const Removed& removed, int32_t begin, int32_t end, double* weight_sum,
                  double* remaining) {
  const float beta = static_cast<float>(judge.beta);
  Floats weights = splat(0.0f), rest = splat(0.0f);
  for (int32_t group = begin; group < end; ++group) {
    float p[kGroup], q[kGroup];
    load_terms(judge.p_row, judge.p, group, p);
    load_terms(judge.q_row, judge.q, group, q);
    if (touches(removed, group)) {
      float weight[kGroup];
      for (int i = 0; i < kGroup; ++i) weight[i] = residual_weight(p[i], q[i], beta);
      for (int32_t k = 0; k < removed.count; ++k) {
        const int32_t i = removed.ids[k] - group * kGroup;
        if (i < 0 || i >= kGroup) continue;
        weight[i] = removed.cuts[k] == kInfinity ? 0.0f : residual_weight(p[i], q[i], removed.cuts[k]);
        q[i] = 0.0f;
      }
      for (int i = 0; i < kGroup; i += Floats::width) {
        weights = weights + load(weight + i);
        rest = rest + load(q + i);
      }
    } else {
      for (int i = 0; i < kGroup; i += Floats::width) {
        weights = weights + residual_weight(load(p + i), load(q + i), beta);
        rest = rest + load(q + i);
      }
    }
  }
  *weight_sum = sum_lanes(weights);
  *remaining = sum_lanes(rest);
}

// Sum of min(p / rho, q) for each of the rho.
void sum_overlaps(const Judge& judge, const float* inverse_rho, int32_t begin, int32_t end, double* sums) {
  Floats sum[kOverlaps];
  for (Floats& term : sum) term = splat(0.0f);
  for (int32_t group = begin; group < end; ++group) {
    float p[kGroup], q[kGroup];
    load_terms(judge.p_row, judge.p, group, p);
    load_terms(judge.q_row, judge.q, group, q);
    for (int i = 0; i < kGroup; i += Floats::width)
      for (int k = 0; k < kOverlaps; ++k) sum[k] = sum[k] + kseq_overlap(load(p + i), load(q + i), inverse_rho[k]);
  }
  for (int k = 0; k < kOverlaps; ++k) sums[k] = sum_lanes(sum[k]);
}

// The bound that no token of a group can exceed in a race over `distribution`: (its largest log weight + offset) - ln
// first_g. Without noise ln first_g is 0. The bound is a little high, against rounding. Both arrays are padded to whole
// vectors, the maxima with -inf.
void bound_groups(const Distribution& distribution, const float* maxima, int32_t groups, const Noise* noise,
                  float offset, float* bounds) {
  const Floats cut = splat(distribution.cut), none = splat(-kInfinity);
  const uint32_t all = bits_of_mask(mask_of_bits(0xffffu));
  for (int32_t group = 0; group < groups; group += Floats::width) {
    const Floats z = load(maxima + group);
    const Mask outside = less(z, cut);
    if (bits_of_mask(outside) == all) {
      store(bounds + group, none);
      continue;
    }
    Floats log_e = splat(0.0f);
    if (noise != nullptr) {
      const PhiloxBlock counter = counter_of(*noise, NoiseLevel::group, 0);
      Words word[4] = {counting(static_cast<uint32_t>(group) + counter.word[0]), constant(Words{}, counter.word[1]),
                       constant(Words{}, counter.word[2]), constant(Words{}, counter.word[3])};
      philox_rounds(word, noise->seed);
      log_e = logarithm(exponential_variate(word[0]) * splat(1.0f / kGroup));
    }
    const Floats score = race_score(z, distribution.maximum, distribution.scale, log_e);
    store(bounds + group, select(outside, none, score + splat(offset + 0.001f)));
  }
}

// ln E of the group's tokens.
inline void load_noise(const Noise& noise, int32_t group, float* log_e) {
  const PhiloxBlock drawn = philox4x32(counter_of(noise, NoiseLevel::group, static_cast<uint32_t>(group)), noise.seed);
  const float first = exponential_variate(drawn.word[0]) * (1.0f / kGroup);
  const PhiloxBlock counter = counter_of(noise, NoiseLevel::token, static_cast<uint32_t>(group) * kBlocksPerGroup);
  for (int block = 0; block < kBlocksPerGroup; block += Floats::width) {
    Words word[4] = {counting(static_cast<uint32_t>(block) + counter.word[0]), constant(Words{}, counter.word[1]),
                     constant(Words{}, counter.word[2]), constant(Words{}, counter.word[3])};
    philox_rounds(word, noise.seed);
    for (int i = 0; i < 4; ++i)
      store(log_e + i * kBlocksPerGroup + block, logarithm(splat(first) + exponential_variate(word[i])));
  }
  log_e[drawn.word[1] % kGroup] = logarithm(first);
}

// ln E of one token, with the same bits as in load_noise.
inline float noise_of(const Noise& noise, int32_t group, int32_t place, float first, int32_t leader) {
  if (place == leader) return logarithm(first);
  const uint32_t block = static_cast<uint32_t>(group * kBlocksPerGroup + place % kBlocksPerGroup);
  const PhiloxBlock drawn = philox4x32(counter_of(noise, NoiseLevel::token, block), noise.seed);
  return logarithm(first + exponential_variate(drawn.word[place / kBlocksPerGroup]));
}

// The group's scores in a race over `distribution`, or without noise its log weights; -inf outside the support and for
// tokens that cannot reach `threshold`.
void score_group(const LogitRow& row, const Distribution& distribution, const Noise* noise, int32_t group,
                 float threshold, float* scores) {
  float z[kGroup], log_e[kGroup] = {};
  load_group(row, group, z);
  if (noise != nullptr) {
    const PhiloxBlock drawn =
        philox4x32(counter_of(*noise, NoiseLevel::group, static_cast<uint32_t>(group)), noise->seed);
    const float first = exponential_variate(drawn.word[0]) * (1.0f / kGroup), most = logarithm(first);
    uint64_t reaching = 0;
    for (int i = 0; i < kGroup; i += Floats::width) {
      const Floats bound =
          race_score(load(z + i), distribution.maximum, distribution.scale, splat(most)) + splat(0.001f);
      const uint32_t bits = ~bits_of_mask(less(bound, splat(threshold))) & bits_of_mask(mask_of_bits(0xffffu));
      reaching |= static_cast<uint64_t>(bits) << i;
      store(scores + i, splat(-kInfinity));
    }
    if (__builtin_popcountll(reaching) <= 3) {  // usually one: the group's largest
      for (; reaching != 0; reaching &= reaching - 1) {
        const int32_t i = __builtin_ctzll(reaching), id = group * kGroup + i;
        if (!in_support(distribution, z[i], id)) continue;
        const int32_t leader = static_cast<int32_t>(drawn.word[1] % kGroup);
        scores[i] =
            race_score(z[i], distribution.maximum, distribution.scale, noise_of(*noise, group, i, first, leader));
      }
      return;
    }
    load_noise(*noise, group, log_e);
  }
  for (int i = 0; i < kGroup; i += Floats::width) {
    const Floats score = race_score(load(z + i), distribution.maximum, distribution.scale, load(log_e + i));
    store(scores + i, select(support_of(distribution, load(z + i), group * kGroup + i), score, splat(-kInfinity)));
  }
}

// The same for a race over the weights left of p; the smallest normal float counts as no weight.
void score_group_left(const Judge& judge, const Weight& weight, const Removed& removed, const Noise& noise,
                      int32_t group, float* scores) {
  float p[kGroup], q[kGroup], left[kGroup], log_e[kGroup];
  load_probabilities(judge.p_row, judge.p, group, p);
  load_probabilities(judge.q_row, judge.q, group, q);
  load_noise(noise, group, log_e);
  for (int i = 0; i < kGroup; i += Floats::width)
    store(left + i, weight.kind == Weight::kseq ? kseq_weight(load(p + i), load(q + i), weight.first, weight.second)
                                                : residual_weight(load(p + i), load(q + i), weight.first));
  for (int32_t k = 0; k < removed.count; ++k) {
    const int32_t i = removed.ids[k] - group * kGroup;
    if (i < 0 || i >= kGroup) continue;
    left[i] = removed.cuts[k] == kInfinity ? 0.0f : residual_weight(p[i], q[i], removed.cuts[k]);
  }
  for (int i = 0; i < kGroup; i += Floats::width) {
    const Floats value = load(left + i), smallest = splat(0x1p-126f);
    const Floats score = logarithm(maximum(value, smallest)) - load(log_e + i);
    store(scores + i, select(less(value, smallest), splat(-kInfinity), score));
  }
}

// The index of the largest value, the first one of equals; -1 where all are -inf.
void find_largest(const float* values, int32_t count, int32_t* index) {
  Floats largest = splat(-kInfinity);
  int32_t i = 0;
  for (; i + Floats::width <= count; i += Floats::width) largest = maximum(largest, load(values + i));
  float best = largest_lane(largest);
  for (; i < count; ++i) best = maximum(best, values[i]);
  *index = -1;
  if (best == -kInfinity) return;
  for (i = 0; i + Floats::width <= count; i += Floats::width) {
    const uint32_t not_less = ~bits_of_mask(less(load(values + i), splat(best))) & bits_of_mask(mask_of_bits(0xffffu));
    if (not_less != 0) {
      *index = i + __builtin_ctz(not_less);
      return;
    }
  }
  for (; i < count; ++i)
    if (values[i] == best) {
      *index = i;
      return;
    }
}

// The first index from `from` on whose value is at least `threshold` (which is finite), or -1.
void find_at_least(const float* values, int32_t from, int32_t count, float threshold, int32_t* index) {
  int32_t i = from;
  for (; i + Floats::width <= count; i += Floats::width) {
    const uint32_t not_less =
        ~bits_of_mask(less(load(values + i), splat(threshold))) & bits_of_mask(mask_of_bits(0xffffu));
    if (not_less == 0) continue;
    *index = i + __builtin_ctz(not_less);
    return;
  }
  for (; i < count; ++i)
    if (values[i] >= threshold) {
      *index = i;
      return;
    }
  *index = -1;
}
