// Linear layers for few rows on the GPU: up to three products of the same rows in one launch, with the norm in front of
// them and what follows them. The problems: core/linear.h, core/step.h; the formulas: core/step-inl.h.
//   plain     out = product,  or residual + scale product, or queries and keys rotated
//   gated     out = activation(gate product) up product
//
// A block computes 16 outputs of up to 16 rows (in fp32: 8) and reads their weights once. Its warps share the numbers
// along `in`, 32 of them at a time; a thread reads eight neighbours of two outputs. The sum of an output has one order,
// whatever the other rows and outputs are. A launch behind another of its op reads its weights before that one has
// ended.
#pragma once

#include <cstdint>

#include "core/adapter.h"
#include "core/half.h"
#include "core/linear.h"
#include "core/step.h"
#include "cuda/linear_adapters.cuh"
#include "cuda/linear_norm.cuh"
#include "cuda/linear_sums.cuh"
#include "cuda/numbers.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kMostProducts = 3;

// A rotary embedding of the first `products` products, whose outputs are heads of `head_dim` numbers.
struct HeadRotation {
  const void *cos = nullptr, *sin = nullptr;  // [rows, dim]
  int64_t cos_row = 0, sin_row = 0;
  int dim = 0, head_dim = 1;
  bool is_float32 = false;  // else of the layer's type
  int products = 0;
};

// What rows of slots add to up to three products; ids null: nothing.
template <typename T>
struct ProductAdapters {
  AdapterIds ids;
  AdapterWeights<T> of[kMostProducts];
};

// Products of the same rows; gated: the first is the gate, the second `up`, and they share tiles.
template <typename T>
struct RowProducts {
  LinearRows<T> product[kMostProducts];
  int count;
  int64_t end_tile[kMostProducts];  // of each product, counted through all
  InputNorm<T> norm;
  HeadRotation rotation;
  ProductAdapters<T> adapters;
  T* gated_out;
  Activation activation;
  bool are_weights_ready;  // nothing under way writes them: they are read before the launch in front has ended
};

// ---- the outputs of a tile ----

// Tile rows 0 to 7 are outputs from `low` on, tile rows 8 to 15 from `high` on, each up to its end. `pairs`: tile rows
// r and r + 8 are a pair of the rotary embedding, the first being number `pair` of its head.
struct OutputTile {
  int product;
  int low, low_end, high, high_end;
  bool pairs;
  int pair;

  PASS_EXT_DEVICE int output(int row) const { return row < kHalfTile ? low + row : high + row - kHalfTile; }
  PASS_EXT_DEVICE bool has(int row) const { return output(row) < (row < kHalfTile ? low_end : high_end); }
};

// The output of a tile that a thread of its block finishes: that of tile row r and row n of the block, the first of a
// pair, or one of both products.
struct ThreadOutput {
  int n, r;
  bool is_there;

  PASS_EXT_DEVICE ThreadOutput(const OutputTile& tile, int count) {
    const int rank = static_cast<int>(thread_rank()), tile_rows = tile.pairs ? kHalfTile : kTileOutputs;
    n = rank / tile_rows;
    r = rank % tile_rows;
    is_there = n < count && tile.has(r);
  }
};

PASS_EXT_HOST_DEVICE int64_t tiles_of(int64_t outputs, int64_t of_tile) { return (outputs + of_tile - 1) / of_tile; }

// The tiles of a head: pairs first, then numbers that are not rotated.
PASS_EXT_HOST_DEVICE int pair_tiles(const HeadRotation& rotation) {
  return (rotation.dim / 2 + kHalfTile - 1) / kHalfTile;
}
PASS_EXT_HOST_DEVICE int tiles_of_head(const HeadRotation& rotation) {
  return pair_tiles(rotation) + (rotation.head_dim - rotation.dim + kTileOutputs - 1) / kTileOutputs;
}

template <typename T>
PASS_EXT_DEVICE OutputTile tile_of(const RowProducts<T>& problem, int64_t index) {
  int product = 0;
  int64_t before = 0;
#pragma unroll
  for (int i = 0; i + 1 < kMostProducts; ++i)
    if (i + 1 < problem.count && index >= problem.end_tile[i]) {
      product = i + 1;
      before = problem.end_tile[i];
    }
  const int at = static_cast<int>(index - before);
  const HeadRotation& rotation = problem.rotation;
  if (product >= rotation.products) {
    const int low = at * kTileOutputs, end = static_cast<int>(problem.product[product].outputs);
    return {product, low, end, low + kHalfTile, end, false, 0};
  }
  const int tiles = tiles_of_head(rotation), pairs = pair_tiles(rotation), place = at % tiles;
  const int head = at / tiles * rotation.head_dim, end = head + rotation.head_dim, half = rotation.dim / 2;
  if (place >= pairs) {
    const int low = head + rotation.dim + (place - pairs) * kTileOutputs;
    return {product, low, end, low + kHalfTile, end, false, 0};
  }
  const int low = head + place * kHalfTile;
  return {product, low, head + half, low + half, head + 2 * half, true, place * kHalfTile};
}

// ---- what follows the sums ----

