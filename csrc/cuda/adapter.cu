// torch.ops.pass_ext.adapter_rows_ on CUDA: launch, registration. The kernel: cuda/adapter.cuh.
#include "cuda/adapter.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/adapter.h"

namespace pass_ext {
namespace {

struct OnCuda {
  template <typename T, typename Id>
  static void run(const AdapterRows<T, Id>& problem, const Tensor& like) {
    const CudaScope scope(like);
    gpu::launch_adapter_rows(problem, scope.stream());
    check_launch(problem.op);
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("adapter_rows_", TORCH_BOX(&pass_ext::adapter_rows<pass_ext::OnCuda>));
}
