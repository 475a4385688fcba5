// torch.ops.pass_ext.next_rows_ and next_tree_ on CUDA: launch, registration. The kernels: cuda/next.cuh and
// cuda/next_tree.cuh.
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

void next_tree_on_cuda(const NextTreeProblem& problem, const Tensor& rows) {
  const CudaScope scope(rows);
  gpu::launch_next_tree(problem, scope.stream());
  check_launch("next_tree_");
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("next_rows_", TORCH_BOX(&pass_ext::next_rows<pass_ext::next_on_cuda>));
  library.impl("next_tree_", TORCH_BOX(&pass_ext::next_tree<pass_ext::next_tree_on_cuda>));
}
