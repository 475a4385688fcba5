// torch.ops.pass_ext.layer_stack on the CPU: a model's decoder layers as one call, with the bits of
// layer_before_attention, attention_tree, layer_after_attention, step_rms_norm and linear_rows called one by one.
//   x <- x + deep[l][slot of the row]                        for rows of slots
//   x <- layer_after_attention(attention_tree(q, k, v), x)   q, k, v = layer_before_attention(x)
//        with q, k, v of first_input, not normed             in layer 0, if there is one
//        with quantize_rows of k and v                       if the caches are in 8 bits
//        with adapter_rows_ behind each product              for rows of slots
//   states[i] = x                                            in front of layer taps[i]; taps[i] = layers: behind the
//   last out = head normed(x[wanted])                             behind the last layer
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "cpu/attention.h"
#include "cpu/layer_pack.h"
#include "cpu/quantize.h"
#include "cpu/workers.h"
#include "host/attention.h"
#include "host/cache.h"
#include "host/layer_stack.h"

namespace pass_ext {
namespace {

using Stacked = std::tuple<Tensor, Tensor, Tensor>;

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

// The rows of slots by their adapter; empty without adapters.
RowsByAdapter slots_of(const char* op, const OptionalTensor& ids, int64_t adapters) {
  RowsByAdapter slots;
  if (adapters > 0)
    dispatch_index(ids->scalar_type(), [&](auto index) {
      using Id = type_of<decltype(index)>;
      slots = rows_by_adapter(op, data_of<Id>(op, "ids", *ids), ids->size(0), adapters);
    });
  return slots;
}

// Each layer's adapters as pointers; none where no row is a slot's.
template <typename T>
std::vector<LayerAdapters<T>> pointers_of(const char* op, const StackAdapters& adapters, const RowsByAdapter& slots,
                                          double scale, int64_t layers) {
  std::vector<LayerAdapters<T>> result(layers);
  if (slots.rows.empty()) return result;
  for (int i = 0; i < kAdapterLinears; ++i) {
    const auto& [down, up, place] = adapters.of[i];
    if (!down || down->size(2) == 0) continue;
    const auto name = [&](int64_t at) { return "adapters[" + std::to_string(at) + "]"; };
    const T *const downs = data_of<T>(op, name(place), *down), *const ups = data_of<T>(op, name(place + 1), *up);
    for (int64_t l = 0; l < layers; ++l) {
      LayerAdapters<T>& layer = result[l];
      SlotAdapter<T>* const each[] = {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down};
      *each[i] = {downs + l * down->stride(0), ups + l * up->stride(0), down->size(2), &slots,
                  static_cast<float>(scale)};
    }
  }
  return result;
}

// Rotary embeddings, of cos and sin each: none, one [N, D'], or K [K, N, D'].
struct RotationTables {
  std::vector<OptionalTensor> cos, sin;