// The rounded product of tile row `row` and row `n` of the block: the warps' sums, in their order, and the bias.
template <typename T, int rows, int weights>
PASS_EXT_DEVICE float product_at(const float* sums, int which, int n, int row, const T* bias, int64_t output) {
  const float total = total_of_warps<weights * rows * kSumStride>(sums + (which * rows + n) * kSumStride + row);
  return rounded<T>(bias ? total + to_float(bias[output]) : total);
}

// A rounded product with what the adapter of its row adds.
template <typename T>
PASS_EXT_DEVICE float with_adapter(const AddedOutputs& added, int i, float scale, float value) {
  return added.there >> i & 1 ? rounded<T>(fused(scale, added.sum[i], value)) : value;
}

template <typename T>
PASS_EXT_DEVICE void store_product(const LinearRows<T>& product, int64_t row, int64_t output, float value) {
  const int64_t place = row * product.outputs + output;
  value = scaled<T>(value, product.scale);
  if (product.residual) value = to_float(product.residual[place]) + value;
  product.out[place] = from_float<T>(value);
}

template <typename T>
PASS_EXT_DEVICE float factor_at(const HeadRotation& rotation, const void* table, int64_t place) {
  return rotation.is_float32 ? static_cast<const float*>(table)[place] : to_float(static_cast<const T*>(table)[place]);
}

struct Pair {
  float first, second;
};

// Numbers i and i + dim / 2 of a head, rotated; not yet rounded.
template <typename T>
PASS_EXT_DEVICE Pair rotated_pair(const HeadRotation& rotation, int64_t row, int i, Pair pair) {
  const int64_t j = i + rotation.dim / 2, cos_row = row * rotation.cos_row, sin_row = row * rotation.sin_row;
  const float cos[2] = {factor_at<T>(rotation, rotation.cos, cos_row + i),
                        factor_at<T>(rotation, rotation.cos, cos_row + j)};
  const float sin[2] = {factor_at<T>(rotation, rotation.sin, sin_row + i),
                        factor_at<T>(rotation, rotation.sin, sin_row + j)};
  if (rotation.is_float32 || sizeof(T) == sizeof(float))
    return {rotated_first<T, true>(pair.first, pair.second, cos[0], sin[0]),
            rotated_second<T, true>(pair.first, pair.second, cos[1], sin[1])};
  return {rotated_first<T, false>(pair.first, pair.second, cos[0], sin[0]),
          rotated_second<T, false>(pair.first, pair.second, cos[1], sin[1])};
}

// ---- the kernel ----

template <typename T, int row_tiles, bool gated, bool wide>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kLinearThreads, kIsFloat32<T> ? 1 : 2)
    linear_kernel(PASS_EXT_PARAMETER RowProducts<T> problem) {
  using Sums = TileSums<T, row_tiles>;
  constexpr int kRows = 8 * row_tiles, kWeights = gated ? 2 : 1;
  constexpr int kAhead = kIsFloat32<T> ? 1 : gated ? 2 : 4;  // units whose loads overlap
  static_assert(kTileOutputs * kRows <= kLinearThreads, "each thread has one output of a tile");
  float* const sums = dynamic_shared<float>();  // [warps, weights, rows, kSumStride]; behind them normed rows
  if (!problem.are_weights_ready) begin_kernel(problem);
  const LinearRows<T>& rows = problem.product[0];
  const int64_t in = rows.in, first_row = int64_t{block_index().y} * kRows;
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  const int64_t units = (in + kUnit - 1) / kUnit, of_lane = lane % 4 * kNumbers;

  const T* weight[kWeights][2];  // of this lane's outputs; null: there is none
  {
    const OutputTile tile = tile_of(problem, block_index().x);
#pragma unroll
    for (int w = 0; w < kWeights; ++w)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const LinearRows<T>& product = problem.product[gated ? w : tile.product];
        const int row = lane / 4 + half * kHalfTile;
        weight[w][half] = tile.has(row) ? product.weight + tile.output(row) * product.weight_row + of_lane : nullptr;
      }
  }
  Eight<T> next[kAhead][kWeights][2];
  const auto load_weights = [&](int64_t unit) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
