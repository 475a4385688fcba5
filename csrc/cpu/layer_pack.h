// The weights of decoder layers as layer_stack computes with them: checked, and as pointers. layer_pack keeps them so.
#pragma once

#include <memory>
#include <variant>
#include <vector>

#include "cpu/layer.h"
#include "host/layer_stack.h"

namespace pass_ext {

// One layer's weights as pointers.
template <typename T>
struct StackedLayer {
  LayerBefore<T> before;
  LayerAfter<T> after;
};

template <typename T>
using StackedLayers = std::vector<StackedLayer<T>>;

// The layers of one list of tensors, which must outlive them.
struct CheckedLayers {
  std::vector<LayerTensors> tensors;
  std::variant<StackedLayers<bfloat16>, StackedLayers<float16>, StackedLayers<float>> pointers;
};

// Refuses layers that do not fit each other, rows of `width` numbers or the dtype and device of `like`. reads: the
// numbers of a row that the first layer's q, k and v multiply.
CheckedLayers check_layers(const char* op, const std::vector<Tensor>& weights, int64_t parts, int64_t head_dim,
                           int64_t width, int64_t reads, const Tensor& like);

// Where a weight lay when it was packed, and as what. A weight has one to three dimensions.
struct Placement {
  const void* address = nullptr;
  ScalarType type{};
  int64_t dim = 0, sizes[3] = {}, strides[3] = {};

  bool operator==(const Placement& other) const;
};

// Layers that layer_pack has checked, and the tensors that hold them.
struct PackedLayers {
  Tensor key;
  std::vector<Tensor> weights;
  CheckedLayers layers;
  std::vector<Placement> placements;  // of the weights
  int64_t parts, head_dim, width, reads;
  ScalarType type;
};

// True for a list of weights that is a key of layer_pack alone: no layer has only one weight.
bool is_key(const std::vector<Tensor>& weights);

// The layers of a key. Refuses one that layer_pack has not made in this process, or that was released, and layers of
// which a weight lies elsewhere now (`.data = …`) or has lost its memory.
std::shared_ptr<const PackedLayers> packed_layers_of(const char* op, const Tensor& key);

}  // namespace pass_ext

// For ctypes (pass_ext/_library): lets go of the layers whose key begins at this address. Calls that compute with them
// end well.
extern "C" __attribute__((visibility("default"))) void pass_ext_release_layers(const void* key);
