// Tensors as kernels need them: outputs made without the price of torch's stable wrappers, which look their operator up
// by name in every call, and the address of every element that a kernel reads or writes. The only place that asks torch
// for memory or for an address.
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

// Uninitialised, on the device and in the dtype (unless another is given) of `like`. torch::stable::new_empty
// costs as much as a small gather; this is the C shim below it.
inline Tensor empty_of_shape(const char* op, const Tensor& like, const std::vector<int64_t>& shape,
                             std::optional<ScalarType> type = std::nullopt) {
  int32_t device_type, device_index, dtype, layout;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(like.get(), &layout));
  if (type) dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*type));
  AtenTensorHandle made;
  if (aoti_torch_aten_new_empty(like.get(), shape.data(), shape.size(), &dtype, &layout, &device_type, device_index,
                                nullptr, &made) != AOTI_TORCH_SUCCESS)
    refuse_size(op, "the result", type ? *type : like.scalar_type(), shape);
  return Tensor(made);
}

// Whether memory begins at `data` that holds all elements of the tensor.
inline bool has_all_elements(const Tensor& tensor, const void* data) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t end, bytes;  // behind the last element, counted from the storage's begin
  if (aoti_torch_get_storage_offset(tensor.get(), &end) != AOTI_TORCH_SUCCESS) return false;
  ++end;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    end += (sizes[i] - 1) * strides[i];
  }
  if (!data || aoti_torch_get_storage_size(tensor.get(), &bytes) != AOTI_TORCH_SUCCESS) return false;
  return end <= bytes / static_cast<int64_t>(tensor.element_size());
}

// A name in a list: caches[3].
struct ItemName {
  const char* list;
  int64_t index;
};
inline std::ostream& operator<<(std::ostream& stream, const ItemName& item) {
  return stream << item.list << '[' << item.index << ']';
}

// The address of a tensor's first element. Refuses a tensor whose elements are not all there: a fake tensor that
// reached a kernel, one whose storage was freed or cut (as FSDP does between layers). Without this a kernel reads null.
// T: void, or const void for what is only read.
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

// torch::stable::contiguous, not called where there is nothing to do, nor for a tensor that is not there.
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

// Of an output, which was just made.
template <typename T>
T* output_of(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

}  // namespace pass_ext
