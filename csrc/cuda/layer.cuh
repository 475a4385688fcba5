// A decoder layer around its attention on the GPU, in few launches. The problem: core/layer.h.
//   before attention   1: norm, products and rotary embedding; where heads are normed 2: these and the rotation behind
//                      the products; where whole rows of q and k are normed 4
//   after attention    3: o and its addition; norm, gate and up; down and its addition. A norm behind o or down: 2 more
// A norm in front of products has a launch of its own where a block has no room for its rows. The adapters of slots add
// no launch.
#pragma once

#include <cstdint>

#include "core/layer.h"
#include "cuda/linear.cuh"
#include "cuda/step.cuh"

namespace pass_ext::gpu {

template <typename T>
InputNorm<T> input_norm(const LayerNorm<T>& norm, const LayerOptions& options) {
  return norm ? InputNorm<T>{norm.weight, options.eps, options.form} : InputNorm<T>{};
}

// True if the norm in front of products needs a launch of its own, and room for the normed rows.
template <typename T>
bool is_apart(const LayerNorm<T>& norm, int64_t rows) {
  return norm && normed_bytes<T>(rows, norm.dim) > kMostNormedBytes;
}

// The rows that products read, and the norm that is left to them.
template <typename T>
struct NormedRows {
  const T* x;
  InputNorm<T> norm;
};

template <typename T>
NormedRows<T> norm_in_front(const LayerNorm<T>& norm, const LayerOptions& options, const T* x, int64_t rows, T* room,
                            Stream stream) {
  if (!is_apart(norm, rows)) return {x, input_norm(norm, options)};
  launch_step(rows_of<T>(norm, x, room, rows, options), stream);
  return {room, {}};
}

template <typename T>
bool has_norms_behind(const LayerBefore<T>& layer) {
  return layer.q_norm || layer.k_norm;
}

// ---- heads, normed and rotated: a warp per head of a row ----

constexpr int kHeadWarps = 4;
constexpr int kMostHeadDim = 512;

// Queries and keys with the weights of their norms [head_dim], or null.
template <typename T>
struct NormedHeads {
  RotaryHeads<T> q, k;
  InputNorm<T> q_norm, k_norm;
  HeadRotation rotation;
  int64_t rows;
};

template <typename T, bool wide>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(32 * kHeadWarps) heads_kernel(PASS_EXT_PARAMETER NormedHeads<T> problem) {
  begin_kernel(problem);
  PASS_EXT_SHARED(float, all_numbers, kHeadWarps* kMostHeadDim);
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  const int64_t heads = problem.q.heads + problem.k.heads, index = int64_t{block_index().x} * kHeadWarps + warp;
  if (index >= problem.rows * heads) return;
  const int64_t row = index / heads;
  const bool is_query = index % heads < problem.q.heads;
  const RotaryHeads<T>& source = is_query ? problem.q : problem.k;
  const InputNorm<T>& norm = is_query ? problem.q_norm : problem.k_norm;
  const HeadRotation& rotation = problem.rotation;
  const int64_t head = is_query ? index % heads : index % heads - problem.q.heads, dim = rotation.head_dim;
  const T* from = source.data + row * source.row_distance + head * source.head_distance;
  T* to = source.out + (row * source.heads + head) * dim;
  float* const numbers = all_numbers + warp * kMostHeadDim;

  const float inverse = norm.weight ? inverse_rms(squares_of_row<wide>(from, dim), dim, norm.eps) : 1.0f;
  for (int64_t i = int64_t{kNumbers} * lane; i < dim; i += 32 * kNumbers) {
    float value[kNumbers], weight[kNumbers];
    load_numbers<wide>(value, from + i, dim - i);
    if (norm.weight) {
      load_numbers<wide>(weight, norm.weight + i, dim - i);
#pragma unroll
      for (int n = 0; n < kNumbers; ++n)
        value[n] = rounded<T>(weighted_by<T>(norm.form, value[n] * inverse, weight[n]));
    }
#pragma unroll
    for (int n = 0; n < kNumbers; ++n)
      if (i + n < dim) numbers[i + n] = value[n];
  }
  sync_warp();
  const int half = rotation.dim / 2;
  for (int i = lane; i < half; i += 32) {
    const Pair pair = rotated_pair<T>(rotation, row, i, {numbers[i], numbers[i + half]});
    to[i] = from_float<T>(pair.first);
    to[i + half] = from_float<T>(pair.second);
  }
  for (int64_t i = rotation.dim + lane; i < dim; i += 32) to[i] = from_float<T>(numbers[i]);
}

template <typename T>
void launch_heads(const char* name, const NormedHeads<T>& problem, Stream stream) {
  const auto is_wide = [](const InputNorm<T>& norm) { return !norm.weight || is_aligned16(norm.weight); };
  const bool wide = is_whole(problem.rotation.head_dim) && has_wide_rows(problem.q) && has_wide_rows(problem.k) &&
                    is_wide(problem.q_norm) && is_wide(problem.k_norm);
  const int64_t heads = problem.rows * (problem.q.heads + problem.k.heads);
  if (heads == 0) return;
  launch(name, wide ? heads_kernel<T, true> : heads_kernel<T, false>,
         LaunchShape{{(heads + kHeadWarps - 1) / kHeadWarps}, {32 * kHeadWarps}}, stream, problem);
}

// ---- before attention ----

// Numbers of the workspace that launch_before_attention needs.
template <typename T>
int64_t before_workspace(const LayerBefore<T>& layer, const Rotation& rotation, int64_t rows) {
  const int64_t heads = has_norms_behind(layer) && rotation.cos ? layer.q.outputs + layer.k.outputs : 0;
  return rows * (heads + (is_apart(layer.input_norm, rows) ? layer.q.in : 0));
}

// q, k, v [rows, heads, head_dim]
template <typename T>
void launch_before_attention(const LayerBefore<T>& layer, const BeforeAdapters<T>& adapters,
                             const LayerOptions& options, const Rotation& rotation, const T* x, int64_t rows, T* q,
                             T* k, T* v, T* workspace, Stream stream) {
  constexpr const char* name = "layer_before_attention";
  const bool has_norms = has_norms_behind(layer), rotates = rotation.cos != nullptr;
  T* const queries = has_norms && rotates ? workspace : q;
  T* const keys = has_norms && rotates ? workspace + rows * layer.q.outputs : k;
  T* const room = workspace + (has_norms && rotates ? rows * (layer.q.outputs + layer.k.outputs) : 0);
  const NormedRows<T> in = norm_in_front(layer.input_norm, options, x, rows, room, stream);
  const LinearRows<T> products[] = {rows_of(layer.q, in.x, queries, rows), rows_of(layer.k, in.x, keys, rows),
                                    rows_of(layer.v, in.x, v, rows)};
  HeadRotation heads{rotation.cos,
                     rotation.sin,
                     rotation.cos_row,
                     rotation.sin_row,
                     static_cast<int>(rotation.dim),
                     static_cast<int>(options.head_dim),
                     rotation.is_float32,
                     rotates && !has_norms ? 2 : 0};
  launch_products(name, products, 3, in.norm, heads, {adapters.ids, {adapters.q, adapters.k, adapters.v}}, false,
                  stream);
  if (!has_norms) return;

  const int64_t dim = options.head_dim;
  const auto is_of_heads = [&](const LayerNorm<T>& norm) { return !norm || norm.dim == dim; };
  if (rotates && dim <= kMostHeadDim && is_of_heads(layer.q_norm) && is_of_heads(layer.k_norm)) {
    const RotaryHeads<T> query_heads{queries, q, layer.q.outputs / dim, layer.q.outputs, dim};
    const RotaryHeads<T> key_heads{keys, k, layer.k.outputs / dim, layer.k.outputs, dim};
    return launch_heads(name,
                        NormedHeads<T>{query_heads, key_heads, input_norm(layer.q_norm, options),
                                       input_norm(layer.k_norm, options), heads, rows},
                        stream);
  }
  const auto norm_rows = [&](const LayerNorm<T>& norm, T* all, int64_t outputs) {
    if (norm && outputs > 0) launch_step(rows_of<T>(norm, all, all, rows * outputs / norm.dim, options), stream);
  };
  norm_rows(layer.q_norm, queries, layer.q.outputs);
  norm_rows(layer.k_norm, keys, layer.k.outputs);
  if (rotates)
    with_rotary(layer, options, rotation, queries, keys, q, k, rows,
                [&](const auto& problem) { launch_step(problem, stream); });
}

// ---- after attention ----

// sum = before + sum, [count]; a thread adds eight numbers.
template <typename T, bool wide>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kStepThreads) add_kernel(T* sum, const T* before, int64_t count) {
  begin_kernel();
  const int64_t i = (int64_t{block_index().x} * kStepThreads + thread_rank()) * kNumbers;
  if (i >= count) return;
  float value[kNumbers], other[kNumbers];
  load_numbers<wide>(value, sum + i, count - i);
  load_numbers<wide>(other, before + i, count - i);
#pragma unroll
  for (int n = 0; n < kNumbers; ++n) value[n] = other[n] + value[n];
  store_numbers<wide>(sum + i, value, count - i);
}

