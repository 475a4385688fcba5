// torch.ops.pass_ext.linear_rows on CUDA: launch, registration. The kernel: cuda/linear.cuh, compiled here for the
// layer ops too.
#include "cuda/linear.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/linear.h"

namespace pass_ext {

template void gpu::launch_products(const char*, const LinearRows<float>*, int, const gpu::InputNorm<float>&,
                                   const gpu::HeadRotation&, const gpu::ProductAdapters<float>&, bool, gpu::Stream);
template void gpu::launch_products(const char*, const LinearRows<float16>*, int, const gpu::InputNorm<float16>&,
                                   const gpu::HeadRotation&, const gpu::ProductAdapters<float16>&, bool, gpu::Stream);
template void gpu::launch_products(const char*, const LinearRows<bfloat16>*, int, const gpu::InputNorm<bfloat16>&,
                                   const gpu::HeadRotation&, const gpu::ProductAdapters<bfloat16>&, bool, gpu::Stream);

namespace {

struct OnCuda {
  template <typename T>
  static void run(const LinearRows<T>& problem, const Tensor& like) {
    const CudaScope scope(like);
    gpu::launch_products<T>("linear_rows", &problem, 1, {}, {}, {}, false, scope.stream());
    check_launch("linear_rows");
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("linear_rows", TORCH_BOX(&pass_ext::linear_rows<pass_ext::OnCuda>));
}
