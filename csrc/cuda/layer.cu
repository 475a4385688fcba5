// torch.ops.pass_ext.layer_before_attention and layer_after_attention on CUDA: workspace, launches, registration. The
// launches: cuda/layer.cuh.
#include "cuda/layer.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/layer.h"

namespace pass_ext {

// linear.cu has their kernels.
extern template void gpu::launch_products(const char*, const LinearRows<float>*, int, const gpu::InputNorm<float>&,
                                          const gpu::HeadRotation&, const gpu::ProductAdapters<float>&, bool,
                                          gpu::Stream);
extern template void gpu::launch_products(const char*, const LinearRows<float16>*, int, const gpu::InputNorm<float16>&,
                                          const gpu::HeadRotation&, const gpu::ProductAdapters<float16>&, bool,
                                          gpu::Stream);
extern template void gpu::launch_products(const char*, const LinearRows<bfloat16>*, int,
                                          const gpu::InputNorm<bfloat16>&, const gpu::HeadRotation&,
                                          const gpu::ProductAdapters<bfloat16>&, bool, gpu::Stream);

namespace {

struct OnCuda {
  template <typename T>
  static void before(const LayerBefore<T>& layer, const BeforeAdapters<T>& adapters, const LayerOptions& options,
                     const Rotation& rotation, const T* x, int64_t rows, T* q, T* k, T* v, const Tensor& like) {
    constexpr const char* op = "layer_before_attention";
    const CudaScope scope(like);
    const Tensor workspace = empty_of_shape(op, like, {gpu::before_workspace(layer, rotation, rows)});
    gpu::launch_before_attention(layer, adapters, options, rotation, x, rows, q, k, v, output_of<T>(workspace),
                                 scope.stream());
    check_launch(op);
  }
  template <typename T>
  static void after(const LayerAfter<T>& layer, const AfterAdapters<T>& adapters, const LayerOptions& options,
                    const T* attended, const T* residual, int64_t rows, T* out, const Tensor& like) {
    constexpr const char* op = "layer_after_attention";
    const CudaScope scope(like);
    const Tensor workspace = empty_of_shape(op, like, {gpu::after_workspace(layer, rows)});
    gpu::launch_after_attention(layer, adapters, options, attended, residual, rows, out, output_of<T>(workspace),
                                scope.stream());
    check_launch(op);
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("layer_before_attention", TORCH_BOX(&pass_ext::layer_before_attention<pass_ext::OnCuda>));
  library.impl("layer_after_attention", TORCH_BOX(&pass_ext::layer_after_attention<pass_ext::OnCuda>));
}
