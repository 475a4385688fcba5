// torch.ops.pass_ext.draft_sample on CUDA: checks, workspace, launch, registration. The kernels: cuda/draft.cuh.
// Called by torch's dispatcher.
#include "cuda/draft.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/draft.h"

namespace pass_ext {
namespace {

void draft_on_cuda(const DraftProblem& problem, const Tensor& logits) {
  const CudaScope scope(logits);
  const gpu::RowsPlan plan = gpu::plan_draft(problem, scope.multiprocessors());
  const Tensor workspace = empty_of_shape("draft_sample", logits, {plan.bytes()}, ScalarType::Byte);
  gpu::launch_draft(problem, plan.carve(output_of<void>(workspace)), scope.stream());
  check_launch("draft_sample");
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CUDA, library) {
  library.impl("draft_sample", TORCH_BOX(&pass_ext::draft_sample<pass_ext::draft_on_cuda>));
}
