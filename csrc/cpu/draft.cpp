// torch.ops.pass_ext.draft_sample on the CPU: parallel split and registration. The drawing: core/draft.h on cpu/rows.h.
// Called by torch's dispatcher.
#include <torch/csrc/stable/library.h>

#include "cpu/rows.h"
#include "cpu/threads.h"
#include "host/draft.h"

namespace pass_ext {
namespace {

void draft_on_cpu(const DraftProblem& problem, const Tensor&) {
  for_each_request(problem.rows, [&](int64_t index, bool alone) { draft_row(thread_rows(alone), problem, index); });
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CPU, library) {
  library.impl("draft_sample", TORCH_BOX(&pass_ext::draft_sample<pass_ext::draft_on_cpu>));
}