  // N: the rows of x; with positions any number.
  RotationTables(const char* op, const OptionalTensor& all_cos, const OptionalTensor& all_sin,
                 const OptionalTensor& positions, const Tensor& x, int64_t head_dim) {
    const bool are_several = all_cos && all_sin && all_cos->dim() == 3;
    if (are_several) {
      check_like(op, "sin", *all_sin, "cos", *all_cos);
      data_of<void>(op, "cos", *all_cos);  // refuses a tensor without its storage, of which select has no part
      data_of<void>(op, "sin", *all_sin);
      if (all_cos->size(0) == 0) refuse(op, "cos must have 1 or more rotary embeddings, got ", describe(*all_cos));
      for (int64_t i = 0; i < all_cos->size(0); ++i) {
        cos.push_back(torch::stable::select(*all_cos, 0, i));
        sin.push_back(torch::stable::select(*all_sin, 0, i));
      }
    } else {
      cos = {all_cos};
      sin = {all_sin};
    }
    const bool has_places = positions && cos[0] && cos[0]->dim() > 0;
    check_rotation(op, cos[0], sin[0], x, has_places ? cos[0]->size(0) : x.size(0), head_dim,
                   are_several ? "cos[0]" : "cos", are_several ? "sin[0]" : "sin");  // the others are like it
  }
  int64_t size() const { return static_cast<int64_t>(cos.size()); }
};

// Item 0: no rotary embedding. Behind it those of the tables: their rows at the positions, copied, or as they come.
template <typename T>
std::vector<Rotation> rotations_of_rows(const char* op, const RotationTables& tables, const OptionalTensor& positions,
                                        const Tensor& x) {
  std::vector<Rotation> rotations(1);
  for (int64_t i = 0; i < tables.size(); ++i) rotations.push_back(rotation_of(op, tables.cos[i], tables.sin[i], x));
  if (!positions || !tables.cos[0]) return rotations;
  const int64_t rows = x.size(0), places = tables.cos[0]->size(0), element = rotations[1].is_float32 ? 4 : sizeof(T);
  const int64_t bytes = rotations[1].dim * element;
  const int64_t* const place = data_of<int64_t>(op, "positions", *positions);
  for (int64_t row = 0; row < rows; ++row)
    if (place[row] < 0 || place[row] >= places)
      refuse(op, "positions must be in [0, ", places, ") (the rows of cos), got ", place[row], " at ", row);
  thread_local Buffer memory;
  char* to = reinterpret_cast<char*>(memory.at_least((2 * tables.size() * rows * bytes + 3) / sizeof(float)));
  const auto copy = [&](const void*& table, int64_t& row_numbers) {
    const char* const from = static_cast<const char*>(table);
    table = to;
    for (int64_t row = 0; row < rows; ++row, to += bytes)
      std::memcpy(to, from + place[row] * row_numbers * element, bytes);
    row_numbers = bytes / element;
  };
  for (int64_t i = 1; i <= tables.size(); ++i) {
    copy(rotations[i].cos, rotations[i].cos_row);
    copy(rotations[i].sin, rotations[i].sin_row);
  }
  return rotations;
}

// The rows of x that `wanted` names.
template <typename T>
std::vector<T> wanted_rows(const char* op, const T* x, int64_t rows, int64_t width, const Tensor& wanted) {
  std::vector<T> result(wanted.size(0) * width);
  const int64_t* const indices = data_of<int64_t>(op, "wanted", wanted);
  for (int64_t i = 0; i < wanted.size(0); ++i) {
    if (indices[i] < 0 || indices[i] >= rows)
      refuse(op, "wanted must be in [0, ", rows, ") (the rows of x), got ", indices[i], " at ", i);
    std::copy_n(x + indices[i] * width, width, result.data() + i * width);
  }
  return result;
}

// Refuses rows and options that the layers were not packed for.
void check_packed(const char* op, const PackedLayers& packed, int64_t parts, int64_t head_dim, const Tensor& x,
                  const Tensor& first_input) {
  check_dtype(op, "x", x, {packed.type});
  check_size(op, "x", x, 1, packed.width, "d, of the packed layers");
  check_size(op, "first_input", first_input, 1, packed.reads, "in, of layer 0's q_weight");
  const auto check_same = [&](const char* argument, int64_t got, int64_t expected) {
    if (got != expected) refuse(op, argument, " must be ", expected, ", of the packed layers, got ", got);
  };
  check_same("parts", parts, packed.parts);
  check_same("head_dim", head_dim, packed.head_dim);
}

Stacked layer_stack(const Tensor& input, const OptionalTensor& first_input, const std::vector<Tensor>& weights,
                    int64_t parts, const TensorList& cache_list, const Tensor& prefix_lens, const Tensor& cu_nodes,
                    const Tensor& visible, int64_t max_nodes, const OptionalTensor& depths, const OptionalTensor& cos,
                    const OptionalTensor& sin, const OptionalTensor& positions, const std::vector<int64_t>& rotates,
                    const std::vector<int64_t>& windows, const OptionalTensor& ids, const OptionalTensor& deep,
                    const std::vector<Tensor>& adapters, int64_t adapted, double adapter_scale,
                    const OptionalTensor& final_norm, const OptionalTensor& head, const OptionalTensor& wanted,
                    const std::vector<int64_t>& taps, int64_t head_dim, double eps, int64_t form, int64_t activation,
                    double scale, double attention_scale, double softcap) {
  constexpr const char* op = "layer_stack";
  check_rows(op, "x", input, "[N, d]");
  const int64_t rows = input.size(0), width = input.size(1);
  if (head_dim < 1) refuse(op, "head_dim must be at least 1, got ", head_dim);
  check_norm_options(op, eps, form);
  check_activation(op, activation, scale, has_part(parts, kAttentionNorm) || has_part(parts, kOutputNorm));
  if (first_input) {
    check_rows(op, "first_input", *first_input, "[N, in]");
    check_dtype(op, "first_input", *first_input, {input.scalar_type()});
    check_size(op, "first_input", *first_input, 0, rows, "N, the rows of x");
    check_same_device(op, "first_input", *first_input, "x", input);
  }
  const Tensor& first = first_input ? *first_input : input;
  const std::shared_ptr<const PackedLayers> packed = is_key(weights) ? packed_layers_of(op, weights[0]) : nullptr;
  if (packed) check_packed(op, *packed, parts, head_dim, input, first);
  const CheckedLayers listed =
      packed ? CheckedLayers{} : check_layers(op, weights, parts, head_dim, width, first.size(1), input);
  const CheckedLayers& checked = packed ? packed->layers : listed;
  const std::vector<LayerTensors>& layers = checked.tensors;
  const int64_t count = static_cast<int64_t>(layers.size());
  const auto check_count = [&](const char* argument, size_t length, int64_t each) {
    if (static_cast<int64_t>(length) != each * count)
      refuse(op, argument, " must have ", each * count, " items (", count, " layers), got ", length);
  };
  const TensorStack caches(cache_list, 4);
  check_count("caches", caches.size(), 2);
  check_count("windows", windows.size(), 1);
  check_count("rotates", rotates.size(), 1);
  check_places(op, "positions", positions, input);
  if (positions) check_size(op, "positions", *positions, 0, rows, "N, the rows of x");
  const RotationTables tables(op, cos, sin, positions, input, head_dim);
  for (const int64_t rotation : rotates)
    if (rotation < 0 || rotation > tables.size())
      refuse(op, "rotates must be in [0, ", tables.size(), "] (0 for none), got ", rotation);
  check_slots(op, ids, deep, !adapters.empty(), input, count);
  const StackAdapters stacked_adapters = stack_adapters_of(op, adapters, adapted, scale, layers, input);
  check_norm(op, "final_norm", final_norm, width, 0, input);
  check_places(op, "wanted", wanted, input);
  if (head) check_linear(op, {"head", *head, {}}, width, input);
  const int64_t heads = outputs_of(*layers[0].q_weight) / head_dim;
  const int64_t kv_heads = outputs_of(*layers[0].k_weight) / head_dim;

  const Tensor x = contiguous_of(op, "x", input);
  const Tensor first_rows = contiguous_of(op, "first_input", first);
  const int64_t out_rows = wanted ? wanted->size(0) : rows;
  const Tensor out = empty_of_shape(op, x, {out_rows, head ? outputs_of(*head) : width});
  const CodeType codes = codes_of(caches.tensor(0).scalar_type());
  const int64_t row_width = head_dim + (codes == CodeType::none ? 0 : kCodeHeader);  // of a key or value in the caches
  const Tensor fresh_rows = empty_of_shape(op, x, {2 * count, rows, kv_heads, row_width},
                                           codes == CodeType::none ? x.scalar_type() : caches.tensor(0).scalar_type());
  const Tensor q = empty_of_shape(op, x, {rows, heads, head_dim});
  check_queries(op, q);
  for (const int64_t tap : taps)
    if (tap < 0 || tap > count)
      refuse(op, "taps must be in [0, ", count, "] (", count, " for the rows after the last layer), got ", tap);
  const Tensor states = empty_of_shape(op, x, {static_cast<int64_t>(taps.size()), rows, width});

  std::vector<KeyRows> cache_rows;
  for (int64_t i = 0; i < 2 * count; ++i) {
    const Tensor& cache = caches.tensor(i);
    const int64_t front = caches.is_stacked ? 1 : 0;
    check_dim(op, "caches", cache, front + 4, front ? "[2 layers, B, S, Hk, D]" : "[B, S, Hk, D] each");
    cache_rows.push_back({caches.address<const void>(op, "caches", i), cache.stride(front), cache.stride(front + 1),
                          cache.stride(front + 2)});
  }
  // One problem for all layers, which differ in caches and windows.
  const auto cache_at = [&](int64_t i) {
    return caches.is_stacked ? torch::stable::select(cache_list[0], 0, i) : cache_list[i];
  };
  const Tensor first_keys = cache_at(0), first_values = cache_at(1);
  bool has_window = false;
  for (const int64_t window : windows) has_window |= window != -1;
  AttentionProblem problem{};
  const OptionalTensor none;
  const AttentionResult attended =
      prepare_attention(op,
                        {q, first_keys, first_values, prefix_lens, cu_nodes, visible, max_nodes, none, none, none,
                         depths, attention_scale, softcap, has_window ? 1 : -1, none, -1, codes},
                        problem);
  const KeyRows fresh_layout{nullptr, 0, kv_heads * row_width, row_width};
  problem.k_new = problem.v_new = fresh_layout;
  problem.k_new.data = problem.v_new.data = problem.q;  // any rows, for check_attention_values
  if (rows == 0 || width == 0) return {out, fresh_rows, states};
  const int32_t* const depth_rows = problem.depths;
  for (int64_t l = 0; l < count; ++l) {
    for (int64_t i = 2 * l; i < 2 * l + 2 && !caches.is_stacked; ++i)
      check_layer_cache(op, i, cache_list[i], first_keys);
    check_window(op, windows[l]);
  }
  check_attention_values(op, problem);

  dispatch_up_to_float32(x.scalar_type(), [&](auto value) {
    using T = type_of<decltype(value)>;
    const StackedLayers<T>& stack = std::get<StackedLayers<T>>(checked.pointers);
    const LayerOptions options{head_dim, static_cast<float>(eps), static_cast<NormForm>(form),
                               static_cast<Activation>(activation), static_cast<float>(scale)};
    const std::vector<Rotation> rotations = rotations_of_rows<T>(op, tables, positions, x);
    const LayerNorm<T> norm =
        final_norm ? LayerNorm<T>{data_of<T>(op, "final_norm", *final_norm), width} : LayerNorm<T>{};
    LayerLinear<T> logits{};
    if (head) logits = pointers_of<T>(op, Linear{"head", *head, {}});
    const DeepRows<T> deep_rows = deep_rows_of<T>(op, ids, deep);
    const RowsByAdapter slots = slots_of(op, ids, stacked_adapters.count);
    const std::vector<LayerAdapters<T>> added = pointers_of<T>(op, stacked_adapters, slots, adapter_scale, count);
    const LayerAdapters<T> no_adapters;
    thread_local Buffer memory;
    T* const queries = const_cast<T*>(static_cast<const T*>(problem.q));
    T* const room =
        reinterpret_cast<T*>(memory.at_least(((2 * rows + out_rows) * width * sizeof(T) + 3) / sizeof(float)));
    T* const buffers[] = {room, room + rows * width};
    const T* stream = data_of<T>(op, "x", x);
    if (deep) {
      std::copy_n(stream, rows * width, buffers[1]);
      stream = buffers[1];
    }
    const int64_t new_numbers = rows * kv_heads * head_dim;
    const int64_t new_bytes = rows * kv_heads * row_width * (codes == CodeType::none ? int64_t{sizeof(T)} : 1);
    thread_local Buffer uncoded;  // a layer's keys and values in front of their codes
    T* const numbers = codes == CodeType::none
                           ? nullptr
                           : reinterpret_cast<T*>(uncoded.at_least((2 * new_numbers * sizeof(T) + 3) / sizeof(float)));
    T* const tapped = output_of<T>(states);
    const auto keep_state = [&](int64_t l) {
      for (size_t i = 0; i < taps.size(); ++i)
        if (taps[i] == l) std::copy_n(stream, rows * width, tapped + i * rows * width);
    };
    const auto run_layer = [&](int64_t l) {
      char* const fresh = output_of<char>(fresh_rows) + 2 * l * new_bytes;
      T* const k = numbers ? numbers : reinterpret_cast<T*>(fresh);
      T* const v = k + new_numbers;
      if (deep) deep_rows.add(l, const_cast<T*>(stream), width);
      keep_state(l);
      if (l == 0 && first_input) {
        LayerBefore<T> of_given = stack[0].before;
        of_given.input_norm = {};
        before_attention(of_given, added[0], options, rotations[rotates[0]], data_of<T>(op, "first_input", first_rows),
                         rows, queries, k, v);
      } else {
        before_attention(stack[l].before, added[l], options, rotations[rotates[l]], stream, rows, queries, k, v);
      }
      problem.k_cache = cache_rows[2 * l];
      problem.v_cache = cache_rows[2 * l + 1];
      if (numbers)
        quantize_on_cpu(QuantizeRows<T>{{k, 2 * rows * kv_heads, 0, head_dim},
                                        reinterpret_cast<uint8_t*>(fresh),
                                        2 * rows * kv_heads,
                                        head_dim,
                                        codes});
      problem.k_new.data = fresh;
      problem.v_new.data = fresh + new_bytes;
      problem.window = static_cast<int32_t>(windows[l]);
      problem.depths = windows[l] == -1 ? nullptr : depth_rows;
      attend_on_cpu(problem, codes);
      T* const to = buffers[l % 2];
      const LayerAdapters<T>& next = l + 1 < count ? added[l + 1] : no_adapters;
      after_attention(stack[l].after, added[l], next, options, static_cast<const T*>(problem.out), stream, rows, to);
      stream = to;
    };
    const auto finish = [&] {
      std::vector<T> chosen;
      if (wanted) {
        chosen = wanted_rows(op, stream, rows, width, *wanted);
        stream = chosen.data();
      }
      T* const result = output_of<T>(out);
      T* const normed = head ? room + 2 * rows * width : result;
      if (norm) norm_layer_rows(normed, stream, out_rows, norm, options);
      const T* const last = norm ? normed : stream;
      if (head) {
        const AdaptedRows<T> product = product_of(logits, {}, last, result, out_rows);
        multiply(&product, 1);
      } else if (!norm) {
        std::copy_n(last, out_rows * width, result);
      }
    };
    with_threads_ready([&] {
      for (int64_t l = 0; l < count; ++l) run_layer(l);
      keep_state(count);
      if (out_rows > 0) finish();
    });
  });
  return {out, fresh_rows, states};
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("layer_stack", TORCH_BOX(&pass_ext::layer_stack));
}
