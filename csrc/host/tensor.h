// Making tensors without the price of torch's stable wrappers, which look their operator up by name in every call.
// Called by every op's CPU and CUDA entry point.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace pass_ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Uninitialised, on the device and in the dtype (unless another is given) of `like`. torch::stable::new_empty
// costs as much as a small gather; this is the C shim below it.
inline Tensor empty_of_shape(const Tensor& like, const std::vector<int64_t>& shape,
                             std::optional<ScalarType> type = std::nullopt) {
  int32_t device_type, device_index, dtype, layout;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(like.get(), &layout));
  if (type) dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*type));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_aten_new_empty(like.get(), shape.data(), shape.size(), &dtype, &layout,
                                                          &device_type, device_index, nullptr, &made));
  return Tensor(made);
}

// torch::stable::contiguous, not called where there is nothing to do.
inline Tensor contiguous_of(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

}  // namespace pass_ext
