// Look-ahead embedding injection on the GPU: a row gather from two sources in one launch, and its gradient as a
// deterministic segment sum. The problem and its formulas: core/lookahead.h.
//
// An id out of range reads nothing and gives a row of zeros, because an error message would need a synchronisation. The
// Python op has a switch that checks ids first (pass_ext/ops/lookahead.py).
#pragma once

#include <type_traits>

#include "core/half.h"
#include "core/lookahead.h"
#include "cuda/numbers.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// The elements that a thread moves at once: 16 bytes of T if addresses allow it (`wide`), else one element.
template <typename T, bool wide>
struct alignas(wide ? 16 : alignof(T)) Chunk {
  static constexpr int size = wide ? 16 / sizeof(T) : 1;
  T value[size];
};

template <typename T, bool wide, typename S>
PASS_EXT_DEVICE Chunk<T, wide> load_chunk(const S* from) {
  Chunk<T, wide> chunk;
  if constexpr (wide && !std::is_same_v<T, S> && sizeof(S) > sizeof(T)) {
    S source[chunk.size];
    for (int i = 0; i < static_cast<int>(sizeof source / 16); ++i) {
      const Bytes16 bytes = load16(reinterpret_cast<const char*>(from) + 16 * i);
      memcpy(reinterpret_cast<char*>(source) + 16 * i, &bytes, sizeof bytes);
    }
    for (int i = 0; i < chunk.size; ++i) chunk.value[i] = from_float<T>(source[i]);
  } else if constexpr (!std::is_same_v<T, S>) {
    for (int i = 0; i < chunk.size; ++i) chunk.value[i] = from_float<T>(from[i]);
  } else if constexpr (wide) {
    const Bytes16 bytes = load16(from);
    memcpy(&chunk, &bytes, sizeof chunk);
  } else {
    chunk.value[0] = *from;
  }
  return chunk;
}

template <typename T, bool wide>
PASS_EXT_DEVICE void store_chunk(T* to, const Chunk<T, wide>& chunk) {
  if constexpr (wide) {
    Bytes16 bytes;
    memcpy(&bytes, &chunk, sizeof bytes);
    store16_global(to, bytes);
  } else {
    *to = chunk.value[0];
  }
}

// ---- forward: one warp copies up to four chunks a lane of one row, all loads before the first store ----

constexpr int kWarpsPerBlock = 8;
constexpr int kChunksPerLane = 4;
constexpr int kChunksPerWarp = 32 * kChunksPerLane;

template <typename T, typename S, typename Id, bool wide>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(32 * kWarpsPerBlock) embed_kernel(LookaheadEmbed<T, S, Id> problem) {
  begin_kernel();
  constexpr int kElements = Chunk<T, wide>::size;
  const int64_t warps_per_row = (problem.dim / kElements + kChunksPerWarp - 1) / kChunksPerWarp;
  const int64_t warp = static_cast<int64_t>(block_index().x) * kWarpsPerBlock + warp_index();
  const int64_t row = warp / warps_per_row;
  if (row >= problem.rows) return;
  const int64_t first_chunk = warp % warps_per_row * kChunksPerWarp + lane_index();

  const int64_t id = problem.ids[row];
  const int64_t table_row = row_of_id(id, false, problem.vocabulary), slot = row_of_id(id, true, problem.slots);
  Chunk<T, wide> chunk[kChunksPerLane] = {};
#pragma unroll
  for (int i = 0; i < kChunksPerLane; ++i) {
    const int64_t element = (first_chunk + 32 * i) * kElements;
    if (element >= problem.dim) continue;
    if (table_row >= 0)
      chunk[i] = load_chunk<T, wide>(problem.table + table_row * problem.table_stride + element);
    else if (slot >= 0)
      chunk[i] = load_chunk<T, wide>(problem.lookahead + slot * problem.dim + element);
  }
#pragma unroll
  for (int i = 0; i < kChunksPerLane; ++i) {
    const int64_t element = (first_chunk + 32 * i) * kElements;
    if (element < problem.dim) store_chunk(problem.out + row * problem.dim + element, chunk[i]);
  }
}

