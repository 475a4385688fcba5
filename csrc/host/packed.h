// Checks the tensors that describe a packed step (cu_nodes, prefix_lens, block_table, visible, …), the same on every
// device and in every op.
#pragma once

#include "core/tree.h"
#include "host/checks.h"
#include "host/tensor.h"

namespace pass_ext {

// A contiguous vector of int32 on the device of `other`.
inline const int32_t* check_integers(const char* op, const char* argument, const Tensor& tensor,
                                     const char* other_argument, const Tensor& other) {
  check_dtype(op, argument, tensor, {ScalarType::Int});
  check_dim(op, argument, tensor, 1, "[n], one number each");
  check_same_device(op, argument, tensor, other_argument, other);
  if (!tensor.is_contiguous())
    refuse(op, argument, " must be contiguous, got ", describe(tensor), " with stride ", tensor.stride(0));
  return data_of<int32_t>(op, argument, tensor);
}

// cu_nodes [B + 1], and the number of requests B.
struct Bounds {
  const int32_t* cu_nodes;
  int64_t requests;
};

inline Bounds check_cu_nodes(const char* op, const Tensor& cu_nodes, const char* other_argument, const Tensor& other) {
  const int32_t* data = check_integers(op, "cu_nodes", cu_nodes, other_argument, other);
  if (cu_nodes.size(0) < 1) refuse(op, "cu_nodes must have shape [B + 1], got ", describe(cu_nodes));
  check_below(op, "cu_nodes", cu_nodes, 0, kInt32Limit, "bounds");
  return {data, cu_nodes.size(0) - 1};
}

inline void check_max_nodes(const char* op, int64_t max_nodes) {
  if (max_nodes < 1 || max_nodes > kMaxTreeNodes)
    refuse(op, "max_nodes must be in [1, ", kMaxTreeNodes, "], got ", max_nodes);
}

inline int64_t words_for(int64_t max_nodes) { return (max_nodes + 63) / 64; }

// visible [N, ceil(max_nodes / 64)]; rows may be strided, as in a slice of a larger tree
inline const int64_t* check_visible(const char* op, const Tensor& visible, int64_t max_nodes, int64_t rows,
                                    const char* other_argument, const Tensor& other) {
  check_dtype(op, "visible", visible, {ScalarType::Long});
  check_dim(op, "visible", visible, 2, "[N, ceil(max_nodes / 64)]");
  check_size(op, "visible", visible, 0, rows, "the packed nodes");
  check_size(op, "visible", visible, 1, words_for(max_nodes), "ceil(max_nodes / 64)");
  check_same_device(op, "visible", visible, other_argument, other);
  check_contiguous_rows(op, "visible", visible);
  return data_of<int64_t>(op, "visible", visible);
}

// block_table [B, pages per request]; rows may be strided
inline const int32_t* check_block_table(const char* op, const Tensor& block_table, int64_t requests,
                                        const char* other_argument, const Tensor& other) {
  check_dtype(op, "block_table", block_table, {ScalarType::Int});
  check_dim(op, "block_table", block_table, 2, "[B, pages of one request]");
  check_size(op, "block_table", block_table, 0, requests, "the requests of cu_nodes");
  check_same_device(op, "block_table", block_table, other_argument, other);
  check_contiguous_rows(op, "block_table", block_table);
  return data_of<int32_t>(op, "block_table", block_table);
}

// Checks of values. Only the CPU ops make them: on CUDA each would need a synchronisation.

// Refuses bounds that do not divide the rows: 0 <= cu_nodes[0] <= cu_nodes[1] <= … <= rows. Rows outside belong to no
// request.
inline void check_bounds(const char* op, const int32_t* cu_nodes, int64_t requests, int64_t rows, int64_t max_nodes) {
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t first = cu_nodes[b], last = cu_nodes[b + 1];
    if (first < 0 || last < first || last > rows)
      refuse(op, "cu_nodes must rise from 0 to at most ", rows, " (the packed nodes), got ", first, " and ", last,
             " at ", b);
    if (last - first > max_nodes)
      refuse(op, "max_nodes must be at least the nodes of every request, got ", max_nodes, ", but request ", b, " has ",
             last - first);
  }
}

}  // namespace pass_ext
