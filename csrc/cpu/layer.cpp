// torch.ops.pass_ext.layer_before_attention and layer_after_attention on the CPU: a decoder layer around its attention,
// each half as one call (cpu/layer.h).
#include "cpu/layer.h"

#include <torch/csrc/stable/library.h>

#include "host/layer.h"

namespace pass_ext {
namespace {

struct OnCpu {
  template <typename T>
  static void before(const LayerBefore<T>& layer, const LayerOptions& options, const Rotation& rotation, const T* x,
                     int64_t rows, T* q, T* k, T* v, const Tensor&) {
    before_attention(layer, {}, options, rotation, x, rows, q, k, v);
  }
  template <typename T>
  static void after(const LayerAfter<T>& layer, const LayerOptions& options, const T* attended, const T* residual,
                    int64_t rows, T* out, const Tensor&) {
    after_attention(layer, {}, options, attended, residual, rows, out);
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CPU, library) {
  library.impl("layer_before_attention", TORCH_BOX(&pass_ext::layer_before_attention<pass_ext::OnCpu>));
  library.impl("layer_after_attention", TORCH_BOX(&pass_ext::layer_after_attention<pass_ext::OnCpu>));
}
