// A causal convolution of width K per channel, over the trees of a step: the problem as raw pointers. The window of a
// node is its own input, those of its nearest K - 1 ancestors and, beyond the root, the newest inputs in the request's
// state [channels, K - 1], oldest first:
//   out = activation(bias + sum over j of weight[j] window[j]), from the oldest input to the newest, fused, in fp32
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/platform.h"
#include "core/scalar.h"

namespace pass_ext {

constexpr int64_t kMostTaps = 8;  // K, from 2 on

// T: the type of x, weight, bias, states and out.
template <typename T>
struct ConvolutionTree {
  const T* x;  // [rows, channels], rows `row_distance` elements apart
  int64_t row_distance;
  const T* weight;  // [channels, taps]
  const T* bias;    // [channels] or null
  const T* states;  // [slots, channels, taps - 1]
  int64_t slots, slot_distance, channel_distance, tap_distance;
  const int32_t* state_index;  // [requests]; null: the request's own number
  const int32_t* parents;      // [rows]
  const int32_t* cu_nodes;     // [requests + 1]
  T* out;                      // [rows, channels]
  int64_t rows, requests, channels, taps;
  bool has_silu;
};

// The input `back` steps before a node on its path: a node of the request (>= 0), or -1 - j for input j of the state.
PASS_EXT_HOST_DEVICE int64_t input_of(const int32_t* parents, int64_t node, int64_t back, int64_t taps) {
  while (back > 0 && node >= 0) {
    const int64_t parent = parents[node];
    node = parent < node ? parent : -1;
    --back;
  }
  return node >= 0 ? node : -1 - (taps - 2 - back);
}

}  // namespace pass_ext
