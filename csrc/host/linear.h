// Checks linear_rows' arguments, the same on every device, and packs them into the struct of core/linear.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "core/linear.h"
#include "host/checks.h"
#include "host/dispatch.h"
#include "host/tensor.h"

namespace pass_ext {

constexpr int64_t kMostLinearOutputs = kInt32Limit - 64;  // kernels count those of whole tiles in int32

inline void check_linear_rows(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  constexpr const char* op = "linear_rows";
  check_dtype(op, "x", x, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  check_dtype(op, "weight", weight, {x.scalar_type()});
  check_dim(op, "weight", weight, 2, "[out, in]");
  check_below(op, "weight", weight, 0, kMostLinearOutputs, "outputs");
  if (x.dim() == 0) refuse(op, "x must have shape [..., in], got ", describe(x));
  check_size(op, "x", x, x.dim() - 1, weight.size(1), "in, the columns of weight");
  check_contiguous_rows(op, "weight", weight);
  check_same_device(op, "weight", weight, "x", x);
  if (!bias) return;
  check_dtype(op, "bias", *bias, {x.scalar_type()});
  check_dim(op, "bias", *bias, 1, "[out]");
  check_size(op, "bias", *bias, 0, weight.size(0), "out, the rows of weight");
  check_same_device(op, "bias", *bias, "x", x);
}

inline Tensor empty_linear_rows(const Tensor& x, const Tensor& weight) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = weight.size(0);
  return empty_of_shape("linear_rows", x, shape);
}

// The distance of neighbouring rows of x [..., in] in elements; -1 if it varies or if a row is not contiguous.
inline int64_t distance_of_rows(const Tensor& x) {
  if (x.size(x.dim() - 1) > 1 && x.stride(x.dim() - 1) != 1) return -1;
  int64_t distance = -1, next = -1;
  for (int64_t i = x.dim() - 2; i >= 0; --i) {
    if (x.size(i) == 1) continue;
    if (distance < 0)
      distance = x.stride(i);
    else if (x.stride(i) != next)
      return -1;
    next = x.stride(i) * x.size(i);
  }
  return distance < 0 ? x.size(x.dim() - 1) : distance;
}

// `run(problem, x)` computes on the device of the tensor `x`.
template <typename Run>
Tensor linear_rows(const Tensor& input, const Tensor& weight, const OptionalTensor& input_bias) {
  constexpr const char* op = "linear_rows";
  check_linear_rows(input, weight, input_bias);
  const int64_t distance = distance_of_rows(input);
  const Tensor x = distance < 0 ? contiguous_of(op, "x", input) : input;
  const OptionalTensor bias = input_bias ? OptionalTensor(contiguous_of(op, "bias", *input_bias)) : input_bias;
  const Tensor out = empty_linear_rows(x, weight);
  if (out.numel() == 0) return out;
  const int64_t in = weight.size(1), outputs = weight.size(0);
  dispatch_up_to_float32(x.scalar_type(), [&](auto value) {
    using T = type_of<decltype(value)>;
    Run::run(LinearRows<T>{data_of<T>(op, "x", x), data_of<T>(op, "weight", weight),
                           bias ? data_of<T>(op, "bias", *bias) : nullptr, output_of<T>(out), out.numel() / outputs, in,
                           outputs, distance < 0 ? in : distance, weight.stride(0)},
             x);
  });
  return out;
}

}  // namespace pass_ext
