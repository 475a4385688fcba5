// torch.ops.pass_ext.draft_sample on CUDA: checks, workspace, launch, registration. The kernels: cuda/draft.cuh.
// Called by torch's dispatcher.
#include "cuda/draft.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/draft.h"

namespace pass_ext {
namespace {

DraftResult draft_sample(const Tensor& logits, int64_t k, int64_t mode, const OptionalTensor& temperature,
                         const OptionalTensor& top_k, const OptionalTensor& top_p, const OptionalTensor& min_p,
                         const OptionalTensor& allowed, const OptionalTensor& seeds, const OptionalTensor& positions,
                         const OptionalTensor& nodes) {
  DraftProblem problem{};
  const CudaScope scope(logits);
  const DraftResult result =
      prepare_draft({logits, k, mode, {temperature, top_k, top_p, min_p}, allowed, seeds, positions, nodes}, problem);
  const gpu::RowsPlan plan = gpu::plan_draft(problem, scope.multiprocessors());
  const Tensor workspace = empty_of_shape(logits, {plan.bytes()}, ScalarType::Byte);
  gpu::launch_draft(problem, plan.carve(workspace.mutable_data_ptr()), scope.stream());
  check_launch("draft_sample");
  return result;
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CUDA, library) { library.impl("draft_sample", TORCH_BOX(&pass_ext::draft_sample)); }
