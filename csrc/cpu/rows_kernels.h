// Passes over one or two rows of logits at one instruction set (see each_isa.h), in units of groups of 64 tokens, and
// the noise of a group. Sums are added up in an order that depends on nothing but the slice. Called by cpu/rows.cpp.

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

// The group's 64 logits; -inf for what is not allowed or behind the end of the vocabulary.
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

// The largest logit of each group; good: whether none is NaN or +inf.
void scan_groups(const LogitRow& row, int32_t begin, int32_t end, float* maxima, bool* good) {
  const int32_t whole = row.allowed == nullptr ? row.vocabulary / kGroup : 0;
  const int32_t direct = whole < begin ? begin : whole < end ? whole : end;
  if (row.type == LogitType::bfloat16)
    *good = scan_whole_groups(static_cast<const bfloat16*>(row.logits), begin, direct, maxima);
  else if (row.type == LogitType::float16)
    *good = scan_whole_groups(static_cast<const float16*>(row.logits), begin, direct, maxima);
  else
    *good = scan_whole_groups(static_cast<const float*>(row.logits), begin, direct, maxima);
  for (int32_t group = direct; group < end; ++group) {
    float z[kGroup];
    load_group(row, group, z);
    *good = scan_whole_groups(z - static_cast<int64_t>(group) * kGroup, group, group + 1, maxima) && *good;
  }
}

// Lanes of z, ids from `first` on, that are in the law's support.
inline Mask support_of(const Law& law, Floats z, int32_t first) {
  const Floats cut = splat(law.cut);
  const Mask above = less(cut, z);
  const uint32_t bits = bits_of_mask(above), below = bits_of_mask(less(z, cut));
  uint32_t ties = bits_of_mask(mask_of_bits(0xffffu)) & ~(bits | below);
  if (ties == 0) return above;
  for (int i = 0; i < Floats::width; ++i)
    if (first + i > law.tie) ties &= ~(1u << i);
  return mask_of_bits(bits | ties);
}

inline Floats weights_in_support(const Law& law, Floats z, int32_t first) {
  const Floats weight = exponential((z - splat(law.maximum)) * splat(law.scale));
  return select(support_of(law, z, first), weight, splat(0.0f));
}

inline bool is_negligible(const Law& law, float group_maximum) {
  return group_maximum < law.cut || !(log_weight(law, group_maximum) > kNegligible);
}

// Sum over the support of exp((z - maximum) scale); log_moment: of that times (z - maximum) scale.
void sum_mass(const LogitRow& row, const Law& law, const float* maxima, int32_t begin, int32_t end, double* mass,
              double* log_moment) {
  Floats sum = splat(0.0f), moment = splat(0.0f);
  for (int32_t group = begin; group < end; ++group) {
    if (is_negligible(law, maxima[group])) continue;
    float z[kGroup];
    load_group(row, group, z);
    for (int i = 0; i < kGroup; i += Floats::width) {
      const Floats weight = weights_in_support(law, load(z + i), group * kGroup + i);
      sum = sum + weight;
      if (log_moment != nullptr) {
        const Floats exponent = maximum((load(z + i) - splat(law.maximum)) * splat(law.scale), splat(-100.0f));
        moment = fused(weight, exponent, moment);
      }
    }
  }
  *mass = sum_lanes(sum);
  if (log_moment != nullptr) *log_moment = sum_lanes(moment);
}

// Sum of the integer masses (core/law.h), split as high 2^20 + low so that each half is exact in 32 bits.
void sum_integer_mass(const LogitRow& row, const Law& law, const float* maxima, int32_t begin, int32_t end,
                      uint64_t* mass) {
  const Floats unit = splat(0x1p20f);
  uint64_t total = 0;
  for (int32_t group = begin; group < end; ++group) {
    if (is_negligible(law, maxima[group])) continue;
    float z[kGroup];
    load_group(row, group, z);
    Words high = constant(Words{}, 0u), low = constant(Words{}, 0u);
    for (int i = 0; i < kGroup; i += Floats::width) {
      const Floats scaled = weights_in_support(law, load(z + i), group * kGroup + i) * unit;
      const Words whole = truncated(scaled);
      high = high + whole;
      low = low + truncated((scaled - float_of_signed(whole)) * unit);
    }
    uint32_t highs[Words::width], lows[Words::width];
    store_words(highs, high);
    store_words(lows, low);
    for (int i = 0; i < Words::width; ++i) total += (static_cast<uint64_t>(highs[i]) << 20) + lows[i];
  }
  *mass = total;
}

