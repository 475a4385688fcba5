// A row of logits as a distribution over the vocabulary, in the few numbers that kernels need:
//   allowed mask -> temperature -> top-k -> top-p -> min-p -> renormalise
//   prob(v) = exp((z_v - max z) / T) / mass   for v in the support,  0 elsewhere
// Filters keep a prefix of the order (z descending, id ascending), so the support is one cut: z > cut, or z == cut and
// id <= tie. Temperature 0 is the limit: top-k 1. Target and draft rows are processed by the same code.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/platform.h"
#include "core/scalar.h"

namespace pass_ext {

constexpr float kInfinity = __builtin_huge_valf();

enum class LogitType : int32_t { bfloat16, float16, float32 };

// One row of logits. `allowed`: bit v % 32 of word v / 32 set = token v is allowed; null: all are.
struct LogitRow {
  const void* logits;
  const uint32_t* allowed;
  int64_t slot;  // the unique number of the row in its problem
  LogitType type;
  int32_t vocabulary;
};

PASS_EXT_HOST_DEVICE float load_logit(const void* logits, LogitType type, int64_t index) {
  if (type == LogitType::bfloat16) return to_float(static_cast<const bfloat16*>(logits)[index]);
  if (type == LogitType::float16) return to_float(static_cast<const float16*>(logits)[index]);
  return static_cast<const float*>(logits)[index];
}

PASS_EXT_HOST_DEVICE bool is_allowed(const LogitRow& row, int32_t id) {
  return row.allowed == nullptr || (row.allowed[id / 32] >> (id % 32) & 1u) != 0;
}

PASS_EXT_HOST_DEVICE float logit_at(const LogitRow& row, int32_t id) {
  return is_allowed(row, id) ? load_logit(row.logits, row.type, id) : -kInfinity;
}

// A matrix of logits, rows `stride` elements apart, with its mask.
struct LogitRows {
  const void* data;
  const int32_t* allowed;  // [rows, ceil(vocabulary / 32)], or null
  int64_t stride;
  LogitType type;
  int32_t vocabulary;
};

// The row `offset` elements behind the first; its mask is row `allowed_index`.
PASS_EXT_HOST_DEVICE LogitRow row_at(const LogitRows& rows, int64_t offset, int64_t allowed_index, int64_t slot) {
  const int64_t element = rows.type == LogitType::float32 ? 4 : 2, words = (rows.vocabulary + 31) / 32;
  return {static_cast<const char*>(rows.data) + offset * element,
          rows.allowed == nullptr ? nullptr : reinterpret_cast<const uint32_t*>(rows.allowed) + allowed_index * words,
          slot, rows.type, rows.vocabulary};
}

// One number per request, each array [B] or null. A number that is NaN or out of range switches its filter off.
struct SamplingParameterArrays {
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
};

struct SamplingParameters {
  float scale;    // 1 / temperature
  int32_t top_k;  // 0: off
  float top_p;    // 1: off
  float min_p;    // 0: off
};

PASS_EXT_HOST_DEVICE bool is_greedy(float temperature) { return !(temperature > 0.0f); }

// `default_temperature` stands for a null array.
PASS_EXT_HOST_DEVICE SamplingParameters parameters_of(const SamplingParameterArrays& arrays, int64_t request,
                                                      int32_t vocabulary, float default_temperature) {
  // All loads come first, so that none waits for a decision about another.
  const void* const words[4] = {arrays.temperature, arrays.top_k, arrays.top_p, arrays.min_p};
  uint32_t word[4] = {bits_of(default_temperature), 0, bits_of(1.0f), 0};
  for (int i = 0; i < 4; ++i)
    if (words[i] != nullptr) __builtin_memcpy(&word[i], static_cast<const char*>(words[i]) + 4 * request, 4);
  const float temperature = float_of(word[0]), top_p = float_of(word[2]), min_p = float_of(word[3]);
  const int32_t top_k = static_cast<int32_t>(word[1]);
  if (is_greedy(temperature)) return {1.0f, 1, 1.0f, 0.0f};
  const float inverse = 1.0f / temperature;
  SamplingParameters parameters{minimum(maximum(inverse, 0x1p-96f), 0x1p96f), 0, 1.0f, 0.0f};
  if (top_k > 0 && top_k < vocabulary) parameters.top_k = top_k;
  if (top_p < 1.0f) parameters.top_p = maximum(top_p, 0.0f);
  if (min_p > 0.0f) parameters.min_p = minimum(min_p, 1.0f);
  return parameters;
}

PASS_EXT_HOST_DEVICE bool has_filter(const SamplingParameters& parameters) {
  return parameters.top_k > 0 || parameters.top_p < 1.0f || parameters.min_p > 0.0f;
}

// An integer in the order of the floats; -0 counts as 0.
PASS_EXT_HOST_DEVICE uint32_t ordered_bits(float value) {
  const uint32_t bits = bits_of(value + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
PASS_EXT_HOST_DEVICE float float_of_ordered(uint32_t key) { return float_of(key >> 31 ? key & 0x7fffffffu : ~key); }

// Status bits, as AcceptResult.status and the drafting kernels report them.
enum Status : int32_t { kBadLogits = 1, kEmptySupport = 2, kBadTree = 4 };

struct Distribution {
  float maximum;  // largest allowed logit
  float scale;
  float cut;
  int32_t tie;
  float inverse_mass;  // 1 / sum over the support of exp((z - maximum) scale); 0 if not needed
  float log_mass;
  int32_t status;  // 0, kBadLogits (NaN or +inf among the allowed) or kEmptySupport
};

PASS_EXT_HOST_DEVICE bool in_support(const Distribution& distribution, float logit, int32_t id) {
  return logit > distribution.cut || (logit == distribution.cut && id <= distribution.tie);
}

// ln of the unnormalised probability. Subtracting first is exact for the logits that matter.
PASS_EXT_HOST_DEVICE float log_weight(const Distribution& distribution, float logit) {
  return (logit - distribution.maximum) * distribution.scale;
}

PASS_EXT_HOST_DEVICE float probability(const Distribution& distribution, float logit, int32_t id) {
  return in_support(distribution, logit, id) ? exponential(log_weight(distribution, logit)) * distribution.inverse_mass
                                             : 0.0f;
}

// Raises the cut to the smallest logit z with (z - maximum) scale >= ln(min_p), whatever its id; returns true if it
// moved. The condition is monotone in z, so halving finds the cut: among the floats around the expected place, or among
// all below the maximum.
PASS_EXT_HOST_DEVICE bool cut_at_floor(Distribution& distribution, float min_p) {
  const float floor = logarithm(maximum(min_p, 0x1p-126f));
  uint32_t below = ordered_bits(-kInfinity), reaches = ordered_bits(distribution.maximum);
  const uint32_t guess = ordered_bits(distribution.maximum + floor / distribution.scale), around = 16;
  if (guess - around > below && guess - around < reaches &&
      !(log_weight(distribution, float_of_ordered(guess - around)) >= floor))
    below = guess - around;
  if (guess + around < reaches && guess + around > below &&
      log_weight(distribution, float_of_ordered(guess + around)) >= floor)
    reaches = guess + around;
  while (reaches - below > 1) {
    const uint32_t middle = below + (reaches - below) / 2;
    (log_weight(distribution, float_of_ordered(middle)) >= floor ? reaches : below) = middle;
  }
  const float lowest = float_of_ordered(reaches);
  if (lowest <= distribution.cut) return false;
  distribution.cut = lowest;
  distribution.tie = INT32_MAX;
  return true;
}

PASS_EXT_HOST_DEVICE void set_mass(Distribution& distribution, double mass) {
  distribution.inverse_mass = static_cast<float>(1.0 / mass);
  distribution.log_mass = logarithm(static_cast<float>(mass));
}

// Top-p adds integer masses, because then any order of additions gives the same bits. e^0 is 2^40: 2^22 tokens fit 64
// bits with room to spare, and a token below e^-27 weighs nothing here.
constexpr float kMassUnit = 0x1p40f;
PASS_EXT_HOST_DEVICE uint64_t integer_mass(float weight) { return static_cast<uint64_t>(weight * kMassUnit); }

// The integer mass that top-p must reach in a row whose mass is `mass`.
PASS_EXT_HOST_DEVICE uint64_t mass_to_reach(float top_p, double mass) {
  return static_cast<uint64_t>(static_cast<double>(top_p) * mass * static_cast<double>(kMassUnit));
}

}  // namespace pass_ext
