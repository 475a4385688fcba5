// Log probabilities of a request's emitted tokens on the CPU. The formulas: core/logprobs.h. The last row comes first:
// its maxima are those of the walk.
#pragma once

#include <cmath>

#include "core/logprobs.h"
#include "cpu/rows.h"

namespace pass_ext {

inline void write_logprobs(CpuRows& rows, const AcceptProblem& problem, const LogprobArrays& results, int64_t request) {
  for (int32_t depth = problem.max_depth; depth >= 0; --depth) {
    const EmittedToken emitted = emitted_token(problem, request, depth);
    const int64_t first = emitted.place * results.count;
    int64_t* const top_tokens = results.top_tokens + first;
    float *const top_raw = results.top_raw + first, *const top_processed = results.top_processed + first;
    rows.fill(top_tokens, top_raw, 0, results.count);
    rows.fill(top_tokens, top_processed, 0, results.count);
    if (emitted.token < 0) {
      results.raw[emitted.place] = results.processed[emitted.place] = -kInfinity;
      continue;
    }
    Distribution processed = emitted.processed, raw = raw_distribution(processed.maximum);
    if (emitted.row.allowed != nullptr)
      raw = rows.describe(emitted.unmasked, {1.0f, 0, 1.0f, 0.0f}, true);
    else if (is_softmax(processed) && has_mass(processed))
      raw = processed;
    else
      set_mass(raw, rows.mass(emitted.row, raw));
    if (!has_mass(processed)) {
      if (is_softmax(processed) && emitted.row.allowed == nullptr)
        processed = raw;
      else
        set_mass(processed, rows.mass(emitted.row, processed));
    }
    const bool is_bad = raw.status != 0;  // a forbidden logit is NaN or +inf
    results.raw[emitted.place] = is_bad ? NAN : log_probability(raw, emitted.unmasked, emitted.token);
    results.processed[emitted.place] = log_probability(processed, emitted.row, emitted.token);
    if (is_bad || results.count == 0) continue;
    rows.best(emitted.unmasked, raw, nullptr, results.count, top_tokens, top_raw);
    for (int32_t i = 0; i < results.count && top_tokens[i] >= 0; ++i)
      top_processed[i] = log_probability(processed, emitted.row, top_tokens[i]);
  }
}

}  // namespace pass_ext
