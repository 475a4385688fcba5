// torch.ops.pass_ext.draft_sample on CUDA: workspace, launch, registration. The kernels: cuda/draft.cuh.
#include "cuda/draft.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/counters.h"
#include "cuda/runtime.h"
#include "host/draft.h"

namespace pass_ext {
namespace {

void draft_on_cuda(const DraftProblem& problem, const Tensor& logits) {
  if (problem.rows == 0) return;
  const CudaScope scope(logits);
  const gpu::RowsPlan plan = gpu::plan_draft(problem, scope.multiprocessors());
  const Tensor workspace = empty_of_shape("draft_sample", logits, {kSlotBytes + plan.bytes()}, ScalarType::Byte);
  char* const memory = output_of<char>(workspace);
  int32_t* const counters =
      plan.rows > 0 ? CounterSlots::of_device(scope.device()).slot_for("draft_sample", scope.stream(), memory)
                    : nullptr;
  gpu::launch_draft(problem, plan, plan.carve(memory + kSlotBytes, counters), scope.stream());
  check_launch("draft_sample");
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("draft_sample", TORCH_BOX(&pass_ext::draft_sample<pass_ext::draft_on_cuda>));
}
