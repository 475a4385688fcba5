// Linear layers for few rows on the GPU: up to three products of the same rows in one launch, with the norm in front of
// them and what follows them. The problems: core/linear.h, core/step.h; the formulas: core/step-inl.h.
//   plain     out = product,  or residual + scale product, or queries and keys rotated
//   gated     out = activation(gate product) up product
//
// A block computes 16 outputs of up to 16 rows (in fp32: 8) and reads their weights once. Its warps share the numbers
// along `in`, 32 of them at a time; a thread reads eight neighbours of two outputs. The sum of an output has one order,
// whatever the other rows and outputs are. A launch that overlaps reads its weights before the launch in front has
// ended; so it must not be the first of its op, in front of which they could have been written.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/half.h"
#include "core/linear.h"
#include "core/step.h"
#include "cuda/numbers.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kLinearThreads = 256;
constexpr int kLinearWarps = kLinearThreads / 32;
constexpr int kTileOutputs = 16;
constexpr int kHalfTile = kTileOutputs / 2;
constexpr int kUnit = 4 * kNumbers;           // numbers along `in` that a warp multiplies at once
constexpr int kSumStride = kTileOutputs + 4;  // of sums in shared memory: the lanes of a warp write to different banks
constexpr int kMostProducts = 3;

// A norm of the rows in front of the products; weight null: none. The normed rows of a block lie in its shared memory.
template <typename T>
struct InputNorm {
  const T* weight = nullptr;
  float eps = 0.0f;
  NormForm form{};
};

// A rotary embedding of the first `products` products, whose outputs are heads of `head_dim` numbers.
struct HeadRotation {
  const void *cos = nullptr, *sin = nullptr;  // [rows, dim]
  int64_t cos_row = 0, sin_row = 0;
  int dim = 0, head_dim = 1;
  bool is_float32 = false;  // else of the layer's type
  int products = 0;
};

// Products of the same rows; gated: the first is the gate, the second `up`, and they share tiles.
template <typename T>
struct RowProducts {
  LinearRows<T> product[kMostProducts];
  int count;
  int64_t end_tile[kMostProducts];  // of each product, counted through all
  InputNorm<T> norm;
  HeadRotation rotation;
  T* gated_out;
  Activation activation;
};

// ---- the outputs of a tile ----

// Tile rows 0 to 7 are outputs from `low` on, tile rows 8 to 15 from `high` on, each up to its end. `pairs`: tile rows
// r and r + 8 are a pair of the rotary embedding, the first being number `pair` of its head.
struct OutputTile {
  int product;
  int64_t low, low_end, high, high_end;
  bool pairs;
  int pair;

  PASS_EXT_DEVICE int64_t output(int row) const { return row < kHalfTile ? low + row : high + row - kHalfTile; }
  PASS_EXT_DEVICE bool has(int row) const { return output(row) < (row < kHalfTile ? low_end : high_end); }
};

PASS_EXT_HOST_DEVICE int64_t tiles_of(int64_t outputs, int64_t of_tile) { return (outputs + of_tile - 1) / of_tile; }

// The tiles of a head: pairs first, then numbers that are not rotated.
PASS_EXT_HOST_DEVICE int64_t pair_tiles(const HeadRotation& rotation) { return tiles_of(rotation.dim / 2, kHalfTile); }
PASS_EXT_HOST_DEVICE int64_t tiles_of_head(const HeadRotation& rotation) {
  return pair_tiles(rotation) + tiles_of(rotation.head_dim - rotation.dim, kTileOutputs);
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
  index -= before;
  const HeadRotation& rotation = problem.rotation;
  if (product >= rotation.products) {
    const int64_t low = index * kTileOutputs, end = problem.product[product].outputs;
    return {product, low, end, low + kHalfTile, end, false, 0};
  }
  const int64_t tiles = tiles_of_head(rotation), pairs = pair_tiles(rotation), place = index % tiles;
  const int64_t head = index / tiles * rotation.head_dim, end = head + rotation.head_dim, half = rotation.dim / 2;
  if (place >= pairs) {
    const int64_t low = head + rotation.dim + (place - pairs) * kTileOutputs;
    return {product, low, end, low + kHalfTile, end, false, 0};
  }
  const int64_t low = head + place * kHalfTile;
  return {product, low, head + half, low + half, head + 2 * half, true, static_cast<int>(place) * kHalfTile};
}

