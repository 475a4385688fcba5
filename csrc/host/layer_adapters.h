// Checks the adapters of a decoder layer's half, the same on every device, and packs them into the structs of
// core/layer.h.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/layer.h"
#include "host/checks.h"
#include "host/linear.h"
#include "host/tensor.h"

namespace pass_ext {

// The linear layers that may have adapters, in the order of their tensors in the list.
constexpr int kAdapterLinears = 7;
constexpr const char* kAdapterLinearNames[kAdapterLinears] = {"q", "k", "v", "o", "gate", "up", "down"};
enum AdapterLinear { kAdaptsQ, kAdaptsK, kAdaptsV, kAdaptsO, kAdaptsGate, kAdaptsUp, kAdaptsDown };

// The adapters of one linear layer, [K, r, in] and [K, r, out]; null: it has none.
struct AdapterPair {
  const Tensor *down = nullptr, *up = nullptr;
  int64_t place = 0;  // of down in the list, in front of up
};

// The adapters of a half, for rows with these ids.
struct AdaptedHalf {
  OptionalTensor ids;
  AdapterPair of[kAdapterLinears];
  int64_t count = 0;  // K
  double scale = 1.0;

  AdapterIds pointers(const char* op) const {
    if (!ids) return {};
    return {data_of<void>(op, "ids", *ids), ids->scalar_type() == ScalarType::Long, count, static_cast<float>(scale)};
  }
  template <typename T>
  AdapterWeights<T> pointers(const char* op, AdapterLinear linear) const {
    const auto& [down, up, place] = of[linear];
    if (!down) return {};
    const auto name = [&](int64_t at) { return "adapters[" + std::to_string(at) + "]"; };
    return {data_of<T>(op, name(place), *down), data_of<T>(op, name(place + 1), *up), down->size(1)};
  }
};

// A linear layer that may have adapters.
struct AdaptableLinear {
  AdapterLinear kind;
  const Tensor& weight;
};

// The list: a down and an up for each linear layer whose bit is set in `adapted`. x: the half's input.
inline AdaptedHalf adapted_half_of(const char* op, const OptionalTensor& ids, const std::vector<Tensor>& adapters,
                                   int64_t adapted, double scale, std::initializer_list<AdaptableLinear> linears,
                                   const Tensor& x) {
  int64_t known = 0;
  for (const AdaptableLinear& linear : linears) known |= int64_t{1} << linear.kind;
  if (adapted & ~known) refuse(op, "adapted must have no bits but ", known, ", got ", adapted);
  int64_t each = 0;
  for (int i = 0; i < kAdapterLinears; ++i) each += 2 * (adapted >> i & 1);
  if (static_cast<int64_t>(adapters.size()) != each)
    refuse(op, "adapters must have ", each, " tensors (adapted ", adapted, "), got ", adapters.size());
  if (ids.has_value() != (adapted != 0))
    refuse(op, "ids and adapters must be given together, got only ", ids ? "ids" : "adapters");
  AdaptedHalf half;
  if (!ids) return half;
  check_dtype(op, "ids", *ids, {ScalarType::Int, ScalarType::Long});
  check_dim(op, "ids", *ids, 1, "[N]");
  check_size(op, "ids", *ids, 0, x.size(0), "N, the rows of the input");
  check_contiguous_rows(op, "ids", *ids);
  check_same_device(op, "ids", *ids, "the input", x);
  half.ids = ids;
  half.scale = scale;
  half.count = adapters[0].dim() == 3 ? adapters[0].size(0) : 0;
  int64_t place = 0;
  for (const AdaptableLinear& linear : linears) {
    if (!(adapted >> linear.kind & 1)) continue;
    const Tensor &down = adapters[place], &up = adapters[place + 1];
    const std::string name_of_place = std::string(op) + ": adapter of " + kAdapterLinearNames[linear.kind];
    const char* const where = name_of_place.c_str();
    for (const auto& [name, tensor] : {std::pair("down", &down), {"up", &up}}) {
      check_dtype(where, name, *tensor, {x.scalar_type()});
      check_dim(where, name, *tensor, 3, "[K, r, numbers]");
      if (!tensor->is_contiguous()) refuse(where, name, " must be contiguous, got ", describe(*tensor));
      check_same_device(where, name, *tensor, "the input", x);
      check_size(where, name, *tensor, 0, half.count, "K, as in the first adapter");
    }
    check_below(where, "down", down, 0, kInt32Limit, "adapters");
    check_size(where, "up", up, 1, down.size(1), "r, the rank of down");
    check_below(where, "down", down, 1, kMaxAdapterRank + 1, "ranks");
    check_size(where, "down", down, 2, inputs_of(linear.weight), "in, of the linear layer");
    check_size(where, "up", up, 2, outputs_of(linear.weight), "out, of the linear layer");
    half.of[linear.kind] = {&down, &up, place};
    place += 2;
  }
  return half;
}

}  // namespace pass_ext
