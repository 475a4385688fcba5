// torch.ops.pass_ext.draft_sample on the CPU: parallel split and registration. The drawing: core/draft.h on cpu/rows.h.
#include <torch/csrc/stable/library.h>

#include "cpu/rows.h"
#include "cpu/workers.h"
#include "host/draft.h"

namespace pass_ext {
namespace {

// Refuses nodes of more than 24 bits, because the noise counter has no room for them. On CUDA the upper bits are left
// out.
void check_nodes(const DraftProblem& problem) {
  constexpr int32_t kNodes = 1 << 24;
  if (!problem.nodes) return;
  for (int64_t row = 0; row < problem.rows; ++row)
    if (problem.nodes[row] < 0 || problem.nodes[row] >= kNodes)
      refuse("draft_sample", "nodes must be in [0, ", kNodes, "), got ", problem.nodes[row], " at ", row);
}

void draft_on_cpu(const DraftProblem& problem, const Tensor&) {
  check_nodes(problem);
  for_each_request(problem.rows, [&](int64_t index, bool alone) { draft_row(thread_rows(alone), problem, index); });
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("draft_sample", TORCH_BOX(&pass_ext::draft_sample<pass_ext::draft_on_cpu>));
}
