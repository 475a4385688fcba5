// Checks the tree ops' arguments, the same on every device, packs them into the structs of core/tree.h and makes the
// outputs. Each op is a template over the function that fills them.
#pragma once

#include <tuple>

#include "core/tree.h"
#include "host/dispatch.h"
#include "host/packed.h"

namespace pass_ext {

using TreeResult = std::tuple<Tensor, Tensor>;  // visible, depths

// The ops with their torch signatures; `run` fills in the outputs on its device.

using RunPrepare = void (*)(const TreePrepare& problem, const Tensor& parents);

template <RunPrepare run>
TreeResult tree_prepare(const Tensor& parents, const Tensor& cu_nodes, int64_t max_nodes) {
  constexpr const char* op = "tree_prepare";
  TreePrepare problem{};
  problem.parents = check_integers(op, "parents", parents, "parents", parents);
  const Bounds bounds = check_cu_nodes(op, cu_nodes, "parents", parents);
  problem.cu_nodes = bounds.cu_nodes;
  problem.requests = bounds.requests;
  check_max_nodes(op, max_nodes);
  problem.rows = parents.size(0);
  problem.max_nodes = static_cast<int32_t>(max_nodes);
  problem.words = static_cast<int32_t>(words_for(max_nodes));
  const Tensor visible = empty_of_shape(op, parents, {problem.rows, problem.words}, ScalarType::Long);
  const Tensor depths = empty_of_shape(op, parents, {problem.rows});
  problem.visible = output_of<int64_t>(visible);
  problem.depths = output_of<int32_t>(depths);
  run(problem, parents);
  return {visible, depths};
}

// Calls function(TypeTag<T>) for the type of a mask.
template <typename Function>
void dispatch_mask(const char* op, ScalarType dtype, Function&& function) {
  switch (dtype) {
    case ScalarType::BFloat16: return function(TypeTag<bfloat16>{});
    case ScalarType::Half: return function(TypeTag<float16>{});
    case ScalarType::Float: return function(TypeTag<float>{});
    default: refuse(op, "dtype must be bfloat16, float16 or float32, got ", name_of(dtype));
  }
}

// `Run` has a static run(problem, visible) for the problem of each type.
template <typename Run>
Tensor tree_mask(const Tensor& visible, const Tensor& cu_nodes, int64_t max_nodes, const Tensor& prefix_lens,
                 int64_t kv_len, ScalarType dtype) {
  constexpr const char* op = "tree_mask";
  check_max_nodes(op, max_nodes);
  check_dim(op, "visible", visible, 2, "[N, ceil(max_nodes / 64)]");
  const int64_t* words = check_visible(op, visible, max_nodes, visible.size(0), "visible", visible);
  const Bounds bounds = check_cu_nodes(op, cu_nodes, "visible", visible);
  const int32_t* lengths = check_integers(op, "prefix_lens", prefix_lens, "visible", visible);
  check_size(op, "prefix_lens", prefix_lens, 0, bounds.requests, "the requests of cu_nodes");
  if (kv_len < 0 || kv_len > INT32_MAX) refuse(op, "kv_len must be in [0, 2^31), got ", kv_len);
  Tensor out;
  dispatch_mask(op, dtype, [&](auto tag) {
    using T = type_of<decltype(tag)>;
    out = empty_of_shape(op, visible, {bounds.requests, 1, max_nodes, kv_len}, dtype);
    Run::run(TreeMask<T>{words, bounds.cu_nodes, lengths, output_of<T>(out), bounds.requests, visible.size(0), kv_len,
                         static_cast<int32_t>(max_nodes), visible.stride(0)},
             visible);
  });
  return out;
}

}  // namespace pass_ext
