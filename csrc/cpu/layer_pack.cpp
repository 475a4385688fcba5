// torch.ops.pass_ext.layer_pack: decoder layers' weights, checked once for many calls of layer_stack.
//   key [layers, parts] = the numbers of elements of each layer's tensors, 0 for none
// The key stands for the layers by its address. What it holds is not read again, so no numbers in a tensor can lead a
// kernel astray: neither a key's copy nor one from another process has layers. The layers are kept until
// pass_ext_release_layers is called, as pass_ext.layers.layer_pack's result does at its end.
#include "cpu/layer_pack.h"

#include <pthread.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <ostream>
#include <string>
#include <utility>

namespace pass_ext {
namespace {

template <typename T>
StackedLayer<T> pointers_of(const char* op, const LayerTensors& layer) {
  const auto linear = [&](const char* name, const Tensor* weight, const Tensor* bias) {
    return pointers_of<T>(op, Linear{name, *weight, bias ? OptionalTensor(*bias) : OptionalTensor()});
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

// A tensor in the list of weights, printed as "layer 3: up_weight".
struct WeightName {
  int64_t parts;
  size_t index;
};
std::ostream& operator<<(std::ostream& stream, const WeightName& weight) {
  std::vector<const char*> names;
  for (int part = 0; part < kLayerParts; ++part)
    if (has_part(weight.parts, static_cast<LayerPart>(part))) names.push_back(kLayerPartNames[part]);
  return stream << "layer " << weight.index / names.size() << ": " << names[weight.index % names.size()];
}

Placement placement_of(const char* op, const WeightName& name, const Tensor& weight) {
  Placement placement;
  placement.address = data_of<void>(op, name, weight);
  placement.type = weight.scalar_type();
  placement.dim = weight.dim();
  const auto sizes = weight.sizes(), strides = weight.strides();
  for (int64_t i = 0; i < std::min<int64_t>(placement.dim, 3); ++i) {
    placement.sizes[i] = sizes[i];
    placement.strides[i] = strides[i];
  }
  return placement;
}

// All packed layers of the process, by the address of their key. Never destroyed: torch may be gone before.
class Registry {
 public:
  static Registry& get() {
    static Registry* const registry = new Registry;
    // A thread may be inside when another one forks, and the child has no such thread.
    static const int registered =
        pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); }, [] { get().mutex_.unlock(); });
    (void)registered;
    return *registry;
  }

  void add(const void* address, std::shared_ptr<const PackedLayers> layers) {
    std::lock_guard<std::mutex> lock(mutex_);
    layers.swap(layers_[address]);
  }  // a former entry, whose key has moved away, ends here

  std::shared_ptr<const PackedLayers> find(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = layers_.find(address);
    return found == layers_.end() ? nullptr : found->second;
  }

