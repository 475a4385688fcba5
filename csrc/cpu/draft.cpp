// torch.ops.pass_ext.draft_sample on the CPU: parallel split and registration. The drawing: core/draft.h on cpu/rows.h.
// Called by torch's dispatcher.
#include <torch/csrc/stable/library.h>

#include "cpu/rows.h"
#include "cpu/threads.h"
#include "host/draft.h"

namespace pass_ext {
namespace {

DraftResult draft_sample(const Tensor& logits, int64_t k, int64_t mode, const OptionalTensor& temperature,
                         const OptionalTensor& top_k, const OptionalTensor& top_p, const OptionalTensor& min_p,
                         const OptionalTensor& allowed, const OptionalTensor& seeds, const OptionalTensor& positions,
                         const OptionalTensor& nodes) {
  DraftProblem problem{};
  const DraftResult result =
      prepare_draft({logits, k, mode, {temperature, top_k, top_p, min_p}, allowed, seeds, positions, nodes}, problem);
  for_each_request(problem.rows, [&](int64_t index, bool alone) { draft_row(thread_rows(alone), problem, index); });
  return result;
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CPU, library) { library.impl("draft_sample", TORCH_BOX(&pass_ext::draft_sample)); }
