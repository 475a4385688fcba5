// Trees and masks on the GPU, each in one launch. The problems: core/tree.h.
//
// Malformed input raises nothing, because an error message would need a synchronisation. A parent that is no earlier
// node makes a root. Nodes beyond max_nodes get no bits and depth 0; so does every row if the bounds do not divide the
// rows, because two requests might share one. The Python op has a switch that checks first (pass_ext/ops/tree.py).
#pragma once

#include "core/tree.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// ---- trees: one block per request, one thread per node, and more blocks for the rows without a request ----
//
// Parents come first, so a walk along parents meets the words of a row from the last to the first. In each word a node
// needs only the point where its path enters: the rest of the word is the same for all paths that enter there. So, with
// two barriers:
//   1. each node walks within its own word of 64 nodes: the bits it meets, and the ancestor at which it leaves;
//   2. each node hops from word to word: the bits of the node at which it enters.
// These are at most 64 steps and ceil(nodes / 64) hops, whatever the tree; in a small tree as many steps as the node is
// deep. Doubling pointers takes log2(depth) rounds, but each moves whole rows and needs two barriers of the block.

constexpr int kMostPrepareThreads = 1024;
constexpr int64_t kMostClearBlocks = 128;

struct WordPath {
  uint64_t* bits;    // the node itself and its ancestors in the same word
  int32_t* parents;  // -1 for a root
  int32_t* exits;    // the first ancestor in an earlier word, or -1
};

PASS_EXT_DEVICE WordPath carve_path(void* shared, int32_t max_nodes) {
  uint64_t* bits = static_cast<uint64_t*>(shared);
  int32_t* parents = reinterpret_cast<int32_t*>(bits + max_nodes);
  return {bits, parents, parents + max_nodes};
}

inline size_t path_bytes(int32_t max_nodes) { return max_nodes * (sizeof(uint64_t) + 2 * sizeof(int32_t)); }

// True if this thread's share of the bounds divides the rows.
PASS_EXT_DEVICE bool bounds_rise(const TreePrepare& problem) {
  bool rise = true;
  for (int64_t b = thread_rank(); b < problem.requests; b += block_size().x)
    rise &= problem.cu_nodes[b] >= 0 && problem.cu_nodes[b] <= problem.cu_nodes[b + 1] &&
            problem.cu_nodes[b + 1] <= problem.rows;
  return rise;
}

PASS_EXT_DEVICE void clear_row(const TreePrepare& problem, int64_t row) {
  for (int32_t word = 0; word < problem.words; ++word) problem.visible[row * problem.words + word] = 0;
  problem.depths[row] = 0;
}

// Clears the rows before the first request and behind the last; all rows if the bounds do not divide the rows.
PASS_EXT_DEVICE void clear_unowned(const TreePrepare& problem, int64_t block, int64_t blocks) {
  const bool divided = sync_block_count(!bounds_rise(problem)) == 0 && problem.requests > 0;
  const int64_t begin = divided ? problem.cu_nodes[0] : problem.rows;
  const int64_t end = divided ? problem.cu_nodes[problem.requests] : problem.rows;
  for (int64_t row = block * block_size().x + thread_rank(); row < problem.rows; row += blocks * block_size().x)
    if (row < begin || row >= end) clear_row(problem, row);
}

PASS_EXT_DEVICE void walk_within_word(const WordPath& path, int32_t node) {
  const int32_t word = node / 64;
  uint64_t bits = 0;
  int32_t at = node;
  while (at >= 0 && at / 64 == word) {
    bits |= uint64_t{1} << at % 64;
    at = path.parents[at];
  }
  path.bits[node] = bits;
  path.exits[node] = at;
}

PASS_EXT_DEVICE void hop_over_words(const TreePrepare& problem, const WordPath& path, int32_t node, int64_t row) {
  int32_t at = node, ancestors = -1;  // itself not counted
  for (int32_t word = problem.words - 1; word >= 0; --word) {
    uint64_t bits = 0;
    if (at >= 0 && at / 64 == word) {
      bits = path.bits[at];
      at = path.exits[at];
    }
    problem.visible[row * problem.words + word] = static_cast<int64_t>(bits);
    ancestors += count_set_bits(static_cast<uint32_t>(bits)) + count_set_bits(static_cast<uint32_t>(bits >> 32));
  }
  problem.depths[row] = ancestors;
}

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kMostPrepareThreads) prepare_kernel(TreePrepare problem) {
  begin_kernel();
  const int64_t request = block_index().x;
  if (request >= problem.requests) {
    clear_unowned(problem, request - problem.requests, grid_size().x - problem.requests);
    return;
  }
  const WordPath path = carve_path(dynamic_shared<unsigned char>(), problem.max_nodes);
  const TreeRows rows = tree_rows(problem.cu_nodes, request, problem.rows);
  const int32_t nodes = static_cast<int32_t>(rows.count < problem.max_nodes ? rows.count : problem.max_nodes);
  for (int32_t node = thread_rank(); node < nodes; node += block_size().x)
    path.parents[node] = parent_or_root(problem.parents[rows.first + node], node);
  if (sync_block_count(!bounds_rise(problem)) != 0) return;
  for (int32_t node = thread_rank(); node < nodes; node += block_size().x) walk_within_word(path, node);
  sync_block();
  for (int32_t node = thread_rank(); node < nodes; node += block_size().x)
    hop_over_words(problem, path, node, rows.first + node);
  for (int64_t node = nodes + thread_rank(); node < rows.count; node += block_size().x)
    clear_row(problem, rows.first + node);
}

