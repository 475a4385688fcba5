// Checks layer_stack's arguments, and takes its list of weights apart.
#pragma once

#include <string>
#include <vector>

#include "host/attention.h"
#include "host/layer.h"
#include "host/layer_adapters.h"

namespace pass_ext {

// What a layer may have, in the order of its tensors in the list: that of the arguments of layer_before_attention, then
// of layer_after_attention.
enum LayerPart {
  kInputNorm,
  kQWeight,
  kQBias,
  kKWeight,
  kKBias,
  kVWeight,
  kVBias,
  kQNorm,
  kKNorm,
  kOWeight,
  kOBias,
  kAttentionNorm,
  kMlpNorm,
  kGateWeight,
  kGateBias,
  kUpWeight,
  kUpBias,
  kDownWeight,
  kDownBias,
  kOutputNorm,
  kLayerParts
};

constexpr const char* kLayerPartNames[kLayerParts] = {
    "input_norm", "q_weight",  "q_bias",   "k_weight",    "k_bias",         "v_weight",   "v_bias",
    "q_norm",     "k_norm",    "o_weight", "o_bias",      "attention_norm", "mlp_norm",   "gate_weight",
    "gate_bias",  "up_weight", "up_bias",  "down_weight", "down_bias",      "output_norm"};

inline bool has_part(int64_t parts, LayerPart part) { return parts >> part & 1; }

// One layer's tensors; null: it has none.
struct LayerTensors {
  const Tensor *input_norm, *q_weight, *q_bias, *k_weight, *k_bias, *v_weight, *v_bias, *q_norm, *k_norm;
  const Tensor *o_weight, *o_bias, *attention_norm, *mlp_norm, *gate_weight, *gate_bias, *up_weight, *up_bias;
  const Tensor *down_weight, *down_bias, *output_norm;
};

// The list, layer by layer. parts: bit i is set if every layer has part i.
inline std::vector<LayerTensors> layer_tensors_of(const char* op, const std::vector<Tensor>& weights, int64_t parts) {
  if (parts < 0 || parts >> kLayerParts) refuse(op, "parts must be in [0, 2^", int{kLayerParts}, "), got ", parts);
  int64_t each = 0;
  for (int part = 0; part < kLayerParts; ++part) each += has_part(parts, static_cast<LayerPart>(part));
  for (const LayerPart part : {kQWeight, kKWeight, kVWeight, kOWeight, kGateWeight, kUpWeight, kDownWeight})
    if (!has_part(parts, part)) refuse(op, "parts must have ", kLayerPartNames[part], ", got ", parts);
  const int64_t length = static_cast<int64_t>(weights.size());
  if (length == 0 || length % each != 0)
    refuse(op, "weights must have ", each, " tensors for each of 1 or more layers (parts ", parts, "), got ", length);
  std::vector<LayerTensors> layers;
  layers.reserve(length / each);
  const Tensor* next = weights.data();
  for (int64_t l = 0; l < length / each; ++l) {
    const Tensor* tensors[kLayerParts];
    for (int part = 0; part < kLayerParts; ++part)
      tensors[part] = has_part(parts, static_cast<LayerPart>(part)) ? next++ : nullptr;
    layers.push_back({tensors[kInputNorm], tensors[kQWeight],    tensors[kQBias],    tensors[kKWeight],
                      tensors[kKBias],     tensors[kVWeight],    tensors[kVBias],    tensors[kQNorm],
                      tensors[kKNorm],     tensors[kOWeight],    tensors[kOBias],    tensors[kAttentionNorm],
                      tensors[kMlpNorm],   tensors[kGateWeight], tensors[kGateBias], tensors[kUpWeight],
                      tensors[kUpBias],    tensors[kDownWeight], tensors[kDownBias], tensors[kOutputNorm]});
  }
  return layers;
}

// Refuses a layer's tensors that do not fit each other, or heads of other numbers than the first layer's. reads: the
// numbers of a row that q, k and v multiply.
inline void check_layer(const char* op, int64_t index, const LayerTensors& layer, const LayerTensors& first,
                        int64_t width, int64_t reads, int64_t head_dim, const Tensor& x) {
  const std::string place = std::string(op) + ": layer " + std::to_string(index);
  const char* const where = place.c_str();
  const auto linear = [&](const char* name, const Tensor* weight, const Tensor* bias, int64_t outputs, int64_t in,
                          const char* meaning) {
    check_linear(where, {name, *weight, bias ? OptionalTensor(*bias) : OptionalTensor()}, in, x);
    check_outputs(where, (std::string(name) + "_weight").c_str(), *weight, outputs, meaning);
  };
  const auto norm = [&](const char* name, const Tensor* weight, int64_t numbers, int64_t other) {
    if (weight) check_norm(where, name, *weight, numbers, other, x);
  };
  const int64_t queries = outputs_of(*first.q_weight), keys = outputs_of(*first.k_weight);
  const int64_t inner = outputs_of(*layer.gate_weight);
  if (queries % head_dim != 0 || keys % head_dim != 0)
    refuse(where, "q_weight and k_weight must have multiples of ", head_dim, " (head_dim) in dimension 0, got ",
           describe(*first.q_weight), " and ", describe(*first.k_weight));
  linear("q", layer.q_weight, layer.q_bias, queries, reads, "as in layer 0");
  linear("k", layer.k_weight, layer.k_bias, keys, reads, "as in layer 0");
  linear("v", layer.v_weight, layer.v_bias, keys, reads, "as k_weight of layer 0");
  linear("o", layer.o_weight, layer.o_bias, width, queries, "d, the width of x");
  linear("gate", layer.gate_weight, layer.gate_bias, inner, width, "its own");
  linear("up", layer.up_weight, layer.up_bias, inner, width, "the rows of gate_weight");
  linear("down", layer.down_weight, layer.down_bias, width, inner, "d, the width of x");
  norm("input_norm", layer.input_norm, width, 0);
  norm("q_norm", layer.q_norm, queries, head_dim);
  norm("k_norm", layer.k_norm, keys, head_dim);
  norm("attention_norm", layer.attention_norm, width, 0);
  norm("mlp_norm", layer.mlp_norm, width, 0);
  norm("output_norm", layer.output_norm, width, 0);
}

// Refuses a cache that has not the shape and dtype of the first one.
inline void check_layer_cache(const char* op, int64_t index, const Tensor& cache, const Tensor& first) {
  const std::string argument = "caches[" + std::to_string(index) + "]";
  check_like(op, argument.c_str(), cache, "caches[0]", first);
  check_contiguous_rows(op, argument.c_str(), cache);
}

// Rows or positions, [n] int64.
inline void check_places(const char* op, const char* argument, const OptionalTensor& places, const Tensor& x) {
  if (!places) return;
  check_dtype(op, argument, *places, {ScalarType::Long});
  check_dim(op, argument, *places, 1, "[n]");
  check_contiguous_rows(op, argument, *places);
  check_same_device(op, argument, *places, "x", x);
}

// ids [N] are for deep [layers, slots, d] and adapters.
inline void check_slots(const char* op, const OptionalTensor& ids, const OptionalTensor& deep, bool has_adapters,
                        const Tensor& x, int64_t layers) {
  if (ids.has_value() != (deep || has_adapters))
    refuse(op, "ids must come with deep or adapters, got ", ids ? "ids alone" : deep ? "only deep" : "only adapters");
  if (!ids) return;
  check_dtype(op, "ids", *ids, {ScalarType::Int, ScalarType::Long});
  check_dim(op, "ids", *ids, 1, "[N]");
  check_size(op, "ids", *ids, 0, x.size(0), "N, the rows of x");
  check_contiguous_rows(op, "ids", *ids);
  check_same_device(op, "ids", *ids, "x", x);
  if (!deep) return;
  check_dtype(op, "deep", *deep, {x.scalar_type()});
  check_dim(op, "deep", *deep, 3, "[layers, slots, d]");
  check_size(op, "deep", *deep, 0, layers, "layers");
  check_size(op, "deep", *deep, 2, x.size(1), "d, the width of x");
  check_contiguous_rows(op, "deep", *deep);
  check_same_device(op, "deep", *deep, "x", x);
}

// The adapters of one linear layer in all decoder layers, [layers, K, r, in] and [layers, K, r, out]; null: it has
// none.
struct AdapterTensors {
  const Tensor *down = nullptr, *up = nullptr;
  int64_t place = 0;  // of down in the list, in front of up
};
struct StackAdapters {
  AdapterTensors of[kAdapterLinears];
  int64_t count = 0;  // K
};

// The list: a down and an up for each linear layer whose bit is set in `adapted`. All have as many adapters as the
// first; a number of `scale` beside o's and down's would have to come between product and adapter.
inline StackAdapters stack_adapters_of(const char* op, const std::vector<Tensor>& adapters, int64_t adapted,
                                       double scale, const std::vector<LayerTensors>& layers, const Tensor& x) {
  if (adapted < 0 || adapted >> kAdapterLinears)
    refuse(op, "adapted must be in [0, 2^", int{kAdapterLinears}, "), got ", adapted);
  int64_t each = 0;
  for (int i = 0; i < kAdapterLinears; ++i) each += 2 * (adapted >> i & 1);
  const int64_t count = static_cast<int64_t>(layers.size());
  if (static_cast<int64_t>(adapters.size()) != each)
    refuse(op, "adapters must have ", each, " tensors (adapted ", adapted, "), got ", adapters.size());
  if (scale != 1.0 && (adapted >> kAdaptsO & 1 || adapted >> kAdaptsDown & 1))
    refuse(op, "scale must be 1 beside adapters of o or down, got ", scale);
  StackAdapters result;
  const Tensor* next = adapters.data();
  for (int i = 0; i < kAdapterLinears; ++i) {
    if (!(adapted >> i & 1)) continue;
    const int64_t at = next - adapters.data();
    const Tensor &down = *next++, &up = *next++;
    const std::string place = std::string(op) + ": adapter of " + kAdapterLinearNames[i];
    const char* const where = place.c_str();
    for (const auto& [name, tensor] : {std::pair("down", &down), {"up", &up}}) {
      check_dtype(where, name, *tensor, {x.scalar_type()});
      check_dim(where, name, *tensor, 4, "[layers, K, r, numbers]");
      if (!tensor->is_contiguous()) refuse(where, name, " must be contiguous, got ", describe(*tensor));
      check_same_device(where, name, *tensor, "x", x);
      check_size(where, name, *tensor, 0, count, "layers");
      check_size(where, name, *tensor, 1, adapters[0].size(1), "K, as in the first adapter");
    }
    check_size(where, "up", up, 2, down.size(2), "r, the rank of down");
    check_below(where, "down", down, 2, kMaxAdapterRank + 1, "ranks");
    for (int64_t l = 0; l < count; ++l) {
      const LayerTensors& layer = layers[l];
      const Tensor* const weights[] = {layer.q_weight,    layer.k_weight,  layer.v_weight,   layer.o_weight,
                                       layer.gate_weight, layer.up_weight, layer.down_weight};
      check_size(where, "down", down, 3, inputs_of(*weights[i]), "in, of the linear layer");
      check_size(where, "up", up, 3, outputs_of(*weights[i]), "out, of the linear layer");
    }
    result.of[i] = {&down, &up, at};
    result.count = down.size(1);
  }
  return result;
}

}  // namespace pass_ext