#pragma unroll
      for (int w = 0; w < kWeights; ++w)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t k = (unit + a * kLinearWarps) * kUnit;
          next[a][w][half] =
              weight[w][half] == nullptr ? Eight<T>{} : load_eight<wide, true>(weight[w][half] + k, in - k - of_lane);
        }
  };
  load_weights(warp);
  const int count = static_cast<int>(rows.rows - first_row < kRows ? rows.rows - first_row : kRows);
  const AdapterIds& ids = problem.adapters.ids;
  SlotRows slots;
  if (ids.ids) slots = slot_rows(ids, first_row, count);
  begin_kernel();

  const T* x = rows.x + first_row * rows.x_row;
  int64_t x_row = rows.x_row;
  if (problem.norm.weight) {
    T* const normed = dynamic_shared<T>() + sum_bytes(kRows, kWeights) / sizeof(T);
    for (int n = warp; n < count; n += kLinearWarps)
      norm_row<wide>(normed + n * normed_stride<T>(in), x + n * x_row, problem.norm, in);
    sync_block();
    x = normed;
    x_row = normed_stride<T>(in);
  }
  AddedOutputs added;  // while the first weights are on their way
  if (slots.leaders) {
    const OutputTile tile = tile_of(problem, block_index().x);
    const ThreadOutput place(tile, count);
    const int64_t outputs = problem.product[gated ? 0 : tile.product].outputs;
    const int first = place.is_there ? tile.output(place.r) : -1;
    const int other = place.is_there && tile.pairs ? tile.output(place.r + kHalfTile) : -1;
    const int output[2] = {first, gated ? first : other};
    const AdapterWeights<T>* const of = problem.adapters.of;
    if constexpr (gated)
      added = add_adapters<wide, row_tiles>(sums, {of, of + 1}, slots, place.n, output, outputs, x, x_row, count, in);
    else
      added = add_adapters<wide, row_tiles>(sums, {of + tile.product}, slots, place.n, output, outputs, x, x_row, count,
                                            in);
  }
  Sums sum[kWeights];
  const T* x_of_lane[Sums::kLoads];  // a row that is not there is read as row 0, and its sums go nowhere
#pragma unroll
  for (int i = 0; i < Sums::kLoads; ++i) {
    const int n = Sums::row_of_load(i);
    x_of_lane[i] = x + (n < count ? n : 0) * x_row + of_lane;
  }
  for (int64_t unit = warp; unit < units; unit += kAhead * kLinearWarps) {
    Eight<T> now[kAhead][kWeights][2];
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
#pragma unroll
      for (int w = 0; w < kWeights; ++w)
#pragma unroll
        for (int half = 0; half < 2; ++half) now[a][w][half] = next[a][w][half];
    if (unit + kAhead * kLinearWarps < units) load_weights(unit + kAhead * kLinearWarps);
    if (wide && !kIsFloat32<T> && unit + (kAhead - 1) * kLinearWarps < units - 1) {  // whole units: no branch
#pragma unroll
      for (int pair = 0; pair < kAhead; pair += 2) {
        Eight<T> numbers[2][Sums::kLoads];
#pragma unroll
        for (int a = 0; a < 2; ++a)
#pragma unroll
          for (int i = 0; i < Sums::kLoads; ++i)
            numbers[a][i].part[0] = load16(x_of_lane[i] + (unit + (pair + a) * kLinearWarps) * kUnit);
#pragma unroll
        for (int a = 0; a < 2; ++a)
#pragma unroll
          for (int i = 0; i < Sums::kLoads; ++i)
#pragma unroll
            for (int w = 0; w < kWeights; ++w) sum[w].add(i, now[(pair + a) % kAhead][w], numbers[a][i]);
      }
      continue;
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (unit + a * kLinearWarps >= units) break;
      const int64_t k = (unit + a * kLinearWarps) * kUnit;
#pragma unroll
      for (int i = 0; i < Sums::kLoads; ++i) {
        const Eight<T> numbers = load_eight<wide, false>(x_of_lane[i] + k, in - k - of_lane);
#pragma unroll
        for (int w = 0; w < kWeights; ++w) sum[w].add(i, now[a][w], numbers);
      }
    }
  }
#pragma unroll
  for (int w = 0; w < kWeights; ++w) sum[w].store(sums + (warp * kWeights + w) * kRows * kSumStride);
  sync_block();

  const OutputTile tile = tile_of(problem, block_index().x);  // again: it would take registers from the loop
  const ThreadOutput place(tile, count);
  if (!place.is_there) return;
  const int n = place.n, r = place.r;
  const int64_t row = first_row + n, output = tile.output(r);
  if constexpr (gated) {
    float gate = product_at<T, kRows, 2>(sums, 0, n, r, problem.product[0].bias, output);
    float up = product_at<T, kRows, 2>(sums, 1, n, r, problem.product[1].bias, output);
    gate = with_adapter<T>(added, 0, ids.scale, gate);
    up = with_adapter<T>(added, 1, ids.scale, up);
    const float value = problem.activation == Activation::silu ? pass_ext::gated<T, Activation::silu>(gate, up)
                                                               : pass_ext::gated<T, Activation::gelu_tanh>(gate, up);
    problem.gated_out[row * problem.product[0].outputs + output] = from_float<T>(value);
  } else {
    const LinearRows<T>& product = problem.product[tile.product];
    float value = product_at<T, kRows, 1>(sums, 0, n, r, product.bias, output);
    value = with_adapter<T>(added, 0, ids.scale, value);
    if (!tile.pairs) return store_product(product, row, output, value);
    const int other = r + kHalfTile;
    float second = product_at<T, kRows, 1>(sums, 0, n, other, product.bias, tile.output(other));
    second = with_adapter<T>(added, 1, ids.scale, second);
    const Pair pair = rotated_pair<T>(problem.rotation, row, tile.pair + r, {value, second});
    product.out[row * product.outputs + output] = from_float<T>(pair.first);
    product.out[row * product.outputs + tile.output(other)] = from_float<T>(pair.second);
  }
}

}  // namespace pass_ext::gpu
