// A decoder layer on the CPU (core/layer.h): chains of the products of cpu/linear.h and the norms and rotations of
// cpu/step.h, with the bits that linear_rows and the step ops give one by one. Rows of slots may add products of low
// rank to each product (cpu/linear.h).
#pragma once

#include "core/layer.h"
#include "cpu/adapter.h"
#include "cpu/buffer.h"
#include "cpu/linear.h"
#include "cpu/step.h"

namespace pass_ext {

// The adapters of a layer, for these rows of slots.
template <typename T>
struct LayerAdapters {
  SlotAdapter<T> q, k, v, o, gate, up, down;
};

// What a half reads behind its products: adapters of the same input, `in` wide.
template <typename T, typename... Adapters>
NextAdapters next_adapters(int64_t in, const Adapters&... adapters) {
  NextAdapters next;
  int place = 0;
  (next.add<T>(place++, adapters, in), ...);
  return next;
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
  norm_on_cpu(rows_of(norm, x, out, rows, options));
}

template <typename T>
AdaptedRows<T> product_of(const LayerLinear<T>& linear, const SlotAdapter<T>& adapter, const T* x, T* out,
                          int64_t rows) {
  return {rows_of(linear, x, out, rows), adapter ? &adapter : nullptr};
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
  const AdaptedRows<T> products[] = {product_of(layer.q, adapters.q, x, queries, rows),
                                     product_of(layer.k, adapters.k, x, keys, rows),
                                     product_of(layer.v, adapters.v, x, v, rows)};
  multiply(products, 3, next_adapters<T>(layer.q.outputs, adapters.o));
  if (layer.q_norm) norm_layer_rows(queries, queries, rows * layer.q.outputs / layer.q_norm.dim, layer.q_norm, options);
  if (layer.k_norm) norm_layer_rows(keys, keys, rows * layer.k.outputs / layer.k_norm.dim, layer.k_norm, options);
  if (!rotation.cos) return;
  with_rotary(layer, options, rotation, queries, keys, q, k, rows, [](const auto& problem) { rotary_on_cpu(problem); });
}

// out [rows, width]; not residual. next: the adapters of the layer behind.
template <typename T>
void after_attention(const LayerAfter<T>& layer, const LayerAdapters<T>& adapters, const LayerAdapters<T>& next,
                     const LayerOptions& options, const T* attended, const T* residual, int64_t rows, T* out) {
  const int64_t numbers = rows * layer.o.outputs, inner = rows * layer.gate.outputs;
  LayerRows<T> room(2 * numbers + inner);
  // to = before + the product, normed or scaled
  const auto add_product = [&](T* to, const LayerLinear<T>& linear, const SlotAdapter<T>& adapter, const T* from,
                               const T* before, const LayerNorm<T>& norm, const NextAdapters& behind) {
    AdaptedRows<T> product = product_of(linear, adapter, from, to, rows);
    if (!norm) {
      product.residual = before;
      product.scale = options.scale;
    }
    multiply(&product, 1, behind);
    if (!norm) return;
    norm_layer_rows(to, to, rows, norm, options);
    add_on_cpu(to, before, to, numbers);
  };
  T* const middle = room.take(numbers);
  add_product(middle, layer.o, adapters.o, attended, residual, layer.attention_norm,
              next_adapters<T>(layer.o.outputs, adapters.gate, adapters.up));
  const T* read = middle;
  if (layer.mlp_norm) {
    T* const normed = room.take(numbers);
    norm_layer_rows(normed, middle, rows, layer.mlp_norm, options);
    read = normed;
  }
  T* const hidden = room.take(inner);
  multiply(GatedRows<T>{product_of<T>(layer.gate, adapters.gate, read, nullptr, rows),
                        product_of<T>(layer.up, adapters.up, read, nullptr, rows), hidden, options.activation},
           next_adapters<T>(layer.down.in, adapters.down));
  add_product(out, layer.down, adapters.down, hidden, middle, layer.output_norm,
              next_adapters<T>(layer.down.outputs, next.q, next.k, next.v));
}

}  // namespace pass_ext
