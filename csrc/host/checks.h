// Argument checks. Every message reads  pass_ext::<op>: <argument> must be <what was expected>, got <what came>. Checks
// come first in an op, before anything is allocated or launched.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

namespace pass_ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] void refuse(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << "pass_ext::" << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

inline const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    default: return "another dtype";
  }
}

// torch's number of the device type. Types other than CUDA and the CPU keep different numbers.
inline int32_t device_type_of(const Tensor& tensor) {
  int32_t type;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type;
}

// "bfloat16[3, 576] on cuda:0"
inline std::string describe(const Tensor& tensor) {
  std::ostringstream text;
  text << name_of(tensor.scalar_type()) << '[';
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  const int32_t device = device_type_of(tensor);
  text << "] on ";
  if (tensor.is_cuda())
    text << "cuda:" << tensor.get_device_index();
  else
    text << (device == aoti_torch_device_type_cpu()    ? "cpu"
             : device == aoti_torch_device_type_meta() ? "meta"
                                                       : "another device");
  return text.str();
}

inline void check_dtype(const char* op, const char* argument, const Tensor& tensor,
                        std::initializer_list<ScalarType> accepted) {
  for (ScalarType type : accepted)
    if (tensor.scalar_type() == type) return;
  std::ostringstream list;
  size_t index = 0;
  for (ScalarType type : accepted) {
    if (index) list << (index + 1 == accepted.size() ? " or " : ", ");
    list << name_of(type);
    ++index;
  }
  refuse(op, argument, " must be ", list.str(), ", got ", describe(tensor));
}

// `shape` is the expected shape in words, e.g. "[V, d]"; only the number of dimensions is compared.
inline void check_dim(const char* op, const char* argument, const Tensor& tensor, int64_t dim, const char* shape) {
  if (tensor.dim() != dim) refuse(op, argument, " must have shape ", shape, ", got ", describe(tensor));
}

inline void check_size(const char* op, const char* argument, const Tensor& tensor, int64_t dim, int64_t expected,
                       const char* meaning) {
  if (tensor.size(dim) != expected)
    refuse(op, argument, " must have ", expected, " (", meaning, ") in dimension ", dim, ", got ", describe(tensor));
}

inline void check_same_device(const char* op, const char* argument, const Tensor& tensor, const char* other_argument,
                              const Tensor& other) {
  if (device_type_of(tensor) != device_type_of(other) || tensor.get_device_index() != other.get_device_index())
    refuse(op, argument, " must be on the device of ", other_argument, " (", describe(other), "), got ",
           describe(tensor));
}

// Refuses a size that kernels could not count in int32. Comes before the size is narrowed or divided by.
inline void check_below(const char* op, const char* argument, const Tensor& tensor, int64_t dim, int64_t limit,
                        const char* meaning) {
  if (tensor.size(dim) >= limit)
    refuse(op, argument, " must have less than ", limit, " ", meaning, " (dimension ", dim, "), got ",
           describe(tensor));
}

constexpr int64_t kInt32Limit = int64_t{1} << 31;

// Rows may lie anywhere, but each row must be contiguous.
inline void check_contiguous_rows(const char* op, const char* argument, const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1)
    refuse(op, argument, " must be contiguous in its last dimension, got ", describe(tensor), " with stride ",
           tensor.stride(last), " there (call .contiguous() once, outside the decoding loop)");
}

}  // namespace pass_ext