// Appends (z, id) of every token in the support whose logit is at least `floor`; returns how many there are now.
void collect(const LogitRow& row, const Law& law, const float* maxima, int32_t begin, int32_t end, float floor,
             Candidate* to, int64_t* count) {
  int64_t found = *count;
  for (int32_t group = begin; group < end; ++group) {
    if (maxima[group] < floor || maxima[group] < law.cut) continue;
    float z[kGroup];
    load_group(row, group, z);
    for (int i = 0; i < kGroup; i += Floats::width) {
      const Floats value = load(z + i);
      uint32_t bits = bits_of_mask(support_of(law, value, group * kGroup + i)) & ~bits_of_mask(less(value, splat(floor)));
      for (; bits != 0; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        to[found++] = {z[i + lane], group * kGroup + i + lane};
      }
    }
  }
  *count = found;
}

// p and q of one group. Without q: zeros.
inline void load_probabilities(const LogitRow& row, const Law& law, int32_t group, float* to) {
  float z[kGroup];
  load_group(row, group, z);
  for (int i = 0; i < kGroup; i += Floats::width)
    store(to + i, weights_in_support(law, load(z + i), group * kGroup + i) * splat(law.inverse_mass));
}

inline bool touches(const Removed& removed, int32_t group) {
  for (int32_t i = 0; i < removed.count; ++i)
    if (removed.ids[i] / kGroup == group) return true;
  return false;
}

// Sum of (p - beta q)+, and of q over the tokens that are not removed; removed ones count with the beta of their cut.
void sum_residual(const Judge& judge, const Removed& removed, int32_t begin, int32_t end, double* weight_sum,
                  double* remaining) {
  const float beta = static_cast<float>(judge.beta);
  Floats weights = splat(0.0f), rest = splat(0.0f);
  for (int32_t group = begin; group < end; ++group) {
    float p[kGroup], q[kGroup];
    load_probabilities(judge.p_row, judge.p, group, p);
    load_probabilities(judge.q_row, judge.q, group, q);
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
  for (Floats& one : sum) one = splat(0.0f);
  for (int32_t group = begin; group < end; ++group) {
    float p[kGroup], q[kGroup];
    load_probabilities(judge.p_row, judge.p, group, p);
    load_probabilities(judge.q_row, judge.q, group, q);
    for (int i = 0; i < kGroup; i += Floats::width)
      for (int k = 0; k < kOverlaps; ++k) sum[k] = sum[k] + kseq_overlap(load(p + i), load(q + i), inverse_rho[k]);
  }
  for (int k = 0; k < kOverlaps; ++k) sums[k] = sum_lanes(sum[k]);
}

// What no token of a group can exceed in a race over `law`: (its largest log weight + offset) - ln first_g. Without
// noise ln first_g is 0. A little above, against rounding.
void bound_groups(const Law& law, const float* maxima, int32_t groups, const Noise* noise, float offset,
                  float* bounds) {
  for (int32_t group = 0; group < groups; group += Floats::width) {
    float z[Floats::width], bound[Floats::width];
    for (int i = 0; i < Floats::width; ++i) z[i] = group + i < groups ? maxima[group + i] : -kInfinity;
    Floats log_e = splat(0.0f);
    if (noise != nullptr) {
      const PhiloxBlock counter = counter_of(*noise, NoiseLevel::group, 0);
      Words word[4] = {counting(static_cast<uint32_t>(group) + counter.word[0]), constant(Words{}, counter.word[1]),
                       constant(Words{}, counter.word[2]), constant(Words{}, counter.word[3])};
      philox_rounds(word, noise->seed);
      log_e = logarithm(exponential_variate(word[0]) * splat(1.0f / kGroup));
    }
    const Floats score = race_score(load(z), law.maximum, law.scale, log_e);
    store(bound, select(less(load(z), splat(law.cut)), splat(-kInfinity), score + splat(offset + 0.001f)));
    for (int i = 0; i < Floats::width && group + i < groups; ++i) bounds[group + i] = bound[i];
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

// The group's scores in a race over `law`, without noise the log weights; -inf outside the support.
void score_group(const LogitRow& row, const Law& law, const Noise* noise, int32_t group, float* scores) {
  float z[kGroup], log_e[kGroup] = {};
  load_group(row, group, z);
  if (noise != nullptr) load_noise(*noise, group, log_e);
  for (int i = 0; i < kGroup; i += Floats::width) {
    const Floats score = race_score(load(z + i), law.maximum, law.scale, load(log_e + i));
    store(scores + i, select(support_of(law, load(z + i), group * kGroup + i), score, splat(-kInfinity)));
  }
}

// The same for a race over the weights that are left of p; the smallest normal float counts as no weight.
void score_group_left(const Judge& judge, const Weight& weight, const Removed& removed, const Noise& noise,
                      int32_t group, float* scores) {
  float p[kGroup], q[kGroup], left[kGroup], log_e[kGroup];
  load_probabilities(judge.p_row, judge.p, group, p);
  load_probabilities(judge.q_row, judge.q, group, q);
  load_noise(noise, group, log_e);
  for (int i = 0; i < kGroup; i += Floats::width)
    store(left + i, weight.kind == Weight::kseq
                        ? kseq_weight(load(p + i), load(q + i), weight.first, weight.second)
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