template <typename T, typename S, typename Id, bool wide>
void launch_embed(const LookaheadEmbed<T, S, Id>& problem, Stream stream) {
  const int64_t warps_per_row = (problem.dim / Chunk<T, wide>::size + kChunksPerWarp - 1) / kChunksPerWarp;
  const int64_t blocks = (problem.rows * warps_per_row + kWarpsPerBlock - 1) / kWarpsPerBlock;
  launch("lookahead_embed", embed_kernel<T, S, Id, wide>, LaunchShape{{blocks}, {32 * kWarpsPerBlock}}, stream,
         problem);
}

template <typename T, typename S, typename Id>
void launch_lookahead_embed(const LookaheadEmbed<T, S, Id>& problem, Stream stream) {
  if (problem.rows == 0 || problem.dim == 0) return;
  const bool wide = problem.dim * sizeof(T) % 16 == 0 && problem.table_stride * sizeof(T) % 16 == 0 &&
                    is_aligned16(problem.table) && is_aligned16(problem.lookahead) && is_aligned16(problem.out);
  if (wide)
    launch_embed<T, S, Id, true>(problem, stream);
  else
    launch_embed<T, S, Id, false>(problem, stream);
}

// ---- gradient: a thread owns one chunk of columns of one row of the result and adds the matching rows in order ----

constexpr int kColumnThreads = 128;
constexpr int kRowsInFlight = 4;
constexpr int64_t kPositionsPerSplit = 128;
constexpr int64_t kMostSplits = 64;

template <typename T>
PASS_EXT_DEVICE sum_t<T> widen(T value) {
  if constexpr (std::is_same_v<T, double>)
    return value;
  else
    return to_float(value);
}

template <typename S, typename Sum>
PASS_EXT_DEVICE S narrow(Sum sum) {
  if constexpr (std::is_same_v<S, double>)
    return sum;
  else
    return from_float<S>(static_cast<float>(sum));
}

// sum += grad[n][element …] for the n in [begin, end) whose id picks `row`. Whole warps must call it; lanes without a
// column (element >= dim) only help to find the matches.
template <typename T, typename S, typename Id, bool wide>
PASS_EXT_DEVICE void add_matching_rows(sum_t<T> (&sum)[Chunk<T, wide>::size],
                                       const LookaheadEmbedBackward<T, S, Id>& problem, int64_t row, int64_t begin,
                                       int64_t end, int64_t element) {
  const bool has_column = element < problem.dim;
  for (int64_t base = begin; base < end; base += 32) {
    const int64_t position = base + lane_index();
    unsigned matches =
        ballot(position < end && row_of_id(problem.ids[position], problem.slots, problem.out_rows) == row);
    while (matches != 0) {
      Chunk<T, wide> chunk[kRowsInFlight] = {};
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) {
        if (matches == 0) continue;
        const int64_t match = base + first_set_bit(matches);
        matches &= matches - 1;
        if (has_column) chunk[i] = load_chunk<T, wide>(problem.grad + match * problem.dim + element);
      }
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i)
        for (int k = 0; k < Chunk<T, wide>::size; ++k) sum[k] += widen(chunk[i].value[k]);
    }
  }
}

// Gradient of the look-ahead rows: few, each with many positions, so the positions are split and block z adds split z.
// One split writes the result; several write partial sums [splits, out_rows, dim] for merge_splits_kernel.
template <typename T, typename S, typename Id, bool wide>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kColumnThreads)
    sum_slots_kernel(LookaheadEmbedBackward<T, S, Id> problem, sum_t<T>* partial, int64_t positions_per_split) {
  begin_kernel();
  constexpr int kElements = Chunk<T, wide>::size;
  const int64_t row = block_index().x, split = block_index().z;
  const int64_t element = (static_cast<int64_t>(block_index().y) * kColumnThreads + thread_index().x) * kElements;
  const int64_t begin = split * positions_per_split;
  const int64_t end = begin + positions_per_split < problem.rows ? begin + positions_per_split : problem.rows;
  sum_t<T> sum[kElements] = {};
  add_matching_rows<T, S, Id, wide>(sum, problem, row, begin, end, element);
  if (element >= problem.dim) return;
  for (int k = 0; k < kElements; ++k) {
    if (grid_size().z == 1)
      problem.out[row * problem.dim + element + k] = narrow<S>(sum[k]);
    else
      partial[(split * problem.out_rows + row) * problem.dim + element + k] = sum[k];
  }
}

