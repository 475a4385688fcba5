// torch.ops.pass_ext.convolution_tree on CUDA: launch, registration. The kernel: cuda/convolution.cuh.
#include "cuda/convolution.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/convolution.h"

namespace pass_ext {
namespace {

struct OnCuda {
  template <typename T>
  static void run(const ConvolutionTree<T>& problem, const Tensor& like) {
    const CudaScope scope(like);
    gpu::launch_convolution_tree(problem, scope.stream());
    check_launch("convolution_tree");
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("convolution_tree", TORCH_BOX(&pass_ext::convolution_tree<pass_ext::OnCuda>));
}
