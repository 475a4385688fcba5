// Checks the arguments of layer_before_attention and layer_after_attention, the same on every device, and packs them
// into the structs of core/layer.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>
#include <tuple>
#include <vector>

#include "core/layer.h"
#include "host/checks.h"
#include "host/dispatch.h"
#include "host/layer_adapters.h"
#include "host/linear.h"
#include "host/step.h"
#include "host/tensor.h"

namespace pass_ext {

// A linear layer of a decoder layer: weight [out, in], or packed, and bias [out] or none.
struct Linear {
  const char* name;
  Tensor weight;
  OptionalTensor bias;

  int64_t outputs() const { return outputs_of(weight); }
};

inline void check_linear(const char* op, const Linear& linear, int64_t in, const Tensor& x) {
  const std::string weight = std::string(linear.name) + "_weight", bias = std::string(linear.name) + "_bias";
  if (is_packed(linear.weight)) {
    check_packed_weight(op, weight.c_str(), linear.weight);
    if (inputs_of(linear.weight) != in)
      refuse(op, weight, " must have blocks of 32 for ", in, " (in, the width of its input) in dimension 1, got ",
             describe(linear.weight));
    if (linear.weight.is_cuda())
      refuse(op, weight, " must be dense on a GPU: packed weights are for the CPU, got ", describe(linear.weight));
  } else {
    check_dtype(op, weight.c_str(), linear.weight, {x.scalar_type()});
    check_dim(op, weight.c_str(), linear.weight, 2, "[out, in]");
    check_size(op, weight.c_str(), linear.weight, 1, in, "in, the width of its input");
    check_below(op, weight.c_str(), linear.weight, 0, kMostLinearOutputs, "outputs");
    check_contiguous_rows(op, weight.c_str(), linear.weight);
  }
  check_same_device(op, weight.c_str(), linear.weight, "the input", x);
  if (!linear.bias) return;
  check_dtype(op, bias.c_str(), *linear.bias, {x.scalar_type()});
  check_dim(op, bias.c_str(), *linear.bias, 1, "[out]");
  check_size(op, bias.c_str(), *linear.bias, 0, linear.outputs(), "out, the rows of its weight");
  check_contiguous_rows(op, bias.c_str(), *linear.bias);
  check_same_device(op, bias.c_str(), *linear.bias, "the input", x);
}

inline void check_outputs(const char* op, const char* argument, const Tensor& weight, int64_t expected,
                          const char* meaning) {
  if (outputs_of(weight) != expected)
    refuse(op, argument, " must have ", expected, " (", meaning, is_packed(weight) ? ") outputs" : ") in dimension 0",
           ", got ", describe(weight));
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

inline Rotation rotation_of(const char* op, const OptionalTensor& cos, const OptionalTensor& sin, const Tensor& x) {
  if (!cos) return {};
  return {data_of<void>(op, "cos", *cos),
          data_of<void>(op, "sin", *sin),
          cos->stride(0),
          sin->stride(0),
          cos->size(1),
          cos->scalar_type() != x.scalar_type()};
}

// The weights of a linear layer and of a norm as pointers.
template <typename T>
LayerLinear<T> pointers_of(const char* op, const Linear& linear) {
  const std::string name = linear.name, weight = name + "_weight";
  const T* const bias = linear.bias ? data_of<T>(op, name + "_bias", *linear.bias) : nullptr;
  const int64_t outputs = linear.outputs(), in = inputs_of(linear.weight);
  if (is_packed(linear.weight))
    return {
        nullptr, bias, outputs, in, 0, data_of<void>(op, weight, linear.weight), packed_form_of(linear.weight.size(2))};
  return {data_of<T>(op, weight, linear.weight), bias, outputs, in, linear.weight.stride(0)};
}

template <typename T>
LayerNorm<T> pointers_of(const char* op, const char* argument, const OptionalTensor& norm) {
  if (!norm) return {};
  return {data_of<T>(op, argument, *norm), norm->size(0)};
}

// ---- the ops with their torch signatures; `Run` computes on the device of its last argument ----

template <typename Run>
std::tuple<Tensor, Tensor, Tensor> layer_before_attention(
    const Tensor& input, const OptionalTensor& input_norm, const Tensor& q_weight, const OptionalTensor& q_bias,
    const Tensor& k_weight, const OptionalTensor& k_bias, const Tensor& v_weight, const OptionalTensor& v_bias,
    const OptionalTensor& q_norm, const OptionalTensor& k_norm, const OptionalTensor& cos, const OptionalTensor& sin,
    int64_t head_dim, double eps, int64_t form, const OptionalTensor& ids, const std::vector<Tensor>& adapters,
    int64_t adapted, double adapter_scale) {
  constexpr const char* op = "layer_before_attention";
  const Linear q{"q", q_weight, q_bias}, k{"k", k_weight, k_bias}, v{"v", v_weight, v_bias};
  check_rows(op, "x", input, "[N, d]");
  const int64_t rows = input.size(0), width = input.size(1);
  check_norm(op, "input_norm", input_norm, width, 0, input);
  if (head_dim < 1) refuse(op, "head_dim must be at least 1, got ", head_dim);
  for (const Linear* linear : {&q, &k, &v}) {
    check_linear(op, *linear, width, input);
    if (linear->outputs() % head_dim != 0)
      refuse(op, linear->name, "_weight must have a multiple of ", head_dim, " (head_dim) in dimension 0, got ",
             describe(linear->weight));
  }
  check_norm(op, "q_norm", q_norm, q.outputs(), head_dim, input);
  check_norm(op, "k_norm", k_norm, k.outputs(), head_dim, input);
  check_norm_options(op, eps, form);
  check_rotation(op, cos, sin, input, rows, head_dim);
  const AdaptedHalf half = adapted_half_of(op, ids, adapters, adapted, adapter_scale,
                                           {{kAdaptsQ, q_weight}, {kAdaptsK, k_weight}, {kAdaptsV, v_weight}}, input);

  const Tensor x = contiguous_of(op, "x", input);
  const auto heads_like = [&](const Linear& linear) {
    return empty_of_shape(op, x, {rows, linear.outputs() / head_dim, head_dim});
  };
  const Tensor q_out = heads_like(q), k_out = heads_like(k), v_out = heads_like(v);
  if (rows == 0) return {q_out, k_out, v_out};
  dispatch_up_to_float32(x.scalar_type(), [&](auto value) {
    using T = type_of<decltype(value)>;
    const LayerBefore<T> layer{pointers_of<T>(op, "input_norm", input_norm),
                               pointers_of<T>(op, "q_norm", q_norm),
                               pointers_of<T>(op, "k_norm", k_norm),
                               pointers_of<T>(op, q),
                               pointers_of<T>(op, k),
                               pointers_of<T>(op, v)};
    const LayerOptions options{head_dim, static_cast<float>(eps), static_cast<NormForm>(form)};
    const BeforeAdapters<T> added{half.pointers(op), half.pointers<T>(op, kAdaptsQ), half.pointers<T>(op, kAdaptsK),
                                  half.pointers<T>(op, kAdaptsV)};
    Run::before(layer, added, options, rotation_of(op, cos, sin, x), data_of<T>(op, "x", x), rows, output_of<T>(q_out),
                output_of<T>(k_out), output_of<T>(v_out), x);
  });
  return {q_out, k_out, v_out};
}

template <typename Run>
Tensor layer_after_attention(const Tensor& attended, const Tensor& residual, const Tensor& o_weight,
                             const OptionalTensor& o_bias, const OptionalTensor& attention_norm,
                             const OptionalTensor& mlp_norm, const Tensor& gate_weight, const OptionalTensor& gate_bias,
                             const Tensor& up_weight, const OptionalTensor& up_bias, const Tensor& down_weight,
                             const OptionalTensor& down_bias, const OptionalTensor& output_norm, double eps,
                             int64_t form, int64_t activation, double scale, const OptionalTensor& ids,
                             const std::vector<Tensor>& adapters, int64_t adapted, double adapter_scale) {
  constexpr const char* op = "layer_after_attention";
  const Linear o{"o", o_weight, o_bias}, gate{"gate", gate_weight, gate_bias}, up{"up", up_weight, up_bias};
  const Linear down{"down", down_weight, down_bias};
  check_rows(op, "attended", attended, "[N, H D]");
  check_rows(op, "residual", residual, "[N, d]");
  check_dtype(op, "residual", residual, {attended.scalar_type()});
  check_size(op, "residual", residual, 0, attended.size(0), "N, the rows of attended");
  check_same_device(op, "residual", residual, "attended", attended);
  const int64_t rows = residual.size(0), width = residual.size(1);
  check_linear(op, o, attended.size(1), attended);
  check_linear(op, gate, width, attended);
  check_linear(op, up, width, attended);
  check_linear(op, down, gate.outputs(), attended);
  check_outputs(op, "o_weight", o.weight, width, "d, the width of residual");
  check_outputs(op, "up_weight", up.weight, gate.outputs(), "the rows of gate_weight");
  check_outputs(op, "down_weight", down.weight, width, "d, the width of residual");
  check_norm(op, "attention_norm", attention_norm, width, 0, attended);
  check_norm(op, "mlp_norm", mlp_norm, width, 0, attended);
  check_norm(op, "output_norm", output_norm, width, 0, attended);
  check_norm_options(op, eps, form);
  check_activation(op, activation, scale, attention_norm || output_norm);
  const AdaptedHalf half = adapted_half_of(
      op, ids, adapters, adapted, adapter_scale,
      {{kAdaptsO, o_weight}, {kAdaptsGate, gate_weight}, {kAdaptsUp, up_weight}, {kAdaptsDown, down_weight}}, attended);

  const Tensor x = contiguous_of(op, "attended", attended), stream = contiguous_of(op, "residual", residual);
  const Tensor out = empty_of_shape(op, stream, {rows, width});
  if (out.numel() == 0) return out;
  dispatch_up_to_float32(x.scalar_type(), [&](auto value) {
    using T = type_of<decltype(value)>;
    const LayerAfter<T> layer{pointers_of<T>(op, o),
                              pointers_of<T>(op, gate),
                              pointers_of<T>(op, up),
                              pointers_of<T>(op, down),
                              pointers_of<T>(op, "attention_norm", attention_norm),
                              pointers_of<T>(op, "mlp_norm", mlp_norm),
                              pointers_of<T>(op, "output_norm", output_norm)};
    const LayerOptions options{0, static_cast<float>(eps), static_cast<NormForm>(form),
                               static_cast<Activation>(activation), static_cast<float>(scale)};
    const AfterAdapters<T> added{half.pointers(op), half.pointers<T>(op, kAdaptsO), half.pointers<T>(op, kAdaptsGate),
                                 half.pointers<T>(op, kAdaptsUp), half.pointers<T>(op, kAdaptsDown)};
    Run::after(layer, added, options, data_of<T>(op, "attended", x), data_of<T>(op, "residual", stream), rows,
               output_of<T>(out), x);
  });
  return out;
}

}  // namespace pass_ext
