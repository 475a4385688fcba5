// Checks the arguments of linear_rows and linear_packed, the same on every device, and packs them into the struct of
// core/linear.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <type_traits>
#include <vector>

#include "core/linear.h"
#include "host/checks.h"
#include "host/dispatch.h"
#include "host/tensor.h"

namespace pass_ext {

constexpr int64_t kMostLinearOutputs = kInt32Limit - 64;  // kernels count those of whole tiles in int32

inline void check_linear_bias(const char* op, const OptionalTensor& bias, int64_t outputs, const char* meaning,
                              const Tensor& x) {
  if (!bias) return;
  check_dtype(op, "bias", *bias, {x.scalar_type()});
  check_dim(op, "bias", *bias, 1, "[out]");
  check_size(op, "bias", *bias, 0, outputs, meaning);
  check_same_device(op, "bias", *bias, "x", x);
}

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
  check_linear_bias(op, bias, weight.size(0), "out, the rows of weight", x);
}

// A packed weight [out / 16, in / 32, bytes]: its dtype, shape, form and place.
inline void check_packed_weight(const char* op, const char* argument, const Tensor& weight) {
  check_dtype(op, argument, weight, {ScalarType::Byte});
  check_dim(op, argument, weight, 3, "[out / 16, in / 32, bytes]");
  const PackedForm form = packed_form_of(weight.size(2));
  if (form == PackedForm::none)
    refuse(op, argument, " must have ", kPackedBytes<PackedFourK>, ", ", kPackedBytes<PackedFour>, ", ",
           kPackedBytes<PackedFourKHalves>, ", ", kPackedBytes<PackedTable>, ", ", kPackedBytes<PackedFourWide>, ", ",
           kPackedBytes<PackedTableWide>, ", ", kPackedBytes<PackedEightK>, ", ", kPackedBytes<PackedEight>, ", ",
           kPackedBytes<PackedEightKHalves>, " or ", kPackedBytes<PackedEightWide>,
           " (bytes of a block) in dimension 2, got ", describe(weight));
  if (is_k_form(form) && weight.size(1) % PackedFourK::kSteps)
    refuse(op, argument, " must have a multiple of ", PackedFourK::kSteps, " blocks of ", weight.size(2),
           " bytes in dimension 1, got ", describe(weight));
  check_below(op, argument, weight, 0, kMostLinearOutputs / kPackedOutputs, "groups of outputs");
  if (!weight.is_contiguous()) refuse(op, argument, " must be contiguous, got ", describe(weight), " with strides");
  if (reinterpret_cast<uintptr_t>(data_of<void>(op, argument, weight)) % alignof(uint32_t))
    refuse(op, argument, " must lie at a multiple of ", alignof(uint32_t), " bytes (clone() it), got ",
           describe(weight));
}

inline bool is_packed(const Tensor& weight) { return weight.scalar_type() == ScalarType::Byte; }

// The outputs and inputs of a weight, dense or packed; a packed one's outputs are whole groups.
inline int64_t outputs_of(const Tensor& weight) {
  return is_packed(weight) ? weight.size(0) * kPackedOutputs : weight.size(0);
}
inline int64_t inputs_of(const Tensor& weight) {
  return is_packed(weight) ? weight.size(1) * kPackedInputs : weight.size(1);
}

inline void check_linear_packed(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t outputs) {
  constexpr const char* op = "linear_packed";
  check_dtype(op, "x", x, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  if (x.dim() == 0) refuse(op, "x must have shape [..., in], got ", describe(x));
  check_packed_weight(op, "weight", weight);
  check_size(op, "x", x, x.dim() - 1, weight.size(1) * kPackedInputs, "in, 32 for each block of weight");
  check_same_device(op, "weight", weight, "x", x);
  const int64_t most = weight.size(0) * kPackedOutputs;
  if (outputs > most || outputs < 0 || outputs + kPackedOutputs <= most)
    refuse(op, "outputs must be at most ", most, " and more than ", most - kPackedOutputs,
           " (16 for each group of weight), got ", outputs);
  check_linear_bias(op, bias, outputs, "outputs", x);
}

inline Tensor empty_linear_rows(const char* op, const Tensor& x, int64_t outputs) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = outputs;
  return empty_of_shape(op, x, shape);
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

// run(problem, x): the product of x, or of a copy whose rows are evenly apart; its weight is still to come.
template <typename Function>
Tensor with_linear_rows(const char* op, const Tensor& input, const OptionalTensor& input_bias, int64_t in,
                        int64_t outputs, Function&& run) {
  const int64_t distance = distance_of_rows(input);
  const Tensor x = distance < 0 ? contiguous_of(op, "x", input) : input;
  const OptionalTensor bias = input_bias ? OptionalTensor(contiguous_of(op, "bias", *input_bias)) : input_bias;
  const Tensor out = empty_linear_rows(op, x, outputs);
  if (out.numel() == 0) return out;
  dispatch_up_to_float32(x.scalar_type(), [&](auto value) {
    using T = type_of<decltype(value)>;
    run(LinearRows<T>{data_of<T>(op, "x", x), nullptr, bias ? data_of<T>(op, "bias", *bias) : nullptr,
                      output_of<T>(out), out.numel() / outputs, in, outputs, distance < 0 ? in : distance, 0},
        x);
  });
  return out;
}

// `Run::run(problem, x)` computes on the device of the tensor `x`.
template <typename Run>
Tensor linear_rows(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  constexpr const char* op = "linear_rows";
  check_linear_rows(x, weight, bias);
  return with_linear_rows(op, x, bias, weight.size(1), weight.size(0), [&](auto problem, const Tensor& like) {
    using T = std::remove_pointer_t<decltype(problem.out)>;
    problem.weight = data_of<T>(op, "weight", weight);
    problem.weight_row = weight.stride(0);
    Run::run(problem, like);
  });
}

template <typename Run>
Tensor linear_packed(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t outputs) {
  constexpr const char* op = "linear_packed";
  check_linear_packed(x, weight, bias, outputs);
  return with_linear_rows(op, x, bias, weight.size(1) * kPackedInputs, outputs, [&](auto problem, const Tensor& like) {
    problem.packed = data_of<void>(op, "weight", weight);
    problem.form = packed_form_of(weight.size(2));
    Run::run(problem, like);
  });
}

}  // namespace pass_ext
