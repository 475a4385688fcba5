// torch.ops.pass_ext.layer_stack on the CPU: a model's decoder layers as one call, with the bits of
// layer_before_attention, attention_tree and layer_after_attention called one by one.
//   x <- x + deep[l][slot of the row]                        for rows of slots
//   x <- layer_after_attention(attention_tree(q, k, v), x)   q, k, v = layer_before_attention(x)
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "cpu/attention.h"
#include "cpu/layer.h"
#include "cpu/workers.h"
#include "host/attention.h"
#include "host/layer_stack.h"

namespace pass_ext {
namespace {

using Stacked = std::tuple<Tensor, Tensor, Tensor>;

// One layer's weights as pointers.
template <typename T>
struct StackedLayer {
  LayerBefore<T> before;
  LayerAfter<T> after;
};

template <typename T>
StackedLayer<T> pointers_of(const char* op, const LayerTensors& layer) {
  const auto linear = [&](const char* name, const Tensor* weight, const Tensor* bias) {
    return LayerLinear<T>{data_of<T>(op, name, *weight), bias ? data_of<T>(op, name, *bias) : nullptr, weight->size(0),
                          weight->size(1), weight->stride(0)};
  };
  const auto norm = [&](const char* name, const Tensor* weight) {
    return weight ? LayerNorm<T>{data_of<T>(op, name, *weight), weight->size(0)} : LayerNorm<T>{};
  };
  return {{norm("input_norm", layer.input_norm), norm("q_norm", layer.q_norm), norm("k_norm", layer.k_norm),
           linear("q", layer.q_weight, layer.q_bias), linear("k", layer.k_weight, layer.k_bias),
           linear("v", layer.v_weight, layer.v_bias)},
          {linear("o", layer.o_weight, layer.o_bias), linear("gate", layer.gate_weight, layer.gate_bias),
           linear("up", layer.up_weight, layer.up_bias), linear("down", layer.down_weight, layer.down_bias),
           norm("attention_norm", layer.attention_norm), norm("mlp_norm", layer.mlp_norm),
           norm("output_norm", layer.output_norm)}};
}

// Vectors that rows of slots add to the input of each layer: deep [layers, slots, width], by slot or -1 of each row.
template <typename T>
struct DeepRows {
  const T* deep = nullptr;
  int64_t layer_distance = 0, slot_distance = 0;
  std::vector<int64_t> slots;