// out[i] = partial[0][i] + partial[1][i] + …, in this order.
template <typename S, typename Sum>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kColumnThreads)
    merge_splits_kernel(const Sum* partial, S* out, int64_t elements, int64_t splits) {
  begin_kernel();
  const int64_t element = static_cast<int64_t>(block_index().x) * kColumnThreads + thread_index().x;
  if (element >= elements) return;
  Sum sum = 0;
  for (int64_t split = 0; split < splits; ++split) sum += partial[split * elements + element];
  out[element] = narrow<S>(sum);
}

// Gradient of the table rows: many, most without a position. The block of a row's first position adds all its
// positions; `out` is zero before. Finding the first position reads up to `rows` ids per block, from cache: rows^2 / 2
// ids in all.
template <typename T, typename S, typename Id, bool wide>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kColumnThreads) sum_table_kernel(LookaheadEmbedBackward<T, S, Id> problem) {
  begin_kernel();
  constexpr int kElements = Chunk<T, wide>::size;
  const int64_t position = block_index().x;
  const int64_t element = (static_cast<int64_t>(block_index().y) * kColumnThreads + thread_index().x) * kElements;
  const Id id = problem.ids[position];
  const int64_t row = row_of_id(id, problem.slots, problem.out_rows);
  if (row < 0) return;
  bool is_earlier = false;
  for (int64_t n = thread_index().x; n < position; n += kColumnThreads) is_earlier |= problem.ids[n] == id;
  if (sync_block_count(is_earlier) != 0) return;
  sum_t<T> sum[kElements] = {};
  add_matching_rows<T, S, Id, wide>(sum, problem, row, position, problem.rows, element);
  if (element >= problem.dim) return;
  for (int k = 0; k < kElements; ++k) problem.out[row * problem.dim + element + k] = narrow<S>(sum[k]);
}

// The number of splits of the look-ahead gradient for `rows` positions. It depends on the shape alone, so that sums do
// not depend on the GPU. Several splits need memory for partial sums [splits, out_rows, dim].
inline int64_t count_splits(int64_t rows) {
  const int64_t splits = (rows + kPositionsPerSplit - 1) / kPositionsPerSplit;
  return splits < 1 ? 1 : splits > kMostSplits ? kMostSplits : splits;
}

template <typename T, typename S, typename Id, bool wide>
void launch_backward(const LookaheadEmbedBackward<T, S, Id>& problem, sum_t<T>* partial, Stream stream) {
  const int64_t columns_per_block = kColumnThreads * Chunk<T, wide>::size;
  const int64_t column_blocks = (problem.dim + columns_per_block - 1) / columns_per_block;
  if (!problem.slots) {
    if (problem.rows == 0) return;
    launch("lookahead_embed_backward", sum_table_kernel<T, S, Id, wide>,
           LaunchShape{{problem.rows, column_blocks}, {kColumnThreads}}, stream, problem);
    return;
  }
  const int64_t splits = count_splits(problem.rows);
  const int64_t positions_per_split = (problem.rows + splits - 1) / splits;
  launch("lookahead_embed_backward", sum_slots_kernel<T, S, Id, wide>,
         LaunchShape{{problem.out_rows, column_blocks, splits}, {kColumnThreads}}, stream, problem, partial,
         positions_per_split);
  if (splits == 1) return;
  const int64_t elements = problem.out_rows * problem.dim;
  launch("lookahead_embed_backward (merge)", merge_splits_kernel<S, sum_t<T>>,
         LaunchShape{{(elements + kColumnThreads - 1) / kColumnThreads}, {kColumnThreads}}, stream, partial,
         problem.out, elements, splits);
}

template <typename T, typename S, typename Id>
void launch_lookahead_embed_backward(const LookaheadEmbedBackward<T, S, Id>& problem, sum_t<T>* partial,
                                     Stream stream) {
  if (problem.out_rows == 0 || problem.dim == 0) return;
  if (problem.dim * sizeof(T) % 16 == 0 && is_aligned16(problem.grad))
    launch_backward<T, S, Id, true>(problem, partial, stream);
  else
    launch_backward<T, S, Id, false>(problem, partial, stream);
}

}  // namespace pass_ext::gpu
