// torch.ops.pass_ext.quantize_rows on CUDA: launch and registration. The kernel: cuda/quantize.cuh.
#include "cuda/quantize.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/quantize.h"

namespace pass_ext {
namespace {

struct OnCuda {
  template <typename T>
  static void run(const QuantizeRows<T>& problem, const Tensor& rows) {
    const CudaScope scope(rows);
    gpu::launch_quantize_rows(problem, scope.stream());
    check_launch("quantize_rows");
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("quantize_rows", TORCH_BOX(&pass_ext::quantize_rows<pass_ext::OnCuda>));
}
