// torch.ops.pass_ext.recall_scores on CUDA: launch, registration. The kernel: cuda/recall.cuh.
#include "cuda/recall.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/recall.h"

namespace pass_ext {
namespace {

void recall_on_cuda(const RecallProblem& problem, const Tensor& tokens) {
  const CudaScope scope(tokens);
  gpu::launch_recall_scores(problem, scope.stream());
  check_launch("recall_scores");
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("recall_scores", TORCH_BOX(&pass_ext::recall_scores<pass_ext::recall_on_cuda>));
}
