// torch.ops.pass_ext.recurrent_tree on CUDA: launch, registration. The kernel: cuda/recurrent.cuh.
#include "cuda/recurrent.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/recurrent.h"

namespace pass_ext {
namespace {

struct OnCuda {
  template <typename T>
  static void run(const RecurrentTree<T>& problem, const Tensor& like) {
    const CudaScope scope(like);
    gpu::launch_recurrent_tree(problem, scope.stream());
    check_launch("recurrent_tree");
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("recurrent_tree", TORCH_BOX(&pass_ext::recurrent_tree<pass_ext::OnCuda>));
}