// ---- eight numbers as they lie in memory ----

template <typename T>
struct Eight {
  Bytes16 part[sizeof(T) / 2];
};

PASS_EXT_DEVICE uint32_t raw_bits(bfloat16 value) { return value.bits; }
PASS_EXT_DEVICE uint32_t raw_bits(float16 value) { return value.bits; }
PASS_EXT_DEVICE uint32_t raw_bits(float value) { return bits_of(value); }

// Numbers behind `count` are 0. `streams`: the launch only reads them, and once.
template <bool wide, bool streams, typename T>
PASS_EXT_DEVICE Eight<T> load_eight(const T* from, int64_t count) {
  constexpr int kInPart = 16 / sizeof(T), kInWord = 4 / sizeof(T);
  Eight<T> eight{};
  if (count <= 0) return eight;
#pragma unroll
  for (int p = 0; p < kNumbers / kInPart; ++p) {
    if constexpr (wide) {
      eight.part[p] = streams ? load16_streaming(from + p * kInPart) : load16(from + p * kInPart);
    } else {
#pragma unroll
      for (int i = 0; i < kInPart; ++i)
        if (p * kInPart + i < count)
          eight.part[p].word[i / kInWord] |= raw_bits(from[p * kInPart + i]) << i % kInWord * 16;
    }
  }
  return eight;
}

template <typename T>
PASS_EXT_DEVICE float number_of(const Eight<T>& eight, int i) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return float_of(eight.part[i / 4].word[i % 4]);
  } else {
    const uint32_t pair = eight.part[0].word[i / 2];
    return i % 2 == 0 ? unpack_low<T>(pair) : unpack_high<T>(pair);
  }
}

// ---- the rows, normed on the way ----

// The sum of squares of a row in the order that core/step.h defines; all lanes of the warp get it. Lane l has the
// partial sums 256 m + 8 l + n.
template <bool wide, typename T>
PASS_EXT_DEVICE float squares_of_row(const T* x, int64_t dim) {
  constexpr int kParts = kPartialSums / (32 * kNumbers);
  float partial[kParts][kNumbers] = {};
  for (int64_t first = int64_t{kNumbers} * lane_index(); first < dim; first += kPartialSums) {
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
      const int64_t i = first + m * 32 * kNumbers;
      if (i >= dim) continue;
      float value[kNumbers];
      load_numbers<wide>(value, x + i, dim - i);
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) partial[m][n] = fused(value[n], value[n], partial[m][n]);
    }
  }
#pragma unroll
  for (int half = kParts / 2; half > 0; half /= 2)
#pragma unroll
    for (int m = 0; m < half; ++m)
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) partial[m][n] += partial[m + half][n];
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) partial[0][n] += shuffle_xor(partial[0][n], step);
#pragma unroll
  for (int half = kNumbers / 2; half > 0; half /= 2)
#pragma unroll
    for (int n = 0; n < half; ++n) partial[0][n] += partial[0][n + half];
  return partial[0][0];
}

template <typename T>
PASS_EXT_DEVICE float weighted_by(NormForm form, float normal, float weight) {
  switch (form) {
    case NormForm::llama: return weighted<T, NormForm::llama>(normal, weight);
    case NormForm::olmo2: return weighted<T, NormForm::olmo2>(normal, weight);
    default: return weighted<T, NormForm::gemma>(normal, weight);
  }
}

// Elements between normed rows in shared memory: eight lanes that read 16 bytes of two rows meet different banks.
template <typename T>
PASS_EXT_HOST_DEVICE int64_t normed_stride(int64_t in) {
  constexpr int64_t kLine = 128 / sizeof(T);
  return (in + kLine - 1) / kLine * kLine + kLine / 2;
}

