// torch.ops.pass_ext.next_tree_ on CUDA: launch, registration. The kernel: cuda/next.cuh.
#include <torch/csrc/stable/library.h>

#include "cuda/next.cuh"
#include "cuda/runtime.h"
#include "host/next.h"

namespace pass_ext {
namespace {

void next_tree_on_cuda(const NextTreeProblem& problem, const Tensor& rows) {
  const CudaScope scope(rows);
  gpu::launch_next_tree(problem, scope.stream());
  check_launch("next_tree_");
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("next_tree_", TORCH_BOX(&pass_ext::next_tree<pass_ext::next_tree_on_cuda>));
}
