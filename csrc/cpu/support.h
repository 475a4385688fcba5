// The supports of a request's emitted tokens on the CPU. The formulas: core/logprobs.h.
#pragma once

#include <algorithm>

#include "core/logprobs.h"
#include "cpu/rows.h"

namespace pass_ext {

inline void write_supports(CpuRows& rows, const AcceptProblem& problem, const SupportArrays& results, int64_t request) {
  for (int32_t depth = problem.max_depth; depth >= 0; --depth) {
    const EmittedToken emitted = emitted_token(problem, request, depth);
    int32_t* const ids = results.ids + emitted.place * results.room;
    const int32_t count = emitted.token < 0 ? 0 : rows.support(emitted.row, emitted.processed, results.room, ids);
    results.counts[emitted.place] = count;
    std::fill(ids + (count <= results.room ? count : 0), ids + results.room, -1);
  }
}

}  // namespace pass_ext
