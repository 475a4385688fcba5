// torch.ops.pass_ext.layer_before_attention and layer_after_attention on the CPU: a decoder layer around its attention,
// each half as one call (cpu/layer.h).
#include "cpu/layer.h"

#include <torch/csrc/stable/library.h>

#include "host/layer.h"

namespace pass_ext {
namespace {

// The rows of slots by their adapter; empty without adapters.
RowsByAdapter slots_of(const char* op, const AdapterIds& ids, int64_t rows) {
  if (!ids.ids) return {};
  return ids.is_int64 ? rows_by_adapter(op, static_cast<const int64_t*>(ids.ids), rows, ids.adapters)
                      : rows_by_adapter(op, static_cast<const int32_t*>(ids.ids), rows, ids.adapters);
}

// The adapter of a linear layer; none where no row is a slot's.
template <typename T>
SlotAdapter<T> adapter_of(const AdapterWeights<T>& weights, const AdapterIds& ids, const RowsByAdapter& slots) {
  if (slots.rows.empty() || weights.rank == 0) return {};
  return {weights.down, weights.up, weights.rank, &slots, ids.scale};
}

struct OnCpu {
  template <typename T>
  static void before(const LayerBefore<T>& layer, const BeforeAdapters<T>& added, const LayerOptions& options,
                     const Rotation& rotation, const T* x, int64_t rows, T* q, T* k, T* v, const Tensor&) {
    const RowsByAdapter slots = slots_of("layer_before_attention", added.ids, rows);
    LayerAdapters<T> adapters;
    adapters.q = adapter_of(added.q, added.ids, slots);
    adapters.k = adapter_of(added.k, added.ids, slots);
    adapters.v = adapter_of(added.v, added.ids, slots);
    before_attention(layer, adapters, options, rotation, x, rows, q, k, v);
  }
  template <typename T>
  static void after(const LayerAfter<T>& layer, const AfterAdapters<T>& added, const LayerOptions& options,
                    const T* attended, const T* residual, int64_t rows, T* out, const Tensor&) {
    const RowsByAdapter slots = slots_of("layer_after_attention", added.ids, rows);
    LayerAdapters<T> adapters;
    adapters.o = adapter_of(added.o, added.ids, slots);
    adapters.gate = adapter_of(added.gate, added.ids, slots);
    adapters.up = adapter_of(added.up, added.ids, slots);
    adapters.down = adapter_of(added.down, added.ids, slots);
    after_attention(layer, adapters, {}, options, attended, residual, rows, out);
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("layer_before_attention", TORCH_BOX(&pass_ext::layer_before_attention<pass_ext::OnCpu>));
  library.impl("layer_after_attention", TORCH_BOX(&pass_ext::layer_after_attention<pass_ext::OnCpu>));
}
