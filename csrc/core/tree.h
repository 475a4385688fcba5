// A step's trees as bits, and those bits as a dense mask: the problems as raw pointers, and the rows of each request.
//   visible[i] = {i} and all its ancestors, bit j for node j of i's own request      depths[i] = number of ancestors
//   mask[b][i][c] = 0 for c < prefix and where visible[i] has bit c - prefix, else the lowest finite number
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/platform.h"

namespace pass_ext {

constexpr int32_t kMaxTreeNodes = 1024;  // per request, in every op; pass_ext.tree.MAX_TREE_NODES

struct TreePrepare {
  const int32_t* parents;   // [rows]
  const int32_t* cu_nodes;  // [requests + 1]
  int64_t* visible;         // [rows, words]
  int32_t* depths;          // [rows]
  int64_t requests, rows;
  int32_t max_nodes, words;
};

// T: the mask's type.
template <typename T>
struct TreeMask {
  const int64_t* visible;      // [rows, 64 nodes to a word]
  const int32_t* cu_nodes;     // [requests + 1]
  const int32_t* prefix_lens;  // [requests]
  T* out;                      // [requests, max_nodes, kv_len]
  int64_t requests, rows, kv_len;
  int32_t max_nodes;
  int64_t visible_stride;  // from row to row, in words
};

// The parent of a request's node, -1 for a root. A parent outside [-1, node) makes a root too, so that every walk along
// parents goes down in steps of at least one, and ends.
PASS_EXT_HOST_DEVICE int32_t parent_or_root(int32_t parent, int32_t node) {
  return parent >= 0 && parent < node ? parent : -1;
}

// One request's rows. Out-of-range bounds are clamped.
struct TreeRows {
  int64_t first;
  int64_t count;  // may exceed max_nodes: the rows beyond it are ignored
};

PASS_EXT_HOST_DEVICE TreeRows tree_rows(const int32_t* cu_nodes, int64_t request, int64_t rows) {
  const int64_t begin = cu_nodes[request], end = cu_nodes[request + 1];
  const int64_t first = begin < 0 ? 0 : begin < rows ? begin : rows;
  const int64_t last = end < first ? first : end < rows ? end : rows;
  return {first, last - first};
}

// One row of the mask. It sees columns [0, prefix), and column prefix + j if j < nodes and bit j is set. A row that
// belongs to no node sees nothing. The CPU op has refused prefix + nodes > kv_len.
struct MaskRow {
  const int64_t* words;
  int64_t prefix, nodes;
};

// Row `row` of [requests, max_nodes].
template <typename T>
PASS_EXT_HOST_DEVICE MaskRow mask_row(const TreeMask<T>& problem, int64_t row) {
  const int64_t request = row / problem.max_nodes, node = row - request * problem.max_nodes;
  const TreeRows rows = tree_rows(problem.cu_nodes, request, problem.rows);
  if (node >= rows.count) return {nullptr, 0, 0};
  const int64_t length = problem.prefix_lens[request];
  const int64_t prefix = length < 0 ? 0 : length < problem.kv_len ? length : problem.kv_len;
  const int64_t nodes = rows.count < problem.max_nodes ? rows.count : problem.max_nodes;
  return {problem.visible + (rows.first + node) * problem.visible_stride, prefix, nodes};
}

// The lowest finite number. Softmax turns it into 0 and, unlike with -inf, a row without any visible column stays
// finite.
template <typename T>
PASS_EXT_HOST_DEVICE T lowest_finite();
template <>
PASS_EXT_HOST_DEVICE bfloat16 lowest_finite<bfloat16>() {
  return {0xff7f};
}
template <>
PASS_EXT_HOST_DEVICE float16 lowest_finite<float16>() {
  return {0xfbff};
}
template <>
PASS_EXT_HOST_DEVICE float lowest_finite<float>() {
  return float_of(0xff7fffffu);
}

}  // namespace pass_ext
