// The convolution over a tree on the CPU, at one instruction set (see each_isa.h): 16 channels of all nodes of a
// request. The problem: core/convolution.h.

#include "cpu/slice-inl.h"

// inputs: of each node of the request `taps` numbers, oldest first, as input_of gives them.
template <typename T>
void convolve_channels(const ConvolutionTree<T>& problem, const int32_t* inputs, int64_t first, int64_t nodes,
                       int64_t slot, int64_t channel) {
  const int64_t left = problem.channels - channel, count = left < kStateColumns ? left : kStateColumns;
  const int64_t taps = problem.taps;
  float weights[kMostTaps][kStateColumns] = {}, state[kMostTaps - 1][kStateColumns] = {};
  const T* const kept = problem.states + slot * problem.slot_distance + channel * problem.channel_distance;
  for (int64_t c = 0; c < count; ++c)
    for (int64_t j = 0; j < taps; ++j) {
      weights[j][c] = to_float(problem.weight[(channel + c) * taps + j]);
      if (j + 1 < taps) state[j][c] = to_float(kept[c * problem.channel_distance + j * problem.tap_distance]);
    }
  SliceRow bias{};
  for (int p = 0; p < kStateVectors; ++p) bias.part[p] = zeros();
  if (problem.bias) bias = load_row(problem.bias + channel, count);
  for (int64_t n = 0; n < nodes; ++n) {
    SliceRow sum = bias;
    for (int64_t j = 0; j < taps; ++j) {
      const int64_t input = inputs[n * taps + j];
      const SliceRow value = input >= 0 ? load_row(problem.x + (first + input) * problem.row_distance + channel, count)
                                        : load_row(state[-1 - input]);
      for (int p = 0; p < kStateVectors; ++p)
        sum.part[p] = fused(load(weights[j] + p * Floats::width), value.part[p], sum.part[p]);
    }
    if (problem.has_silu)
      for (int p = 0; p < kStateVectors; ++p) sum.part[p] = activated<Activation::silu>(sum.part[p]);
    store_row(problem.out + (first + n) * problem.channels + channel, sum, count);
  }
}
