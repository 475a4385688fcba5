// torch.ops.pass_ext.tree_prepare and tree_mask on CUDA: launch and registration. The kernels: cuda/tree.cuh.
#include "cuda/tree.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/tree.h"

namespace pass_ext {
namespace {

void prepare_on_cuda(const TreePrepare& problem, const Tensor& parents) {
  const CudaScope scope(parents);
  gpu::launch_tree_prepare(problem, scope.stream());
  check_launch("tree_prepare");
}

struct MaskOnCuda {
  template <typename T>
  static void run(const TreeMask<T>& problem, const Tensor& visible) {
    const CudaScope scope(visible);
    gpu::launch_tree_mask(problem, scope.stream());
    check_launch("tree_mask");
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("tree_prepare", TORCH_BOX(&pass_ext::tree_prepare<pass_ext::prepare_on_cuda>));
  library.impl("tree_mask", TORCH_BOX(&pass_ext::tree_mask<pass_ext::MaskOnCuda>));
}
