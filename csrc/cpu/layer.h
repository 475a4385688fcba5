// A decoder layer on the CPU, by raw pointers: chains of the products of cpu/linear.h and the norms and rotations of
// cpu/step.h, with the bits that linear_rows and the step ops give one by one.
//   before attention   q, k, v = rotated(normed(products of normed(x)))
//   after attention    m = residual + o(attended);  out = m + down(activation(gate(n)) up(n)),  n = normed(m)
// Rows of slots may add products of low rank to each product (cpu/linear.h).
#pragma once

#include "core/step.h"
#include "cpu/adapter.h"
#include "cpu/buffer.h"
#include "cpu/linear.h"
#include "cpu/step.h"
#include "host/tensor.h"

namespace pass_ext {

// A norm over `dim` numbers; weight null: there is none.
template <typename T>
struct LayerNorm {
  const T* weight = nullptr;
  int64_t dim = 0;

  explicit operator bool() const { return weight != nullptr && dim > 0; }
};

template <typename T>
struct LayerLinear {
  const T* weight;  // [outputs, in], rows `row` apart
  const T* bias;    // or null
  int64_t outputs, in, row;
};

struct LayerOptions {
  int64_t head_dim;
  float eps;
  NormForm form;
  Activation activation{};
  float scale = 1.0f;  // of both products that are added to the residual stream
};

// The adapters of a layer, for these rows of slots.
template <typename T>
struct LayerAdapters {
  SlotAdapter<T> q, k, v, o, gate, up, down;
};

template <typename T>
struct LayerBefore {
  LayerNorm<T> input_norm, q_norm, k_norm;
  LayerLinear<T> q, k, v;
};

template <typename T>
struct LayerAfter {
  LayerLinear<T> o, gate, up, down;
  LayerNorm<T> attention_norm, mlp_norm, output_norm;
};

// Rows of cosines and sines, [rows, dim]; cos null: no rotary embedding.
struct Rotation {
  const void *cos = nullptr, *sin = nullptr;
  int64_t cos_row = 0, sin_row = 0, dim = 0;
  bool is_float32 = false;  // else of the layer's type
};

inline Rotation rotation_of(const char* op, const OptionalTensor& cos, const OptionalTensor& sin, const Tensor& x) {
  if (!cos) return {};
  return {data_of<void>(op, "cos", *cos),
          data_of<void>(op, "sin", *sin),
          cos->stride(0),
          sin->stride(0),
          cos->size(1),
          cos->scalar_type() != x.scalar_type()};
}

// A thread's room for rows between the steps of a half.
template <typename T>
class LayerRows {
 public:
  explicit LayerRows(int64_t numbers) {
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

// out = the rows of x, normed; out may be x.
template <typename T>
void norm_layer_rows(T* out, const T* x, int64_t rows, const LayerNorm<T>& norm, const LayerOptions& options) {
  StepNorm<T> problem{};
  problem.rows = rows;
  problem.dim = norm.dim;
  problem.x = RowGroups<T>{x, 1, norm.dim, 0};
  problem.weight = norm.weight;
  problem.out = out;
  problem.eps = options.eps;
  problem.form = options.form;
  norm_on_cpu(problem);
}

template <typename T>
LinearRows<T> product_of(const LayerLinear<T>& linear, const SlotAdapter<T>& adapter, const T* x, T* out,
                         int64_t rows) {
  return {x,          linear.weight, linear.bias,    out,
          rows,       linear.in,     linear.outputs, linear.in,
          linear.row, nullptr,       1.0f,           adapter ? &adapter : nullptr};
}

// q, k, v [rows, heads, head_dim]
template <typename T>
void before_attention(const LayerBefore<T>& layer, const LayerAdapters<T>& adapters, const LayerOptions& options,
                      const Rotation& rotation, const T* x, int64_t rows, T* q, T* k, T* v) {
  LayerRows<T> room(rows *
                    ((layer.input_norm ? layer.q.in : 0) + (rotation.cos ? layer.q.outputs + layer.k.outputs : 0)));
  if (layer.input_norm) {
    T* const normed = room.take(rows * layer.q.in);
    norm_layer_rows(normed, x, rows, layer.input_norm, options);
    x = normed;
  }
  T* const queries = rotation.cos ? room.take(rows * layer.q.outputs) : q;
  T* const keys = rotation.cos ? room.take(rows * layer.k.outputs) : k;
  const LinearRows<T> products[] = {product_of(layer.q, adapters.q, x, queries, rows),
                                    product_of(layer.k, adapters.k, x, keys, rows),
                                    product_of(layer.v, adapters.v, x, v, rows)};
  multiply(products, 3);
  if (layer.q_norm) norm_layer_rows(queries, queries, rows * layer.q.outputs / layer.q_norm.dim, layer.q_norm, options);
  if (layer.k_norm) norm_layer_rows(keys, keys, rows * layer.k.outputs / layer.k_norm.dim, layer.k_norm, options);
  if (!rotation.cos) return;
  const int64_t dim = options.head_dim;
  const RotaryHeads<T> query_heads{queries, q, layer.q.outputs / dim, layer.q.outputs, dim};
  const RotaryHeads<T> key_heads{keys, k, layer.k.outputs / dim, layer.k.outputs, dim};
  const auto rotate = [&](auto factor) {
    using S = decltype(factor);
    rotary_on_cpu(StepRotary<T, S>{query_heads, key_heads, static_cast<const S*>(rotation.cos),
                                   static_cast<const S*>(rotation.sin), rotation.cos_row, rotation.sin_row, rows, dim,
                                   rotation.dim});
  };
  if (rotation.is_float32)
    rotate(float{});
  else
    rotate(T{});
}

// out [rows, width]; not residual
template <typename T>
void after_attention(const LayerAfter<T>& layer, const LayerAdapters<T>& adapters, const LayerOptions& options,
                     const T* attended, const T* residual, int64_t rows, T* out) {
  const int64_t numbers = rows * layer.o.outputs, inner = rows * layer.gate.outputs;
  LayerRows<T> room(2 * numbers + inner);
  // to = before + the product, normed or scaled
  const auto add_product = [&](T* to, const LayerLinear<T>& linear, const SlotAdapter<T>& adapter, const T* from,
                               const T* before, const LayerNorm<T>& norm) {
    LinearRows<T> product = product_of(linear, adapter, from, to, rows);
    if (!norm) {
      product.residual = before;
      product.scale = options.scale;
    }
    multiply(&product, 1);
    if (!norm) return;
    norm_layer_rows(to, to, rows, norm, options);
    add_on_cpu(to, before, to, numbers);
  };
  T* const middle = room.take(numbers);
  add_product(middle, layer.o, adapters.o, attended, residual, layer.attention_norm);
  const T* read = middle;
  if (layer.mlp_norm) {
    T* const normed = room.take(numbers);
    norm_layer_rows(normed, middle, rows, layer.mlp_norm, options);
    read = normed;
  }
  T* const hidden = room.take(inner);
  multiply(GatedRows<T>{product_of<T>(layer.gate, adapters.gate, read, nullptr, rows),
                        product_of<T>(layer.up, adapters.up, read, nullptr, rows), hidden, options.activation});
  add_product(out, layer.down, adapters.down, hidden, middle, layer.output_norm);
}

}  // namespace pass_ext
