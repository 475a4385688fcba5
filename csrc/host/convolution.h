// Checks convolution_tree's arguments, the same on every device, and packs them into the struct of core/convolution.h.
#pragma once

#include "core/convolution.h"
#include "host/recurrent.h"

namespace pass_ext {

// The op with its torch signature; `Run` has a static run(problem, like) for the problem of each type.
template <typename Run>
Tensor convolution_tree(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& states,
                        const OptionalTensor& state_index, const Tensor& parents, const Tensor& cu_nodes, bool silu) {
  constexpr const char* op = "convolution_tree";
  check_dtype(op, "x", x, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  check_dim(op, "x", x, 2, "[N, C]");
  const int64_t rows = x.size(0), channels = x.size(1);
  check_dtype(op, "weight", weight, {x.scalar_type()});
  check_dim(op, "weight", weight, 2, "[C, K]");
  check_size(op, "weight", weight, 0, channels, "the channels of x");
  const int64_t taps = weight.size(1);
  if (taps < 2 || taps > kMostTaps)
    refuse(op, "weight must have 2 to ", kMostTaps, " (K) in dimension 1, got ", describe(weight));
  check_same_device(op, "weight", weight, "x", x);
  if (bias) {
    check_dtype(op, "bias", *bias, {x.scalar_type()});
    check_dim(op, "bias", *bias, 1, "[C]");
    check_size(op, "bias", *bias, 0, channels, "the channels of x");
    check_same_device(op, "bias", *bias, "x", x);
  }
  check_dtype(op, "states", states, {x.scalar_type()});
  check_dim(op, "states", states, 3, "[B or slots, C, K - 1]");
  check_size(op, "states", states, 1, channels, "the channels of x");
  check_size(op, "states", states, 2, taps - 1, "K - 1, one less than weight has");
  check_same_device(op, "states", states, "x", x);
  const Bounds bounds = check_cu_nodes(op, cu_nodes, "x", x);
  const int32_t* index = check_state_index(op, state_index, "states", states.size(0), bounds.requests, states);
  const int32_t* tree = check_parents(op, parents, rows, "x", x);

  const Tensor inputs = contiguous_heads_of(op, "x", x), weights = contiguous_of(op, "weight", weight);
  const OptionalTensor biases = bias ? OptionalTensor(contiguous_of(op, "bias", *bias)) : bias;
  const Tensor out = empty_of_shape(op, x, {rows, channels});
  dispatch_up_to_float32(x.scalar_type(), [&](auto value) {
    using T = type_of<decltype(value)>;
    ConvolutionTree<T> problem{};
    problem.x = data_of<T>(op, "x", inputs);
    problem.row_distance = inputs.stride(0);
    problem.weight = data_of<T>(op, "weight", weights);
    problem.bias = biases ? data_of<T>(op, "bias", *biases) : nullptr;
    problem.states = data_of<T>(op, "states", states);
    problem.slots = states.size(0);
    problem.slot_distance = states.stride(0);
    problem.channel_distance = states.stride(1);
    problem.tap_distance = states.stride(2);
    problem.state_index = index;
    problem.parents = tree;
    problem.cu_nodes = bounds.cu_nodes;
    problem.out = output_of<T>(out);
    problem.rows = rows;
    problem.requests = bounds.requests;
    problem.channels = channels;
    problem.taps = taps;
    problem.has_silu = silu;
    Run::run(problem, x);
  });
  return out;
}

}  // namespace pass_ext