// Writes the row, normed, to shared memory; by a warp.
template <bool wide, typename T>
PASS_EXT_DEVICE void norm_row(T* to, const T* x, const InputNorm<T>& norm, int64_t in) {
  const float inverse = inverse_rms(squares_of_row<wide>(x, in), in, norm.eps);
#pragma unroll 1
  for (int64_t i = int64_t{kNumbers} * lane_index(); i < in; i += 32 * kNumbers) {
    float value[kNumbers], weight[kNumbers];
    load_numbers<wide>(value, x + i, in - i);
    load_numbers<wide>(weight, norm.weight + i, in - i);
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) value[n] = weighted_by<T>(norm.form, value[n] * inverse, weight[n]);
    store_numbers<wide>(to + i, value, in - i);
  }
}

// ---- a warp's sums: 16 outputs times the rows of the block ----

// 16-bit floats, by the matrix unit. A lane gives, for the rows of x as for the outputs, numbers 8 t to 8 t + 7 of a
// unit, t = lane % 4; which of them the unit takes for which of its own does not matter, as both sides agree.
template <typename T, int row_tiles>
struct TileSums {
  static constexpr int kLoads = row_tiles;  // rows of x that a lane reads
  float sum[row_tiles][4] = {};

  static PASS_EXT_DEVICE int row_of_load(int load) { return 8 * load + static_cast<int>(lane_index()) / 4; }

  PASS_EXT_DEVICE void add(int load, const Eight<T> (&weight)[2], const Eight<T>& x) {
#pragma unroll
    for (int word = 0; word < 4; word += 2) {
      const uint32_t a[4] = {weight[0].part[0].word[word], weight[1].part[0].word[word],
                             weight[0].part[0].word[word + 1], weight[1].part[0].word[word + 1]};
      const uint32_t b[2] = {x.part[0].word[word], x.part[0].word[word + 1]};
      multiply_m16n8k16<T>(sum[load], a, b);
    }
  }

  PASS_EXT_DEVICE void store(float* to) const {
    const int g = static_cast<int>(lane_index()) / 4, t = static_cast<int>(lane_index()) % 4;
#pragma unroll
    for (int tile = 0; tile < row_tiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) to[(8 * tile + 2 * t + i % 2) * kSumStride + g + i / 2 * kHalfTile] = sum[tile][i];
  }
};

// fp32, exact products: a lane adds up its numbers of two outputs for all rows.
template <int row_tiles>
struct TileSums<float, row_tiles> {
  static constexpr int kLoads = 8 * row_tiles;
  float sum[kLoads][2] = {};

  static PASS_EXT_DEVICE int row_of_load(int load) { return load; }

  PASS_EXT_DEVICE void add(int load, const Eight<float> (&weight)[2], const Eight<float>& x) {
#pragma unroll
    for (int which = 0; which < 2; ++which)
#pragma unroll
      for (int i = 0; i < kNumbers; ++i)
        sum[load][which] = fused(number_of(weight[which], i), number_of(x, i), sum[load][which]);
  }

  PASS_EXT_DEVICE void store(float* to) const {
    const int g = static_cast<int>(lane_index()) / 4, t = static_cast<int>(lane_index()) % 4;
#pragma unroll
    for (int row = 0; row < kLoads; ++row)
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        float total = sum[row][which];
        total += shuffle_xor(total, 1);
        total += shuffle_xor(total, 2);
        if (row % 4 == t) to[row * kSumStride + g + which * kHalfTile] = total;
      }
  }
};

// ---- what follows the sums ----

// The rounded product of tile row `row` and row `n` of the block: the warps' sums, in their order, and the bias.
template <typename T, int rows, int weights>
PASS_EXT_DEVICE float product_at(const float* sums, int which, int n, int row, const T* bias, int64_t output) {
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kLinearWarps; ++warp)
    total += sums[((warp * weights + which) * rows + n) * kSumStride + row];
  return rounded<T>(bias ? total + to_float(bias[output]) : total);
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

// Bytes of the warps' sums of a block; a multiple of 128.
PASS_EXT_HOST_DEVICE constexpr int64_t sum_bytes(int64_t rows, int weights) {
  return kLinearWarps * weights * rows * kSumStride * int64_t{sizeof(float)};
}

// fp32 needs the registers of a multiprocessor for one block.
template <typename T>
constexpr bool kIsFloat32 = sizeof(T) == sizeof(float);

