// The one switch from a tensor's dtype to a C++ type:  dispatch_floating(type, [&](auto tag) { using T =
// type_of<decltype(tag)>; … })
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <stdexcept>

#include "core/half.h"

namespace pass_ext {

template <typename T>
struct TypeTag {
  using type = T;
};

template <typename Tag>
using type_of = typename Tag::type;

// bfloat16, float16, float, double
template <typename Function>
decltype(auto) dispatch_floating(torch::headeronly::ScalarType type, Function&& function) {
  using torch::headeronly::ScalarType;
  switch (type) {
    case ScalarType::BFloat16: return function(TypeTag<bfloat16>{});
    case ScalarType::Half: return function(TypeTag<float16>{});
    case ScalarType::Float: return function(TypeTag<float>{});
    case ScalarType::Double: return function(TypeTag<double>{});
    default: throw std::logic_error("pass_ext: dtype reached dispatch_floating unchecked");
  }
}

// bfloat16, float16, float
template <typename Function>
decltype(auto) dispatch_up_to_float32(torch::headeronly::ScalarType type, Function&& function) {
  using torch::headeronly::ScalarType;
  switch (type) {
    case ScalarType::BFloat16: return function(TypeTag<bfloat16>{});
    case ScalarType::Half: return function(TypeTag<float16>{});
    case ScalarType::Float: return function(TypeTag<float>{});
    default: throw std::logic_error("pass_ext: dtype reached dispatch_up_to_float32 unchecked");
  }
}

// int32_t, int64_t
template <typename Function>
decltype(auto) dispatch_index(torch::headeronly::ScalarType type, Function&& function) {
  using torch::headeronly::ScalarType;
  switch (type) {
    case ScalarType::Int: return function(TypeTag<int32_t>{});
    case ScalarType::Long: return function(TypeTag<int64_t>{});
    default: throw std::logic_error("pass_ext: dtype reached dispatch_index unchecked");
  }
}

}  // namespace pass_ext
