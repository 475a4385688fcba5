// Causal convolutions over trees on the GPU, in one launch. The problem and the window of a node: core/convolution.h.
// A block has 64 channels of a request, whose weights and state lie in shared memory, read once; eight threads compute
// a node, eight channels each, read in units of 16 bytes if all addresses allow it (`wide`).
#pragma once

#include "core/convolution.h"
#include "core/step.h"
#include "cuda/numbers.cuh"
#include "cuda/recurrent_rows.cuh"

namespace pass_ext::gpu {

constexpr int kConvolutionThreads = 128;
constexpr int kNodeThreads = 8;
constexpr int kBlockChannels = kNodeThreads * kNumbers;
constexpr int kNodesAtOnce = kConvolutionThreads / kNodeThreads;
static_assert(kMostTaps <= kNodeThreads, "each thread of a node finds one input of its window");

// The weights and the state of a block's channels, by tap.
struct ConvolutionShared {
  alignas(16) float weight[kMostTaps][kBlockChannels];
  alignas(16) float state[kMostTaps - 1][kBlockChannels];
};

// function(channel of the block, tap, the number there) for `taps` numbers of each of `count` channels; threads go
// through neighbours in memory.
template <typename T, typename Function>
PASS_EXT_DEVICE void for_each_tap(const T* from, int32_t count, int32_t taps, int64_t channel_distance,
                                  int64_t tap_distance, Function function) {
  const bool channels_first = channel_distance < tap_distance;
  for (int32_t i = static_cast<int32_t>(thread_rank()); i < count * taps; i += kConvolutionThreads) {
    const int32_t channel = channels_first ? i % count : i / taps, tap = channels_first ? i / count : i % taps;
    function(channel, tap, to_float(from[channel * channel_distance + tap * tap_distance]));
  }
}

template <typename T, bool wide>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kConvolutionThreads)
    convolution_kernel(PASS_EXT_PARAMETER ConvolutionTree<T> problem) {
  begin_kernel(problem);
  PASS_EXT_SHARED(ConvolutionShared, shared, 1);
  const uint32_t blocks = static_cast<uint32_t>((problem.channels + kBlockChannels - 1) / kBlockChannels);
  const int64_t request = block_index().x / blocks, first = int64_t{block_index().x % blocks} * kBlockChannels;
  const Forest forest = forest_of(problem, problem.slots);
  const RequestTree tree(forest, request);
  const int32_t thread = static_cast<int32_t>(thread_rank()), taps = static_cast<int32_t>(problem.taps);
  const int32_t channels =
      static_cast<int32_t>(problem.channels - first < kBlockChannels ? problem.channels - first : kBlockChannels);
  tree.for_each_cleared_row(forest, request, [&](int64_t row) {
    if (thread < channels) problem.out[row * problem.channels + first + thread] = T{};
  });
  if (tree.nodes == 0) return;

  for_each_tap(problem.weight + first * taps, channels, taps, taps, 1,
               [&](int32_t channel, int32_t tap, float value) { shared[0].weight[tap][channel] = value; });
  for_each_tap(problem.states + tree.slot * problem.slot_distance + first * problem.channel_distance, channels,
               taps - 1, problem.channel_distance, problem.tap_distance,
               [&](int32_t channel, int32_t tap, float value) { shared[0].state[tap][channel] = value; });
  const int32_t own = thread % kNodeThreads, channel = own * kNumbers, count = channels - channel;
  float bias[kNumbers] = {};
  if (problem.bias && count > 0) load_numbers<wide>(bias, problem.bias + first + channel, count);
  sync_block();
  for (int32_t base = 0; base < tree.nodes; base += kNodesAtOnce) {
    const int32_t node = base + thread / kNodeThreads;
    const bool is_node = node < tree.nodes;
    const int32_t found = is_node && own < taps
                              ? static_cast<int32_t>(input_of(problem.parents + tree.first, node, taps - 1 - own, taps))
                              : 0;
    float sum[kNumbers];
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) sum[i] = bias[i];
    for (int32_t j = 0; j < taps; ++j) {
      const int32_t input = shuffle(found, static_cast<int>(lane_index()) / kNodeThreads * kNodeThreads + j);
      if (!is_node || count <= 0) continue;
      float value[kNumbers], weight[kNumbers];
      load_numbers<wide>(weight, shared[0].weight[j] + channel, count);
      if (input >= 0)
        load_numbers<wide>(value, problem.x + (tree.first + input) * problem.row_distance + first + channel, count);
      else
        load_numbers<wide>(value, shared[0].state[-1 - input] + channel, count);
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) sum[i] = fused(weight[i], value[i], sum[i]);
    }
    if (!is_node || count <= 0) continue;
    if (problem.has_silu)
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) sum[i] = activated<Activation::silu>(sum[i]);
    store_numbers<wide>(problem.out + (tree.first + node) * problem.channels + first + channel, sum, count);
  }
}

template <typename T>
void launch_convolution_tree(const ConvolutionTree<T>& problem, Stream stream) {
  if (problem.rows == 0 || problem.channels == 0) return;
  const bool wide = is_whole(problem.channels) && is_whole(problem.row_distance) && is_aligned16(problem.x) &&
                    is_aligned16(problem.out) && is_aligned16(problem.bias);
  const int64_t blocks = (problem.channels + kBlockChannels - 1) / kBlockChannels;
  launch("convolution_tree", wide ? convolution_kernel<T, true> : convolution_kernel<T, false>,
         LaunchShape{{requests_of_launch(forest_of(problem, problem.slots)) * blocks}, {kConvolutionThreads}}, stream,
         problem);
}

}  // namespace pass_ext::gpu
