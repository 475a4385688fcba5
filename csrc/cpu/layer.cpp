// torch.ops.pass_ext.layer_before_attention and layer_after_attention on the CPU: a decoder layer around its attention,
// each half as one call. They chain the products of cpu/linear.h and the norms and rotations of cpu/step.h, and give
// the bits of linear_rows and the step ops called one by one.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "cpu/buffer.h"
#include "cpu/linear.h"
#include "cpu/step.h"
#include "host/layer.h"

namespace pass_ext {
namespace {

// A thread's room for rows between the steps of a half.
template <typename T>
class Rows {
 public:
  explicit Rows(int64_t numbers) {
    thread_local Buffer buffer;
    next_ = reinterpret_cast<T*>(buffer.at_least((numbers * sizeof(T) + sizeof(float) - 1) / sizeof(float)));
  }
  T* take(int64_t numbers) {
    T* const rows = next_;
    next_ += numbers;
    return rows;
  }

 private:
  T* next_;
};

template <typename T>
RowGroups<T> contiguous_rows(const T* data, int64_t width) {
  return {data, 1, width, 0};
}

struct NormOptions {
  float eps;
  NormForm form;
};

// out = the rows of x, normed; out may be x.
template <typename T>
void norm(const char* op, const char* argument, T* out, const T* x, int64_t rows, const Tensor& weight,
          const NormOptions& options) {
  StepNorm<T> problem{};
  problem.rows = rows;
  problem.dim = weight.size(0);
  problem.x = contiguous_rows(x, problem.dim);
  problem.weight = data_of<T>(op, argument, weight);
  problem.out = out;
  problem.eps = options.eps;
  problem.form = options.form;
  norm_on_cpu(problem);
}

template <typename T>
LinearRows<T> product_of(const char* op, const Linear& linear, const T* x, T* out, int64_t rows) {
  const std::string name = linear.name;
  return {x,
          data_of<T>(op, name + "_weight", linear.weight),
          linear.bias ? data_of<T>(op, name + "_bias", *linear.bias) : nullptr,
          out,
          rows,
          linear.weight.size(1),
          linear.outputs(),
          linear.weight.size(1),
          linear.weight.stride(0)};
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
  if (cos.has_value() != sin.has_value()) refuse(op, "cos and sin must be given together or not at all");
  if (cos) {
    check_dtype(op, "cos", *cos, {input.scalar_type(), ScalarType::Float});
    check_dim(op, "cos", *cos, 2, "[N, D']");
    check_size(op, "cos", *cos, 0, rows, "N, the rows of x");
    if (cos->size(1) % 2 != 0 || cos->size(1) > head_dim)
      refuse(op, "cos must have an even number of at most ", head_dim, " (head_dim) in dimension 1, got ",
             describe(*cos));
    check_contiguous_rows(op, "cos", *cos);
    check_same_device(op, "cos", *cos, "x", input);
    check_like(op, "sin", *sin, "cos", *cos);
    check_contiguous_rows(op, "sin", *sin);
  }

  const Tensor x = contiguous_of(op, "x", input);
  const auto heads_like = [&](const Linear& linear) {
    return empty_of_shape(op, x, {rows, linear.outputs() / head_dim, head_dim});
  };
  const Tensor q_out = heads_like(q), k_out = heads_like(k), v_out = heads_like(v);
  if (rows == 0) return {q_out, k_out, v_out};
  dispatch_up_to_float32(x.scalar_type(), [&](auto value) {
    using T = type_of<decltype(value)>;
    const NormOptions options{static_cast<float>(eps), static_cast<NormForm>(form)};
    const int64_t heads = q.outputs() + k.outputs();
    Rows<T> room(rows * ((input_norm ? width : 0) + (cos ? heads : 0)));
    const T* read = data_of<T>(op, "x", x);
    if (input_norm) {
      T* const normed = room.take(rows * width);
      norm(op, "input_norm", normed, read, rows, *input_norm, options);
      read = normed;
    }
    T* const queries = cos ? room.take(rows * q.outputs()) : output_of<T>(q_out);
    T* const keys = cos ? room.take(rows * k.outputs()) : output_of<T>(k_out);
    const LinearRows<T> products[] = {product_of(op, q, read, queries, rows), product_of(op, k, read, keys, rows),
                                      product_of(op, v, read, output_of<T>(v_out), rows)};
    multiply(products, 3);
    if (q_norm && q_norm->size(0) > 0)
      norm(op, "q_norm", queries, queries, rows * q.outputs() / q_norm->size(0), *q_norm, options);
    if (k_norm && k_norm->size(0) > 0)
      norm(op, "k_norm", keys, keys, rows * k.outputs() / k_norm->size(0), *k_norm, options);
    if (!cos) return;
    const auto rotate = [&](auto factor) {
      using S = type_of<decltype(factor)>;
      const auto heads_of = [&](const T* from, const Tensor& to) {
        return RotaryHeads<T>{from, output_of<T>(to), to.size(1), to.size(1) * head_dim, head_dim};
      };
      rotary_on_cpu(StepRotary<T, S>{heads_of(queries, q_out), heads_of(keys, k_out), data_of<S>(op, "cos", *cos),
                                     data_of<S>(op, "sin", *sin), cos->stride(0), sin->stride(0), rows, head_dim,
                                     cos->size(1)});
    };
    if (cos->scalar_type() == x.scalar_type())
      rotate(TypeTag<T>{});
    else
      rotate(TypeTag<float>{});
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
  if (activation < 0 || activation >= kActivations)
    refuse(op, "activation must be in [0, ", kActivations, "), got ", activation);
  if (scale != 1.0 && (attention_norm || output_norm))
    refuse(op, "scale must be 1 beside attention_norm or output_norm, got ", scale);

  const Tensor x = contiguous_of(op, "attended", attended), stream = contiguous_of(op, "residual", residual);
  const Tensor out = empty_of_shape(op, stream, {rows, width});
  if (out.numel() == 0) return out;
  dispatch_up_to_float32(x.scalar_type(), [&](auto value) {
    using T = type_of<decltype(value)>;
    const NormOptions options{static_cast<float>(eps), static_cast<NormForm>(form)};
    const int64_t numbers = rows * width;
    Rows<T> room(2 * numbers + rows * gate.outputs());
    // to = before + the product, normed or scaled
    const auto add_product = [&](T* to, const Linear& linear, const T* from, const T* before, const char* argument,
                                 const OptionalTensor& weight) {
      LinearRows<T> product = product_of(op, linear, from, to, rows);
      if (!weight) {
        product.residual = before;
        product.scale = static_cast<float>(scale);
      }
      multiply(&product, 1);
      if (!weight) return;
      norm(op, argument, to, to, rows, *weight, options);
      add_on_cpu(to, before, to, numbers);
    };
    T* const middle = room.take(numbers);
    add_product(middle, o, data_of<T>(op, "attended", x), data_of<T>(op, "residual", stream), "attention_norm",
                attention_norm);
    const T* read = middle;
    if (mlp_norm) {
      T* const normed = room.take(numbers);
      norm(op, "mlp_norm", normed, middle, rows, *mlp_norm, options);
      read = normed;
    }
    T* const hidden = room.take(rows * gate.outputs());
    multiply(GatedRows<T>{product_of<T>(op, gate, read, nullptr, rows), product_of<T>(op, up, read, nullptr, rows),
                          hidden, static_cast<Activation>(activation)});
    add_product(output_of<T>(out), down, hidden, middle, "output_norm", output_norm);
  });
  return out;
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CPU, library) {
  library.impl("layer_before_attention", TORCH_BOX(&pass_ext::layer_before_attention));
  library.impl("layer_after_attention", TORCH_BOX(&pass_ext::layer_after_attention));
}
