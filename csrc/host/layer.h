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

}  // namespace pass_ext