  void add(int64_t layer, T* x, int64_t width) const {
    for (size_t row = 0; row < slots.size(); ++row) {
      if (slots[row] < 0) continue;
      T* const to = x + row * width;
      add_on_cpu(to, to, deep + layer * layer_distance + slots[row] * slot_distance, width);
    }
  }
};

template <typename T>
DeepRows<T> deep_rows_of(const char* op, const OptionalTensor& ids, const OptionalTensor& deep) {
  if (!deep) return {};
  DeepRows<T> rows{data_of<T>(op, "deep", *deep), deep->stride(0), deep->stride(1), {}};
  dispatch_index(ids->scalar_type(), [&](auto index) {
    const auto* data = data_of<type_of<decltype(index)>>(op, "ids", *ids);
    for (int64_t row = 0; row < ids->size(0); ++row) {
      const int64_t id = data[row];
      if (id < -deep->size(1))
        refuse(op, "ids must be at least ", -deep->size(1), " (the slots of deep), got ", id, " at ", row);
      rows.slots.push_back(id < 0 ? -1 - id : -1);
    }
  });
  return rows;
}

Stacked layer_stack(const Tensor& input, const std::vector<Tensor>& weights, int64_t parts,
                    const std::vector<Tensor>& caches, const Tensor& prefix_lens, const Tensor& cu_nodes,
                    const Tensor& visible, int64_t max_nodes, const OptionalTensor& depths, const OptionalTensor& cos,
                    const OptionalTensor& sin, const std::vector<int64_t>& rotates, const std::vector<int64_t>& windows,
                    const OptionalTensor& ids, const OptionalTensor& deep, int64_t head_dim, double eps, int64_t form,
                    int64_t activation, double scale, double attention_scale, double softcap) {
  constexpr const char* op = "layer_stack";
  check_rows(op, "x", input, "[N, d]");
  const int64_t rows = input.size(0), width = input.size(1);
  if (head_dim < 1) refuse(op, "head_dim must be at least 1, got ", head_dim);
  check_norm_options(op, eps, form);
  check_activation(op, activation, scale, has_part(parts, kAttentionNorm) || has_part(parts, kOutputNorm));
  const std::vector<LayerTensors> layers = layer_tensors_of(op, weights, parts);
  const int64_t count = static_cast<int64_t>(layers.size());
  const auto check_count = [&](const char* argument, size_t length, int64_t each) {
    if (static_cast<int64_t>(length) != each * count)
      refuse(op, argument, " must have ", each * count, " items (", count, " layers), got ", length);
  };
  check_count("caches", caches.size(), 2);
  check_count("windows", windows.size(), 1);
  check_count("rotates", rotates.size(), 1);
  for (int64_t l = 0; l < count; ++l) check_layer(op, l, layers[l], layers[0], width, head_dim, input);
  check_rotation(op, cos, sin, input, rows, head_dim);
  check_deep(op, ids, deep, input, count);
  const int64_t heads = layers[0].q_weight->size(0) / head_dim, kv_heads = layers[0].k_weight->size(0) / head_dim;

  const Tensor x = contiguous_of(op, "x", input);
  const Tensor out = empty_of_shape(op, x, {rows, width});
  const Tensor k_new = empty_of_shape(op, x, {count, rows, kv_heads, head_dim});
  const Tensor v_new = empty_of_shape(op, x, {count, rows, kv_heads, head_dim});
  const Tensor q = empty_of_shape(op, x, {rows, heads, head_dim});
  check_queries(op, q);

  // One problem for all layers, which differ in caches and windows.
  bool has_window = false;
  for (const int64_t window : windows) has_window |= window != -1;
  AttentionProblem problem{};
  const OptionalTensor none;
  const AttentionResult attended =
      prepare_attention(op,
                        {q, caches[0], caches[1], prefix_lens, cu_nodes, visible, max_nodes, none, none, none, depths,
                         attention_scale, softcap, has_window ? 1 : -1},
                        problem);
  const KeyRows fresh{nullptr, 0, kv_heads * head_dim, head_dim};
  problem.k_new = problem.v_new = fresh;
  problem.k_new.data = problem.v_new.data = problem.q;  // any rows, for check_attention_values
  if (rows == 0 || width == 0) return {out, k_new, v_new};
  const int32_t* const depth_rows = problem.depths;
  for (int64_t l = 0; l < count; ++l) {
    check_layer_cache(op, "k_cache", l, caches[2 * l], caches[0]);
    check_layer_cache(op, "v_cache", l, caches[2 * l + 1], caches[0]);
    check_window(op, windows[l]);
  }
  check_attention_values(op, problem);

  dispatch_up_to_float32(x.scalar_type(), [&](auto value) {
    using T = type_of<decltype(value)>;
    std::vector<StackedLayer<T>> stack;
    for (const LayerTensors& layer : layers) stack.push_back(pointers_of<T>(op, layer));
    const LayerOptions options{head_dim, static_cast<float>(eps), static_cast<NormForm>(form),
                               static_cast<Activation>(activation), static_cast<float>(scale)};
    const Rotation rotation = rotation_of(op, cos, sin, x);
    const DeepRows<T> deep_rows = deep_rows_of<T>(op, ids, deep);
    thread_local Buffer memory;
    T* const queries = const_cast<T*>(static_cast<const T*>(problem.q));
    T* const other = reinterpret_cast<T*>(memory.at_least((rows * width * sizeof(T) + 3) / sizeof(float)));
    T* const buffers[] = {output_of<T>(out), other};  // the last layer writes `out`
    const T* stream = data_of<T>(op, "x", x);
    if (deep) {
      std::copy_n(stream, rows * width, buffers[count % 2]);
      stream = buffers[count % 2];
    }
    const int64_t new_numbers = rows * kv_heads * head_dim;
    with_threads_ready([&] {
      for (int64_t l = 0; l < count; ++l) {
        T* const k = output_of<T>(k_new) + l * new_numbers;
        T* const v = output_of<T>(v_new) + l * new_numbers;
        if (deep) deep_rows.add(l, const_cast<T*>(stream), width);
        before_attention(stack[l].before, options, rotates[l] ? rotation : Rotation{}, stream, rows, queries, k, v);
        problem.k_cache = cache_rows_of(op, "k_cache", caches[2 * l]);
        problem.v_cache = cache_rows_of(op, "v_cache", caches[2 * l + 1]);
        problem.k_new.data = k;
        problem.v_new.data = v;
        problem.window = static_cast<int32_t>(windows[l]);
        problem.depths = windows[l] == -1 ? nullptr : depth_rows;
        attend_on_cpu(problem);
        T* const to = buffers[(count - 1 - l) % 2];
        after_attention(stack[l].after, options, static_cast<const T*>(problem.out), stream, rows, to);
        stream = to;
      }
    });
  });
  return {out, k_new, v_new};
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CPU, library) { library.impl("layer_stack", TORCH_BOX(&pass_ext::layer_stack)); }
