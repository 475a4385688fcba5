// torch.ops.pass_ext.accept_tree and accept_chain on the CPU: parallel split and registration. The rules:
// core/accept_walk.h, their work on rows: cpu/rows.h, log probabilities: cpu/logprobs.h, supports: cpu/support.h.
#include <torch/csrc/stable/library.h>

#include "core/accept_walk.h"
#include "cpu/accept_checks.h"
#include "cpu/logprobs.h"
#include "cpu/rows.h"
#include "cpu/support.h"
#include "cpu/workers.h"
#include "host/accept.h"

namespace pass_ext {
namespace {

void accept_on_cpu(const char* op, const AcceptProblem& problem, const LogprobArrays& logprobs,
                   const SupportArrays& supports, const Tensor&) {
  check_positions(op, problem);
  bool divided = true;
  for (int64_t index = 0; index < problem.requests && !problem.is_chain; ++index)
    if (breaks_bounds(problem, index)) divided = false;
  if (problem.rule == Rule::block && problem.parents != nullptr && divided) check_is_chain(op, problem);
  for_each_request(problem.requests, [&](int64_t index, bool alone) {
    CpuRows& rows = thread_rows(alone);
    AcceptWalk<CpuRows>(rows, request_of(problem, index)).run(divided);
    if (logprobs.raw != nullptr) write_logprobs(rows, problem, logprobs, index);
    if (supports.counts != nullptr) write_supports(rows, problem, supports, index);
  });
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("accept_tree", TORCH_BOX(&pass_ext::accept_tree<pass_ext::accept_on_cpu>));
  library.impl("accept_chain", TORCH_BOX(&pass_ext::accept_chain<pass_ext::accept_on_cpu>));
}
