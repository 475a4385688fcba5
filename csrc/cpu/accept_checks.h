// Checks of values in accept_tree's arguments, which only the CPU can read without a synchronisation.
#pragma once

#include "host/accept.h"

namespace pass_ext {

// Refuses rule 'block' on a tree that branches. On CUDA the request's status says so.
inline void check_is_chain(const char* op, const AcceptProblem& problem) {
  for (int64_t request = 0; request < problem.requests; ++request)
    for (int64_t node = problem.cu_nodes[request]; node < problem.cu_nodes[request + 1]; ++node) {
      const int64_t index = node - problem.cu_nodes[request], parent = problem.parents[node];
      if (parent >= 0 && parent < index && parent != index - 1)
        refuse(op, "rule 'block' fits chains only, but in request ", request, " node ", index, " hangs below node ",
               parent, " (traversal is its form for trees)");
    }
}

// Refuses positions whose draws below the root would lie behind the end of int64. On CUDA they wrap to its beginning.
inline void check_positions(const char* op, const AcceptProblem& problem) {
  if (!problem.positions) return;
  const int64_t last = INT64_MAX - problem.max_depth;
  for (int64_t request = 0; request < problem.requests; ++request)
    if (problem.positions[request] > last)
      refuse(op, "positions must be at most ", last, ", for drafts of depth ", problem.max_depth,
             " lie behind them, got ", problem.positions[request], " at ", request);
}

}  // namespace pass_ext
