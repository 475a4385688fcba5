// Checks the arguments of layer_before_attention and layer_after_attention, a decoder layer around its attention.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "host/checks.h"
#include "host/step.h"
#include "host/tensor.h"

namespace pass_ext {

// A linear layer of a decoder layer: weight [out, in] and bias [out] or none.
struct Linear {
  const char* name;
  Tensor weight;
  OptionalTensor bias;

  int64_t outputs() const { return weight.size(0); }
};

inline void check_linear(const char* op, const Linear& linear, int64_t in, const Tensor& x) {
  const std::string weight = std::string(linear.name) + "_weight", bias = std::string(linear.name) + "_bias";
  check_dtype(op, weight.c_str(), linear.weight, {x.scalar_type()});
  check_dim(op, weight.c_str(), linear.weight, 2, "[out, in]");
  check_size(op, weight.c_str(), linear.weight, 1, in, "in, the width of its input");
  check_contiguous_rows(op, weight.c_str(), linear.weight);
  check_same_device(op, weight.c_str(), linear.weight, "the input", x);
  if (!linear.bias) return;
  check_dtype(op, bias.c_str(), *linear.bias, {x.scalar_type()});
  check_dim(op, bias.c_str(), *linear.bias, 1, "[out]");
  check_size(op, bias.c_str(), *linear.bias, 0, linear.outputs(), "out, the rows of its weight");
  check_contiguous_rows(op, bias.c_str(), *linear.bias);
  check_same_device(op, bias.c_str(), *linear.bias, "the input", x);
}

// The weight of a norm over `width` numbers, or over `other` if that is not 0.
inline void check_norm(const char* op, const char* argument, const OptionalTensor& norm, int64_t width, int64_t other,
                       const Tensor& x) {
  if (!norm) return;
  check_dtype(op, argument, *norm, {x.scalar_type()});
  check_dim(op, argument, *norm, 1, "[width]");
  if (other == 0 || norm->size(0) != other) check_size(op, argument, *norm, 0, width, "the numbers that it norms");
  check_contiguous_rows(op, argument, *norm);
  check_same_device(op, argument, *norm, "the input", x);
}

inline void check_norm_options(const char* op, double eps, int64_t form) {
  if (!(eps >= 0.0)) refuse(op, "eps must be at least 0, got ", eps);
  if (form < 0 || form >= kNormForms) refuse(op, "form must be in [0, ", kNormForms, "), got ", form);
}

inline void check_rows(const char* op, const char* argument, const Tensor& x, const char* shape) {
  check_step_input(op, argument, x);
  check_dim(op, argument, x, 2, shape);
}

// cos and sin [N, D'] come together or not at all.
inline void check_rotation(const char* op, const OptionalTensor& cos, const OptionalTensor& sin, const Tensor& x,
                           int64_t rows, int64_t head_dim, const char* cos_name = "cos", const char* sin_name = "sin") {
  if (cos.has_value() != sin.has_value()) refuse(op, "cos and sin must be given together or not at all");
  if (!cos) return;
  check_dtype(op, cos_name, *cos, {x.scalar_type(), ScalarType::Float});
  check_dim(op, cos_name, *cos, 2, "[N, D']");
  check_size(op, cos_name, *cos, 0, rows, "N, the rows of x");
  if (cos->size(1) % 2 != 0 || cos->size(1) > head_dim)
    refuse(op, cos_name, " must have an even number of at most ", head_dim, " (head_dim) in dimension 1, got ",
           describe(*cos));
  check_contiguous_rows(op, cos_name, *cos);
  check_same_device(op, cos_name, *cos, "x", x);
  check_like(op, sin_name, *sin, cos_name, *cos);
  check_contiguous_rows(op, sin_name, *sin);
}

inline void check_activation(const char* op, int64_t activation, double scale, bool has_norm_behind) {
  if (activation < 0 || activation >= kActivations)
    refuse(op, "activation must be in [0, ", kActivations, "), got ", activation);
  if (scale != 1.0 && has_norm_behind) refuse(op, "scale must be 1 beside attention_norm or output_norm, got ", scale);
}

}  // namespace pass_ext