inline void launch_tree_prepare(const TreePrepare& problem, Stream stream) {
  if (problem.rows == 0) return;
  const int64_t threads = problem.max_nodes < kMostPrepareThreads ? (problem.max_nodes + 31) / 32 * 32 : 1024;
  const int64_t needed = (problem.rows + threads - 1) / threads;
  const int64_t clear_blocks = needed < kMostClearBlocks ? needed : kMostClearBlocks;
  launch(
      "tree_prepare", prepare_kernel,
      LaunchShape{{problem.requests + clear_blocks}, {static_cast<unsigned>(threads)}, path_bytes(problem.max_nodes)},
      stream, problem);
}

// ---- masks: a warp writes up to four times 32 chunks of 16 bytes of one row ----
//
// Rows need not be aligned, so chunks are counted from the last 16-byte boundary at or before the row; those that the
// row does not fill are written element by element.

constexpr int kMaskWarps = 8;
constexpr int kMaskChunksPerLane = 4;
constexpr int64_t kMostMaskBlocksPerRow = 1024;

template <typename T>
constexpr int64_t kMaskChunk = 16 / sizeof(T);

template <typename T>
constexpr int64_t kMaskSegment = 32 * kMaskChunksPerLane * kMaskChunk<T>;

PASS_EXT_DEVICE bool sees_column(const MaskRow& row, int64_t column) {
  const int64_t node = column - row.prefix;
  return node < 0 || (node < row.nodes && row.words[node / 64] >> node % 64 & 1);
}

template <typename T>
PASS_EXT_DEVICE void write_mask_chunk(const TreeMask<T>& problem, const MaskRow& row, T* out, int64_t column) {
  constexpr int kElements = kMaskChunk<T>;
  const T hidden = lowest_finite<T>();
  if (column < 0 || column + kElements > problem.kv_len) {
    for (int i = 0; i < kElements; ++i)
      if (column + i >= 0 && column + i < problem.kv_len) out[column + i] = sees_column(row, column + i) ? T{} : hidden;
    return;
  }
  struct alignas(16) Chunk {
    T value[kElements];
  } chunk;
#pragma unroll
  for (int i = 0; i < kElements; ++i) chunk.value[i] = sees_column(row, column + i) ? T{} : hidden;
  Bytes16 bytes;
  memcpy(&bytes, &chunk, sizeof bytes);
  store16(out + column, bytes);
}

template <typename T>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(32 * kMaskWarps) mask_kernel(TreeMask<T> problem) {
  begin_kernel();
  const int64_t index = static_cast<int64_t>(block_index().x) * kMaskWarps + warp_index();
  if (index >= problem.requests * problem.max_nodes) return;
  const MaskRow row = mask_row(problem, index);
  T* out = problem.out + index * problem.kv_len;
  const int64_t before = reinterpret_cast<uintptr_t>(out) % 16 / sizeof(T);
  for (int64_t segment = block_index().y * kMaskSegment<T>; segment < before + problem.kv_len;
       segment += grid_size().y * kMaskSegment<T>)
#pragma unroll
    for (int i = 0; i < kMaskChunksPerLane; ++i)
      write_mask_chunk(problem, row, out, segment - before + (32 * i + lane_index()) * kMaskChunk<T>);
}

template <typename T>
void launch_tree_mask(const TreeMask<T>& problem, Stream stream) {
  const int64_t rows = problem.requests * problem.max_nodes;
  if (rows == 0 || problem.kv_len == 0) return;
  const int64_t segments = (problem.kv_len + kMaskChunk<T> - 1 + kMaskSegment<T> - 1) / kMaskSegment<T>;
  launch("tree_mask", mask_kernel<T>,
         LaunchShape{{(rows + kMaskWarps - 1) / kMaskWarps,
                      segments < kMostMaskBlocksPerRow ? segments : kMostMaskBlocksPerRow},
                     {32 * kMaskWarps}},
         stream, problem);
}

}  // namespace pass_ext::gpu
