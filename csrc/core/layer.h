// A decoder layer around its attention, by raw pointers:
//   before attention   q, k, v = rotated(normed(products of normed(x)))
//   after attention    m = residual + o(attended);  out = m + down(activation(gate(n)) up(n)),  n = normed(m)
// Rows of look-ahead slots may have adapters behind each product (core/adapter.h).
#pragma once

#include <cstdint>

#include "core/adapter.h"
#include "core/linear.h"
#include "core/step.h"

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
  const T* weight;  // [outputs, in], rows `row` apart; or null
  const T* bias;    // or null
  int64_t outputs, in, row;
  const void* packed = nullptr;  // in place of `weight`
  PackedForm form = PackedForm::none;
};

struct LayerOptions {
  int64_t head_dim;
  float eps;
  NormForm form;
  Activation activation{};
  float scale = 1.0f;  // of both products that are added to the residual stream
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

// What rows of slots add to the products of either half.
template <typename T>
struct BeforeAdapters {
  AdapterIds ids;
  AdapterWeights<T> q, k, v;
};

template <typename T>
struct AfterAdapters {
  AdapterIds ids;
  AdapterWeights<T> o, gate, up, down;
};

// Rows of cosines and sines, [rows, dim]; cos null: no rotary embedding.
struct Rotation {
  const void *cos = nullptr, *sin = nullptr;
  int64_t cos_row = 0, sin_row = 0, dim = 0;
  bool is_float32 = false;  // else of the layer's type
};

// The product of a linear layer.
template <typename T>
LinearRows<T> rows_of(const LayerLinear<T>& linear, const T* x, T* out, int64_t rows) {
  LinearRows<T> problem{x, linear.weight, linear.bias, out, rows, linear.in, linear.outputs, linear.in, linear.row};
  problem.packed = linear.packed;
  problem.form = linear.form;
  return problem;
}

// A norm of rows that lie side by side; out may be x.
template <typename T>
StepNorm<T> rows_of(const LayerNorm<T>& norm, const T* x, T* out, int64_t rows, const LayerOptions& options) {
  StepNorm<T> problem{};
  problem.rows = rows;
  problem.dim = norm.dim;
  problem.x = RowGroups<T>{x, 1, norm.dim, 0};
  problem.weight = norm.weight;
  problem.out = out;
  problem.eps = options.eps;
  problem.form = options.form;
  return problem;
}

// function(problem) with the rotary embedding of queries and keys [rows, heads, head_dim] as a StepRotary.
template <typename T, typename Function>
void with_rotary(const LayerBefore<T>& layer, const LayerOptions& options, const Rotation& rotation, const T* queries,
                 const T* keys, T* q, T* k, int64_t rows, Function&& function) {
  const int64_t dim = options.head_dim;
  const RotaryHeads<T> query_heads{queries, q, layer.q.outputs / dim, layer.q.outputs, dim};
  const RotaryHeads<T> key_heads{keys, k, layer.k.outputs / dim, layer.k.outputs, dim};
  const auto rotate = [&](auto factor) {
    using S = decltype(factor);
    function(StepRotary<T, S>{query_heads, key_heads, static_cast<const S*>(rotation.cos),
                              static_cast<const S*>(rotation.sin), rotation.cos_row, rotation.sin_row, rows, dim,
                              rotation.dim});
  };
  if (rotation.is_float32)
    rotate(float{});
  else
    rotate(T{});
}

}  // namespace pass_ext
