// torch.ops.pass_ext.accept_tree and accept_chain on the CPU: parallel split and registration. The rules:
// core/accept.h, their work on rows: cpu/rows.h.
#include <torch/csrc/stable/library.h>

#include "cpu/rows.h"
#include "cpu/workers.h"
#include "host/accept.h"

namespace pass_ext {
namespace {

// Refuses rule 'block' on a tree that branches. On CUDA the request's status says so.
void check_is_chain(const AcceptProblem& problem) {
  for (int64_t request = 0; request < problem.requests; ++request)
    for (int64_t node = problem.cu_nodes[request]; node < problem.cu_nodes[request + 1]; ++node) {
      const int64_t index = node - problem.cu_nodes[request], parent = problem.parents[node];
      if (parent >= 0 && parent < index && parent != index - 1)
        refuse("accept_tree", "rule 'block' fits chains only, but in request ", request, " node ", index,
               " hangs below node ", parent, " (traversal is its form for trees)");
    }
}

// Refuses positions whose draws below the root would lie behind the end of int64. On CUDA they wrap to its beginning.
void check_positions(const char* op, const AcceptProblem& problem) {
  if (!problem.positions) return;
  const int64_t last = INT64_MAX - problem.max_depth;
  for (int64_t request = 0; request < problem.requests; ++request)
    if (problem.positions[request] > last)
      refuse(op, "positions must be at most ", last, ", for drafts of depth ", problem.max_depth,
             " lie behind them, got ", problem.positions[request], " at ", request);
}

void accept_on_cpu(const char* op, const AcceptProblem& problem, const Tensor&) {
  check_positions(op, problem);
  bool divided = true;
  for (int64_t index = 0; index < problem.requests && !problem.is_chain; ++index)
    if (breaks_bounds(problem, index)) divided = false;
  if (problem.rule == Rule::block && !problem.is_chain && divided) check_is_chain(problem);
  for_each_request(problem.requests, [&](int64_t index, bool alone) {
    AcceptWalk<CpuRows>(thread_rows(alone), request_of(problem, index)).run(divided);
  });
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CPU, library) {
  library.impl("accept_tree", TORCH_BOX(&pass_ext::accept_tree<pass_ext::accept_on_cpu>));
  library.impl("accept_chain", TORCH_BOX(&pass_ext::accept_chain<pass_ext::accept_on_cpu>));
}
