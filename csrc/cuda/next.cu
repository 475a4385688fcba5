// torch.ops.pass_ext.next_rows_ on CUDA: launch, registration. The kernel: cuda/next.cuh.
#include "cuda/next.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/next.h"

namespace pass_ext {
namespace {

void next_on_cuda(const NextProblem& problem, const Tensor& rows) {
  const CudaScope scope(rows);
  gpu::launch_next_rows(problem, scope.stream());
  check_launch("next_rows_");
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CUDA, library) {
  library.impl("next_rows_", TORCH_BOX(&pass_ext::next_rows<pass_ext::next_on_cuda>));
}
