// Committing the accepted path to the states of all layers: the problem as raw pointers. For request b the nodes
// path[b, 0 .. num_accepted[b]] (-1: none) follow one after the other:
//   recurrent     S = D S + k u^T, the arithmetic of core/recurrent-inl.h: the bits of steps of one token
//   convolution   the state is the last K - 1 of its inputs and the nodes' inputs
#pragma once

#include <cstdint>

#include "core/recurrent.h"

namespace pass_ext {

// The accepted paths of a step.
struct StateStep {
  const int32_t* cu_nodes;      // [requests + 1]
  const int32_t* path;          // [requests, width]
  const int32_t* num_accepted;  // [requests]
  const int32_t* state_index;   // [requests]; null: the request's own number
  int64_t path_stride;
  int64_t requests, rows;
  int32_t width;
};

struct RecurrentState {
  float* data;
  StateLayout layout;
  int64_t heads, key_heads, dk, dv;
  const void* k;  // [rows, key_heads, dk] of `key_type`
  int64_t key_row, key_head;
  RowType key_type;
  const float* u;  // [rows, heads, dv]
  RecurrentDecay decay;
};

// Numbers of `bytes` bytes, which only move.
struct ConvolutionState {
  char* data;  // [slots, channels, inputs]
  int64_t slots, slot, channel, tap;
  int64_t channels, inputs;  // inputs: K - 1
  const char* x;             // [rows, channels]
  int64_t row, bytes;
};

// The accepted nodes of a request: none if it is padded or its bounds are out of range.
struct AcceptedPath {
  int64_t first, nodes;
  int32_t length;  // columns of the path, -1 among them
};

PASS_EXT_HOST_DEVICE AcceptedPath accepted_path(const StateStep& step, int64_t request) {
  AcceptedPath accepted{step.cu_nodes[request], 0, 0};
  const int64_t last = step.cu_nodes[request + 1];
  if (accepted.first < 0 || last <= accepted.first || last > step.rows) return accepted;
  accepted.nodes = last - accepted.first;
  const int64_t length = int64_t{step.num_accepted[request]} + 1;
  accepted.length = static_cast<int32_t>(length < 0 ? 0 : length < step.width ? length : step.width);
  return accepted;
}

// The packed row of column j of a request's path, or -1.
PASS_EXT_HOST_DEVICE int64_t accepted_row(const StateStep& step, const AcceptedPath& accepted, int64_t request,
                                          int32_t j) {
  const int64_t node = step.path[request * step.path_stride + j];
  return node >= 0 && node < accepted.nodes ? accepted.first + node : -1;
}

}  // namespace pass_ext