  void release(const void* address) {
    std::shared_ptr<const PackedLayers> layers;  // its end may run Python code, so it comes behind the lock's
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = layers_.find(address);
    if (found == layers_.end()) return;
    layers.swap(found->second);
    layers_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::map<const void*, std::shared_ptr<const PackedLayers>> layers_;
};

// A tensor of the layer in the dtype of its rows, which packed weights do not tell.
const Tensor& floats_of(const char* op, const LayerTensors& layer) {
  for (const Tensor* const tensor : {layer.q_weight, layer.input_norm, layer.q_norm, layer.k_norm, layer.attention_norm,
                                     layer.mlp_norm, layer.output_norm, layer.q_bias})
    if (tensor && !is_packed(*tensor)) return *tensor;
  refuse(op, "layers of packed weights must have a norm, whose dtype is that of the rows, got none");
}

Tensor layer_pack(const std::vector<Tensor>& weights, int64_t parts, int64_t head_dim) {
  constexpr const char* op = "layer_pack";
  if (head_dim < 1) refuse(op, "head_dim must be at least 1, got ", head_dim);
  const LayerTensors first = layer_tensors_of(op, weights, parts)[0];
  const Tensor& like = floats_of(op, first);
  if (!is_packed(*first.q_weight))
    check_rows(op, "q_weight", *first.q_weight, "[out, in]");
  else
    check_packed_weight(op, "q_weight", *first.q_weight);
  if (is_packed(*first.o_weight))
    check_packed_weight(op, "o_weight", *first.o_weight);
  else
    check_rows(op, "o_weight", *first.o_weight, "[out, in]");
  const int64_t width = outputs_of(*first.o_weight), reads = inputs_of(*first.q_weight);
  CheckedLayers layers = check_layers(op, weights, parts, head_dim, width, reads, like);
  const int64_t count = static_cast<int64_t>(layers.tensors.size());
  const Tensor key = empty_of_shape(op, like, {count, kLayerParts}, ScalarType::Long);
  int64_t* numbers = output_of<int64_t>(key);
  std::vector<Placement> placements;
  const Tensor* next = weights.data();
  for (int64_t i = 0; i < count * kLayerParts; ++i)
    numbers[i] = has_part(parts, static_cast<LayerPart>(i % kLayerParts)) ? (next++)->numel() : 0;
  for (size_t i = 0; i < weights.size(); ++i) placements.push_back(placement_of(op, WeightName{parts, i}, weights[i]));
  auto packed = std::make_shared<PackedLayers>(
      PackedLayers{key, weights, {}, std::move(placements), parts, head_dim, width, reads, like.scalar_type()});
  packed->layers = {layer_tensors_of(op, packed->weights, parts), std::move(layers.pointers)};
  Registry::get().add(numbers, std::move(packed));
  return key;
}

}  // namespace

bool Placement::operator==(const Placement& other) const {
  return address == other.address && type == other.type && dim == other.dim &&
         std::equal(sizes, sizes + 3, other.sizes) && std::equal(strides, strides + 3, other.strides);
}

CheckedLayers check_layers(const char* op, const std::vector<Tensor>& weights, int64_t parts, int64_t head_dim,
                           int64_t width, int64_t reads, const Tensor& like) {
  CheckedLayers layers{layer_tensors_of(op, weights, parts), {}};
  const int64_t count = static_cast<int64_t>(layers.tensors.size());
  for (int64_t l = 0; l < count; ++l)
    check_layer(op, l, layers.tensors[l], layers.tensors[0], width, l == 0 ? reads : width, head_dim, like);
  dispatch_up_to_float32(like.scalar_type(), [&](auto value) {
    using T = type_of<decltype(value)>;
    StackedLayers<T>& pointers = layers.pointers.emplace<StackedLayers<T>>();
    pointers.reserve(count);
    for (const LayerTensors& layer : layers.tensors) pointers.push_back(pointers_of<T>(op, layer));
  });
  return layers;
}

bool is_key(const std::vector<Tensor>& weights) {
  return weights.size() == 1 && weights[0].scalar_type() == ScalarType::Long;
}

std::shared_ptr<const PackedLayers> packed_layers_of(const char* op, const Tensor& key) {
  const std::shared_ptr<const PackedLayers> packed =
      Registry::get().find(data_of<void>(op, ItemName{"weights", 0}, key));
  if (!packed)
    refuse(op, "weights must be a key that layer_pack made in this process and that was not released, got ",
           describe(key));
  for (size_t i = 0; i < packed->weights.size(); ++i) {
    const WeightName name{packed->parts, i};
    if (!(placement_of(op, name, packed->weights[i]) == packed->placements[i]))
      refuse(op, name, " must be as layer_pack found it, got ", describe(packed->weights[i]),
             " (its data was replaced): pack the layers again");
  }
  return packed;
}

}  // namespace pass_ext

void pass_ext_release_layers(const void* key) { pass_ext::Registry::get().release(key); }

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("layer_pack", TORCH_BOX(&pass_ext::layer_pack));
}
