// torch.ops.pass_ext.lookahead_embed and its gradient on CUDA: checks, workspace, launch, registration.
// The kernels: cuda/lookahead.cuh.
#include "cuda/lookahead.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/lookahead.h"

namespace pass_ext {
namespace {

Tensor lookahead_embed(const Tensor& ids, const Tensor& table, const Tensor& lookahead) {
  check_lookahead_embed(ids, table, lookahead);
  const CudaScope scope(table);
  constexpr const char* op = "lookahead_embed";
  const Tensor flat_ids = contiguous_of(op, "ids", ids), slots = contiguous_of(op, "lookahead", lookahead);
  const Tensor out = empty_lookahead_embed(ids, table);
  with_lookahead_embed(flat_ids, table, slots, out,
                       [&](const auto& problem) { gpu::launch_lookahead_embed(problem, scope.stream()); });
  check_launch("lookahead_embed");
  return out;
}

Tensor lookahead_embed_backward(const Tensor& grad, const Tensor& ids, int64_t rows, bool slots, ScalarType dtype) {
  check_lookahead_embed_backward(grad, ids, rows, dtype);
  const CudaScope scope(grad);
  constexpr const char* op = "lookahead_embed_backward";
  const Tensor flat_ids = contiguous_of(op, "ids", ids), flat_grad = contiguous_of(op, "grad", grad);
  const int64_t dim = grad.size(grad.dim() - 1), splits = slots ? gpu::count_splits(ids.numel()) : 1;
  const std::vector<int64_t> shape{rows, dim}, partial_shape{splits > 1 ? splits : 0, rows, dim};
  const Tensor out = slots ? empty_of_shape(op, grad, shape, dtype) : torch::stable::new_zeros(grad, shape, dtype);
  const Tensor partial = empty_of_shape(
      op, grad, partial_shape, grad.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float);
  with_lookahead_embed_backward(flat_grad, flat_ids, out, slots, [&](const auto& problem) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(problem.grad)>>;
    gpu::launch_lookahead_embed_backward(problem, output_of<sum_t<T>>(partial), scope.stream());
  });
  check_launch("lookahead_embed_backward");
  return out;
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("lookahead_embed", TORCH_BOX(&pass_ext::lookahead_embed));
  library.impl("lookahead_embed_backward", TORCH_BOX(&pass_ext::lookahead_embed_backward));
}
