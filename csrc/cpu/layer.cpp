// torch.ops.pass_ext.layer_before_attention and layer_after_attention on the CPU: a decoder layer around its attention,
// each half as one call (cpu/layer.h).
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "cpu/layer.h"
#include "host/layer.h"

namespace pass_ext {
namespace {

// The weights of a linear layer and of a norm as pointers.
template <typename T>
LayerLinear<T> pointers_of(const char* op, const Linear& linear) {
  const std::string name = linear.name;
  return {data_of<T>(op, name + "_weight", linear.weight),
          linear.bias ? data_of<T>(op, name + "_bias", *linear.bias) : nullptr, linear.outputs(), linear.weight.size(1),
          linear.weight.stride(0)};
}

template <typename T>
LayerNorm<T> pointers_of(const char* op, const char* argument, const OptionalTensor& norm) {
  if (!norm) return {};
  return {data_of<T>(op, argument, *norm), norm->size(0)};
}

// ---- before attention ----

std::tuple<Tensor, Tensor, Tensor> layer_before_attention(const Tensor& input, const OptionalTensor& input_norm,
                                                          const Tensor& q_weight, const OptionalTensor& q_bias,
                                                          const Tensor& k_weight, const OptionalTensor& k_bias,
                                                          const Tensor& v_weight, const OptionalTensor& v_bias,
                                                          const OptionalTensor& q_norm, const OptionalTensor& k_norm,
                                                          const OptionalTensor& cos, const OptionalTensor& sin,
                                                          int64_t head_dim, double eps, int64_t form) {
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
    before_attention(layer, {}, options, rotation_of(op, cos, sin, x), data_of<T>(op, "x", x), rows,
                     output_of<T>(q_out), output_of<T>(k_out), output_of<T>(v_out));
  });
  return {q_out, k_out, v_out};
}

// ---- after attention ----

Tensor layer_after_attention(const Tensor& attended, const Tensor& residual, const Tensor& o_weight,
                             const OptionalTensor& o_bias, const OptionalTensor& attention_norm,
                             const OptionalTensor& mlp_norm, const Tensor& gate_weight, const OptionalTensor& gate_bias,
                             const Tensor& up_weight, const OptionalTensor& up_bias, const Tensor& down_weight,
                             const OptionalTensor& down_bias, const OptionalTensor& output_norm, double eps,
                             int64_t form, int64_t activation, double scale) {
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
  check_size(op, "o_weight", o.weight, 0, width, "d, the width of residual");
  check_size(op, "up_weight", up.weight, 0, gate.outputs(), "the rows of gate_weight");
  check_size(op, "down_weight", down.weight, 0, width, "d, the width of residual");
  check_norm(op, "attention_norm", attention_norm, width, 0, attended);
  check_norm(op, "mlp_norm", mlp_norm, width, 0, attended);
  check_norm(op, "output_norm", output_norm, width, 0, attended);
  check_norm_options(op, eps, form);
  check_activation(op, activation, scale, attention_norm || output_norm);

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
    after_attention(layer, {}, options, data_of<T>(op, "attended", x), data_of<T>(op, "residual", stream), rows,
                    output_of<T>(out));
  });
  return out;
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CPU, library) {
  library.impl("layer_before_attention", TORCH_BOX(&pass_ext::layer_before_attention));
  library.impl("layer_after_attention", TORCH_BOX(&pass_ext::layer_after_attention));
}