template <typename T, int row_tiles, bool gated, bool wide>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kLinearThreads, kIsFloat32<T> ? 1 : 2)
    linear_kernel(PASS_EXT_PARAMETER RowProducts<T> problem) {
  using Sums = TileSums<T, row_tiles>;
  constexpr int kRows = 8 * row_tiles, kWeights = gated ? 2 : 1;
  constexpr int kAhead = kIsFloat32<T> ? 1 : gated ? 2 : 4;  // units whose loads overlap
  float* const sums = dynamic_shared<float>();  // [warps, weights, rows, kSumStride]; behind them normed rows
  let_next_begin();
  const LinearRows<T>& rows = problem.product[0];
  const int64_t in = rows.in, first_row = int64_t{block_index().y} * kRows;
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  const OutputTile tile = tile_of(problem, block_index().x);
  const int64_t units = (in + kUnit - 1) / kUnit, of_lane = lane % 4 * kNumbers;

  const T* weight[kWeights][2];  // of this lane's outputs; null: there is none
#pragma unroll
  for (int w = 0; w < kWeights; ++w)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const LinearRows<T>& product = problem.product[gated ? w : tile.product];
      const int row = lane / 4 + half * kHalfTile;
      weight[w][half] = tile.has(row) ? product.weight + tile.output(row) * product.weight_row + of_lane : nullptr;
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
  wait_for_launch_before();

  const T* x = rows.x + first_row * rows.x_row;
  int64_t x_row = rows.x_row;
  const int count = static_cast<int>(rows.rows - first_row < kRows ? rows.rows - first_row : kRows);
  if (problem.norm.weight) {
    T* const normed = dynamic_shared<T>() + sum_bytes(kRows, kWeights) / sizeof(T);
    for (int n = warp; n < count; n += kLinearWarps)
      norm_row<wide>(normed + n * normed_stride<T>(in), x + n * x_row, problem.norm, in);
    sync_block();
    x = normed;
    x_row = normed_stride<T>(in);
  }
  Sums sum[kWeights];
  for (int64_t unit = warp; unit < units; unit += kAhead * kLinearWarps) {
    Eight<T> now[kAhead][kWeights][2];
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
#pragma unroll
      for (int w = 0; w < kWeights; ++w)
#pragma unroll
        for (int half = 0; half < 2; ++half) now[a][w][half] = next[a][w][half];
    if (unit + kAhead * kLinearWarps < units) load_weights(unit + kAhead * kLinearWarps);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (unit + a * kLinearWarps >= units) break;
      const int64_t k = (unit + a * kLinearWarps) * kUnit + of_lane;
#pragma unroll
      for (int i = 0; i < Sums::kLoads; ++i) {
        const int n = Sums::row_of_load(i);
        const Eight<T> numbers = n < count ? load_eight<wide, false>(x + n * x_row + k, in - k) : Eight<T>{};
#pragma unroll
        for (int w = 0; w < kWeights; ++w) sum[w].add(i, now[a][w], numbers);
      }
    }
  }
#pragma unroll
  for (int w = 0; w < kWeights; ++w) sum[w].store(sums + (warp * kWeights + w) * kRows * kSumStride);
  sync_block();

  const int tile_rows = tile.pairs ? kHalfTile : kTileOutputs;
  for (int index = static_cast<int>(thread_rank()); index < tile_rows * kRows; index += kLinearThreads) {
    const int n = index / tile_rows, r = index % tile_rows;
    const int64_t row = first_row + n, output = tile.output(r);
    if (n >= count || !tile.has(r)) continue;
    if constexpr (gated) {
      const float gate = product_at<T, kRows, 2>(sums, 0, n, r, problem.product[0].bias, output);
      const float up = product_at<T, kRows, 2>(sums, 1, n, r, problem.product[1].bias, output);
      const float value = problem.activation == Activation::silu ? pass_ext::gated<T, Activation::silu>(gate, up)
                                                                 : pass_ext::gated<T, Activation::gelu_tanh>(gate, up);
      problem.gated_out[row * problem.product[0].outputs + output] = from_float<T>(value);
    } else {
      const LinearRows<T>& product = problem.product[tile.product];
      const float value = product_at<T, kRows, 1>(sums, 0, n, r, product.bias, output);
      if (!tile.pairs) {
        store_product(product, row, output, value);
        continue;
      }
      const int other = r + kHalfTile;
      const float second = product_at<T, kRows, 1>(sums, 0, n, other, product.bias, tile.output(other));
      const Pair pair = rotated_pair<T>(problem.rotation, row, tile.pair + r, {value, second});
      product.out[row * product.outputs + output] = from_float<T>(pair.first);
      product.out[row * product.outputs + tile.output(other)] = from_float<T>(pair.second);
    }
  }
}