template <typename T>
void launch_add(const char* name, T* sum, const T* before, int64_t count, Stream stream) {
  const bool wide = is_whole(count) && is_aligned16(sum) && is_aligned16(before);
  constexpr int64_t kOfBlock = int64_t{kStepThreads} * kNumbers;
  launch(name, wide ? add_kernel<T, true> : add_kernel<T, false>,
         LaunchShape{{(count + kOfBlock - 1) / kOfBlock}, {kStepThreads}}, stream, sum, before, count);
}

// Numbers of the workspace that launch_after_attention needs.
template <typename T>
int64_t after_workspace(const LayerAfter<T>& layer, int64_t rows) {
  return rows * (layer.gate.outputs + layer.o.outputs * (is_apart(layer.mlp_norm, rows) ? 2 : 1));
}

// out [rows, width]; not residual
template <typename T>
void launch_after_attention(const LayerAfter<T>& layer, const AfterAdapters<T>& adapters, const LayerOptions& options,
                            const T* attended, const T* residual, int64_t rows, T* out, T* workspace, Stream stream) {
  constexpr const char* name = "layer_after_attention";
  T* const hidden = workspace;
  T* const middle = workspace + rows * layer.gate.outputs;
  // to = before + the product, normed or scaled
  const auto add_product = [&](T* to, const LayerLinear<T>& linear, const AdapterWeights<T>& adapter, const T* from,
                               const T* before, const LayerNorm<T>& norm, bool are_weights_ready) {
    LinearRows<T> product = rows_of(linear, from, to, rows);
    if (!norm) {
      product.residual = before;
      product.scale = options.scale;
    }
    launch_products<T>(name, &product, 1, {}, {}, {adapters.ids, {adapter}}, are_weights_ready, stream);
    if (!norm) return;
    launch_step(rows_of<T>(norm, to, to, rows, options), stream);
    launch_add(name, to, before, rows * linear.outputs, stream);
  };
  add_product(middle, layer.o, adapters.o, attended, residual, layer.attention_norm, false);
  const NormedRows<T> in =
      norm_in_front(layer.mlp_norm, options, middle, rows, middle + rows * layer.o.outputs, stream);
  launch_gated_products(name, rows_of<T>(layer.gate, in.x, nullptr, rows), rows_of<T>(layer.up, in.x, nullptr, rows),
                        hidden, options.activation, in.norm, {adapters.ids, {adapters.gate, adapters.up}}, stream);
  add_product(out, layer.down, adapters.down, hidden, middle, layer.output_norm, true);
}

}  // namespace pass_ext::gpu
