// Committing accepted rows to the caches: the problem as raw pointers, and which row goes where. For every tensor of
// every layer, request b and j = 0 .. num_accepted[b] with a node path[b, j] >= 0:
//   slot prefix_lens[b] + j  =  row cu_nodes[b] + path[b, j] of `fresh`, or slot prefix_lens[b] + path[b, j] in place
// as if all sources were read before anything is written.
//
// In place, rows may move in the order of j if no node lies before its target (path[b, j] >= j, as in every path of
// accept_tree): then no later row reads what row j overwrites.
#pragma once

#include <cstdint>

#include "core/platform.h"

namespace pass_ext {

// The accepted paths of a step.
struct CommitStep {
  const int32_t* prefix_lens;   // [requests]
  const int32_t* cu_nodes;      // [requests + 1]
  const int32_t* path;          // [requests, width]
  const int32_t* num_accepted;  // [requests]
  const int32_t* block_table;   // [requests, pages per request]; null for dense caches
  int64_t path_stride, table_stride;
  int64_t requests, table_width;
  int64_t new_rows;  // rows of `fresh`
  int32_t width;
  bool in_place;
};

// The layout of cache tensors, strides in bytes. A cache: [outer, slot, head, byte]; outer is the request, or the page
// if there is a block table. `fresh`: [row, head, byte].
struct CacheShape {
  int64_t outer, slot, head, fresh_row, fresh_head;
  int32_t outers, slots;  // cache slots per outer
  int64_t heads, head_bytes;
};

// One request's rows: none if it is padded or if its bounds are out of range.
struct RequestCommit {
  int64_t index;
  int64_t first, nodes, prefix;
  int32_t rows;  // committed rows of the path, from its begin
};

// Offsets in bytes from a tensor's begin. from < 0: there is nothing to move.
struct RowMove {
  int64_t from, to;
};

PASS_EXT_HOST_DEVICE RequestCommit commit_of(const CommitStep& step, int64_t index) {
  RequestCommit request{index, step.cu_nodes[index], 0, step.prefix_lens[index], 0};
  request.nodes = step.cu_nodes[index + 1] - request.first;
  const bool fits = request.first >= 0 && (step.in_place || request.first + request.nodes <= step.new_rows);
  if (request.nodes <= 0 || !fits || request.prefix < 0) return request;
  const int64_t rows = int64_t{step.num_accepted[index]} + 1;
  request.rows = static_cast<int32_t>(rows < 0 ? 0 : rows < step.width ? rows : step.width);
  return request;
}

// The offset of a request's cache slot, or -1 if the cache has no such slot.
PASS_EXT_HOST_DEVICE int64_t offset_of_slot(const CommitStep& step, const CacheShape& shape, int64_t request,
                                            int64_t slot) {
  if (!step.block_table) return slot < shape.slots ? request * shape.outer + slot * shape.slot : -1;
  if (slot >= shape.slots * step.table_width) return -1;
  const uint32_t page_size = static_cast<uint32_t>(shape.slots), place = static_cast<uint32_t>(slot);
  const int64_t page = step.block_table[request * step.table_stride + place / page_size];
  if (page < 0 || page >= shape.outers) return -1;
  return page * shape.outer + place % page_size * shape.slot;
}

// The node that row j of the path commits, or -1.
PASS_EXT_HOST_DEVICE int64_t node_of(const CommitStep& step, const RequestCommit& request, int32_t j) {
  const int64_t node = step.path[request.index * step.path_stride + j];
  return node < request.nodes ? node : -1;
}

// The move of row j of the path. Nothing moves if the row is in its place already, or if its node or cache slot does
// not exist.
PASS_EXT_HOST_DEVICE RowMove move_of(const CommitStep& step, const CacheShape& shape, const RequestCommit& request,
                                     int32_t j) {
  const int64_t node = node_of(step, request, j);
  if (node < 0 || (step.in_place && node == j)) return {-1, -1};
  const int64_t to = offset_of_slot(step, shape, request.index, request.prefix + j);
  if (to < 0) return {-1, -1};
  const int64_t from = step.in_place ? offset_of_slot(step, shape, request.index, request.prefix + node)
                                     : (request.first + node) * shape.fresh_row;
  return {from, to};
}

}  // namespace pass_ext