// ---- launch ----

template <typename T>
int64_t rows_of_block(int64_t rows) {
  return rows <= 8 || kIsFloat32<T> ? 8 : 16;
}

// Bytes of the normed rows of a block, and the most that fit.
constexpr int64_t kMostNormedBytes = 64 * 1024;
template <typename T>
int64_t normed_bytes(int64_t rows, int64_t in) {
  return std::min(rows, rows_of_block<T>(rows)) * normed_stride<T>(in) * int64_t{sizeof(T)};
}

template <typename T>
bool has_wide_rows(const LinearRows<T>& product) {
  return is_whole(product.in) && is_whole(product.x_row) && is_whole(product.weight_row) && is_aligned16(product.x) &&
         is_aligned16(product.weight);
}

template <typename T, bool gated, bool wide>
void launch_row_products(const char* name, const RowProducts<T>& problem, int64_t tiles, bool overlaps, Stream stream) {
  if (tiles == 0) return;
  constexpr int kMostTiles = kIsFloat32<T> ? 1 : 2;
  const int64_t rows = problem.product[0].rows, of_block = rows_of_block<T>(rows);
  LaunchShape shape{{tiles, (rows + of_block - 1) / of_block}, {kLinearThreads}};
  shape.dynamic_shared_bytes = sum_bytes(of_block, gated ? 2 : 1);
  if (problem.norm.weight) shape.dynamic_shared_bytes += normed_bytes<T>(rows, problem.product[0].in);
  shape.overlaps = overlaps;
  launch(name, of_block == 8 ? linear_kernel<T, 1, gated, wide> : linear_kernel<T, kMostTiles, gated, wide>, shape,
         stream, problem);
}

// Launches products of the same rows; the outputs of the first `rotation.products` are rotated. A norm must fit:
// normed_bytes.
template <typename T>
void launch_products(const char* name, const LinearRows<T>* products, int count, const InputNorm<T>& norm,
                     const HeadRotation& rotation, bool overlaps, Stream stream) {
  RowProducts<T> problem{};
  bool wide = !norm.weight || is_aligned16(norm.weight);
  int64_t tiles = 0;
  for (int i = 0; i < count; ++i) {
    problem.product[i] = products[i];
    tiles += i < rotation.products ? products[i].outputs / rotation.head_dim * tiles_of_head(rotation)
                                   : tiles_of(products[i].outputs, kTileOutputs);
    problem.end_tile[i] = tiles;
    wide = wide && has_wide_rows(products[i]);
  }
  problem.count = count;
  problem.norm = norm;
  problem.rotation = rotation;
  wide ? launch_row_products<T, false, true>(name, problem, tiles, overlaps, stream)
       : launch_row_products<T, false, false>(name, problem, tiles, overlaps, stream);
}

// Launches out = activation(gate product) up product, [rows, outputs]; not as the first launch of an op.
template <typename T>
void launch_gated_products(const char* name, const LinearRows<T>& gate, const LinearRows<T>& up, T* out,
                           Activation activation, const InputNorm<T>& norm, Stream stream) {
  RowProducts<T> problem{};
  problem.product[0] = gate;
  problem.product[1] = up;
  problem.count = 1;  // of tiles: both products have the same
  problem.norm = norm;
  problem.gated_out = out;
  problem.activation = activation;
  const bool wide = has_wide_rows(gate) && has_wide_rows(up) && (!norm.weight || is_aligned16(norm.weight));
  const int64_t tiles = problem.end_tile[0] = tiles_of(gate.outputs, kTileOutputs);
  wide ? launch_row_products<T, true, true>(name, problem, tiles, true, stream)
       : launch_row_products<T, true, false>(name, problem, tiles, true, stream);
}

}  // namespace pass_ext::gpu
