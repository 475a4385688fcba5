// Allocates outputs and takes the addresses of all elements that kernels read or write. No other file asks torch for
// memory or for an address. Outputs skip torch's stable wrappers, which look up their operator by name in every call.
#pragma once

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "host/checks.h"

namespace pass_ext {

using OptionalTensor = std::optional<Tensor>;

[[noreturn]] inline void refuse_size(const char* op, const std::string& purpose, ScalarType type,
                                     const std::vector<int64_t>& shape) {
  const int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  double bytes = static_cast<double>(aoti_torch_dtype_element_size(dtype));  // a product of sizes may exceed int64
  std::ostringstream text;
  for (size_t i = 0; i < shape.size(); ++i) {
    text << (i ? ", " : "") << shape[i];
    bytes *= static_cast<double>(shape[i]);
  }
  std::ostringstream number;
  number.precision(0);
  number << std::fixed << bytes;
  refuse(op, "out of memory: ", purpose, " ", name_of(type), "[", text.str(), "] needs ", number.str(),
         " bytes, which could not be allocated");
}

// An uninitialised tensor on the device of `like`, in its dtype unless `type` is given. torch::stable::new_empty costs
// as much as a small gather; this is the C shim below it.
inline Tensor empty_of_shape(const char* op, const Tensor& like, const std::vector<int64_t>& shape,
                             std::optional<ScalarType> type = std::nullopt) {
  int32_t device_type, device_index, dtype, layout;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(like.get(), &layout));
  if (type) dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*type));
  AtenTensorHandle handle;
  if (aoti_torch_aten_new_empty(like.get(), shape.data(), shape.size(), &dtype, &layout, &device_type, device_index,
                                nullptr, &handle) != AOTI_TORCH_SUCCESS)
    refuse_size(op, "the result", type ? *type : like.scalar_type(), shape);
  return Tensor(handle);
}

// True if all elements of the tensor lie in the memory that begins at `data`.
inline bool has_all_elements(const Tensor& tensor, const void* data) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t end, bytes;  // one behind the last element, counted from the storage's begin
  if (aoti_torch_get_storage_offset(tensor.get(), &end) != AOTI_TORCH_SUCCESS) return false;
  ++end;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    end += (sizes[i] - 1) * strides[i];
  }
  if (!data || aoti_torch_get_storage_size(tensor.get(), &bytes) != AOTI_TORCH_SUCCESS) return false;
  return end <= bytes / static_cast<int64_t>(tensor.element_size());
}

// A tensor in a list, printed as caches[3].
struct ItemName {
  const char* list;
  int64_t index;
};
inline std::ostream& operator<<(std::ostream& stream, const ItemName& item) {
  return stream << item.list << '[' << item.index << ']';
}

// The address of a tensor's first element. Refuses a tensor without memory for all its elements: a fake tensor that
// reached a kernel, or one whose storage was freed or cut (as FSDP does between layers). Without this check a kernel
// reads null. T: void, or const void for reading only.
template <typename T, typename Name>
T* address_of(const char* op, const Name& argument, const Tensor& tensor) {
  const void* data = nullptr;
  AOTITorchError error;
  if constexpr (std::is_const_v<T>) {
    error = torch_get_const_data_ptr(tensor.get(), &data);
  } else {
    void* writable = nullptr;
    error = torch_get_mutable_data_ptr(tensor.get(), &writable);
    data = writable;
  }
  if (error != AOTI_TORCH_SUCCESS || !has_all_elements(tensor, data))
    refuse(op, argument, " must have its elements in memory, got ", describe(tensor),
           " without them (a fake tensor, or one whose storage was freed or cut)");
  return static_cast<T*>(const_cast<void*>(data));
}

template <typename T, typename Name>
const T* data_of(const char* op, const Name& argument, const Tensor& tensor) {
  return static_cast<const T*>(address_of<const void>(op, argument, tensor));
}

// A contiguous tensor as it is, any other one copied. Refuses to copy a tensor without memory.
inline Tensor contiguous_of(const char* op, const char* argument, const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  data_of<void>(op, argument, tensor);
  try {
    return torch::stable::contiguous(tensor);
  } catch (const std::exception&) {
    refuse_size(op, std::string("a contiguous copy of ") + argument, tensor.scalar_type(),
                {tensor.sizes().begin(), tensor.sizes().end()});
  }
}

// The address of a new output.
template <typename T>
T* output_of(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

}  // namespace pass_ext
