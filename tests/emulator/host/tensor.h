// csrc/host/tensor.h for the emulator: what takes memory or an address there tells the emulator which bytes an op may
// read and write. Its host code is the GPU's otherwise; this file comes first on the include path.
#pragma once

#define address_of untold_address_of
#define data_of untold_data_of
#define empty_of_shape untold_empty_of_shape
#define output_of untold_output_of
#include_next "host/tensor.h"
#undef address_of
#undef data_of
#undef empty_of_shape
#undef output_of

#include <string>
#include <type_traits>

#include "engine.h"

namespace pass_ext {

inline void tell_emulator(const std::string& name, const Tensor& tensor, const void* data, emulator::Content content) {
  int64_t elements = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) == 0) return;
    elements += (tensor.size(i) - 1) * tensor.stride(i);
  }
  emulator::tell_buffer(name, const_cast<void*>(data), elements * tensor.element_size(), content);
}

template <typename T, typename Name>
T* address_of(const char* op, const Name& argument, const Tensor& tensor) {
  T* const data = untold_address_of<T>(op, argument, tensor);
  std::ostringstream name;
  name << argument;
  tell_emulator(name.str(), tensor, data,
                std::is_const_v<T> ? emulator::Content::read_only : emulator::Content::initialised);
  return data;
}

template <typename T, typename Name>
const T* data_of(const char* op, const Name& argument, const Tensor& tensor) {
  return static_cast<const T*>(address_of<const void>(op, argument, tensor));
}

inline Tensor empty_of_shape(const char* op, const Tensor& like, const std::vector<int64_t>& shape,
                             std::optional<ScalarType> type = std::nullopt) {
  const Tensor made = untold_empty_of_shape(op, like, shape, type);
  tell_emulator("", made, made.mutable_data_ptr(), emulator::Content::uninitialised);
  return made;
}

// Memory that is not of empty_of_shape has its contents.
template <typename T>
T* output_of(const Tensor& tensor) {
  T* const data = untold_output_of<T>(tensor);
  tell_emulator("", tensor, data, emulator::Content::initialised);
  return data;
}

}  // namespace pass_ext
