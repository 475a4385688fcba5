// Launches linear layers for few rows on the GPU. The kernel and what it computes: cuda/linear_kernel.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/linear_kernel.cuh"

namespace pass_ext::gpu {

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

// What rows of slots add to the products of a launch; wide: whether the adapters' rows are.
template <typename T>
bool take_adapters(RowProducts<T>& problem, const ProductAdapters<T>& adapters, int count) {
  bool wide = true, has_some = false;
  for (int i = 0; i < count; ++i) {
    wide = wide && is_aligned16(adapters.of[i].down);
    has_some = has_some || adapters.of[i].rank > 0;
  }
  if (has_some) problem.adapters = adapters;  // else no block reads the ids
  return wide;
}

template <typename T, bool gated, bool wide>
void launch_row_products(const char* name, const RowProducts<T>& problem, int64_t tiles, Stream stream) {
  if (tiles == 0) return;
  constexpr int kMostTiles = kIsFloat32<T> ? 1 : 2;
  const int64_t rows = problem.product[0].rows, of_block = rows_of_block<T>(rows);
  LaunchShape shape{{tiles, (rows + of_block - 1) / of_block}, {kLinearThreads}};
  shape.dynamic_shared_bytes = sum_bytes(of_block, gated ? 2 : 1);
  if (problem.norm.weight) shape.dynamic_shared_bytes += normed_bytes<T>(rows, problem.product[0].in);
  launch(name, of_block == 8 ? linear_kernel<T, 1, gated, wide> : linear_kernel<T, kMostTiles, gated, wide>, shape,
         stream, problem);
}

// Launches products of the same rows; the outputs of the first `rotation.products` are rotated. A norm must fit:
// normed_bytes.
template <typename T>
void launch_products(const char* name, const LinearRows<T>* products, int count, const InputNorm<T>& norm,
                     const HeadRotation& rotation, const ProductAdapters<T>& adapters, bool are_weights_ready,
                     Stream stream) {
  RowProducts<T> problem{};
  bool wide = take_adapters(problem, adapters, count) && (!norm.weight || is_aligned16(norm.weight));
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
  problem.are_weights_ready = are_weights_ready;
  wide ? launch_row_products<T, false, true>(name, problem, tiles, stream)
       : launch_row_products<T, false, false>(name, problem, tiles, stream);
}

// Launches out = activation(gate product) up product, [rows, outputs]; not as the first launch of an op.
template <typename T>
void launch_gated_products(const char* name, const LinearRows<T>& gate, const LinearRows<T>& up, T* out,
                           Activation activation, const InputNorm<T>& norm, const ProductAdapters<T>& adapters,
                           Stream stream) {
  RowProducts<T> problem{};
  problem.product[0] = gate;
  problem.product[1] = up;
  problem.count = 1;  // of tiles: both products have the same
  problem.norm = norm;
  problem.gated_out = out;
  problem.activation = activation;
  problem.are_weights_ready = true;
  const bool wide = take_adapters(problem, adapters, 2) && has_wide_rows(gate) && has_wide_rows(up) &&
                    (!norm.weight || is_aligned16(norm.weight));
  const int64_t tiles = problem.end_tile[0] = tiles_of(gate.outputs, kTileOutputs);
  wide ? launch_row_products<T, true, true>(name, problem, tiles, stream)
       : launch_row_products<T, true, false>(name, problem, tiles, stream);
}

}  // namespace pass_ext::gpu
