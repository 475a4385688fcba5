// Attention of a step's nodes to the prefix and to the nodes that their bits name: the problem as raw pointers, which
// keys a row sees, and the formulas that every kernel shares. With s = scale q k, softcapped to cap tanh(s / cap):
//   out = sum over visible keys of e^(s - lse) v        lse = ln of the sum over visible keys of e^s
// A row that sees nothing: out 0, lse -inf. A sink, one logit a head, takes a share of a row's weight and has no value:
//   out = e^lse / (e^lse + e^sink) out, and lse as without it, so that results over disjoint keys merge
//
// Keys of a request are numbered along its text: [0, prefix) are the prefix, [prefix, prefix + nodes) this step's
// nodes. The rows of a tile are the nodes of a request times the query heads that share a key head; row r is node r /
// group, head r % group of them.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/platform.h"
#include "core/scalar.h"
#include "core/tree.h"

namespace pass_ext {

// The widths of keys and of values: multiples of kWidthStep.
constexpr int32_t kWidthStep = 16, kMostKeyDim = 576, kMostValueDim = 512;
// Those of keys and values alike that have a CUDA kernel with matrix fragments, ascending;
// pass_ext.ops.attention.HEAD_DIMS.
constexpr int32_t kHeadDims[] = {64, 80, 96, 128, 256};
constexpr int32_t kLargestHeadDim = kHeadDims[sizeof kHeadDims / sizeof *kHeadDims - 1];

// The layout of the rows of K or V, strides in elements. A cache: [outer, slot, head, width]; outer is the request, or
// the page if there is a block table. New rows: [node, head, width], outer unused.
struct KeyRows {
  const void* data;
  int64_t outer, slot, head;
};

enum class FloatType : int32_t { bfloat16, float16, float32 };

struct AttentionProblem {
  const void* q;  // [rows, heads, head_dim]
  KeyRows k_cache, v_cache;
  KeyRows k_new, v_new;        // data null: the nodes are in the cache, behind the prefix
  const int32_t* prefix_lens;  // [requests]
  const int32_t* cu_nodes;     // [requests + 1]
  const int64_t* visible;      // [rows, 64 nodes to a word]
  const int32_t* depths;       // [rows], each below its request's nodes; null without a window and chunks
  const int32_t* block_table;  // [requests, pages per request]; null for a dense cache
  int64_t visible_stride, table_stride;
  int64_t requests, rows;
  int64_t slots;      // cache slots per request; in a paged cache pages per request times page_size
  int32_t page_size;  // cache slots of a page; paged caches only
  int32_t pages;      // pages in the cache; paged caches only
  int32_t heads, kv_heads, group, head_dim, max_nodes;
  float scale, softcap;  // softcap 0: none
  int32_t window;        // a row sees the last so many positions, its own included; -1: all
  FloatType type;        // q, K, V and out
  void* out;             // [rows, heads, value_dim]
  float* lse;            // [rows, heads]
  const float* sinks;    // [heads]; null: none
  int32_t chunk;         // a row sees no position before its own chunk of so many; -1: no chunks
  int32_t value_dim;     // of V and out; head_dim is that of q and K
};

// The merge of two results for the same rows over disjoint keys:
//   lse = ln(e^lse_a + e^lse_b)        out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b
struct MergeProblem {
  const void *out_a, *out_b;
  const float *lse_a, *lse_b;
  void* out;
  float* lse;
  int64_t rows;  // rows times heads
  int32_t head_dim;
  FloatType type;
  const float* sinks;  // [heads], of the merged result; null: none
  int32_t heads;
};

// One request's rows. Out-of-range bounds and lengths are clamped.
struct AttentionRequest {
  int64_t index;
  int32_t first, nodes;  // rows of q
  int32_t prefix;
  int32_t begin;  // the first key that window and chunk leave to any row

  PASS_EXT_HOST_DEVICE int32_t keys() const { return prefix + nodes; }
};

PASS_EXT_HOST_DEVICE int64_t between(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// Chunks are a template argument of all that decides who sees what, so that kernels for problems without any stay as
// they are: false where problem.chunk is known to be -1.

template <bool has_chunks = false>
PASS_EXT_HOST_DEVICE bool has_reach(const AttentionProblem& problem) {
  return problem.window >= 0 || (has_chunks && problem.chunk >= 0);
}

// The window of a row at `position`; -1: none. A chunk is one that reaches back to its start.
template <bool has_chunks>
PASS_EXT_HOST_DEVICE int32_t window_at(const AttentionProblem& problem, int32_t position) {
  if constexpr (!has_chunks) return problem.window;
  const int32_t in_chunk = problem.chunk >= 0 ? position % problem.chunk + 1 : -1;
  return in_chunk < 0 || (problem.window >= 0 && problem.window < in_chunk) ? problem.window : in_chunk;
}

template <bool has_chunks = false>
PASS_EXT_HOST_DEVICE AttentionRequest request_of(const AttentionProblem& problem, int64_t index) {
  AttentionRequest request{};
  request.index = index;
  const TreeRows rows = tree_rows(problem.cu_nodes, index, problem.rows);
  request.first = static_cast<int32_t>(rows.first);
  // A cache cannot hold more nodes than it has slots.
  const int64_t most =
      problem.k_new.data || problem.max_nodes < problem.slots ? int64_t{problem.max_nodes} : problem.slots;
  request.nodes = static_cast<int32_t>(rows.count < most ? rows.count : most);
  const int64_t room = problem.k_new.data ? problem.slots : problem.slots - request.nodes;
  request.prefix = static_cast<int32_t>(between(problem.prefix_lens[index], 0, room < 0 ? 0 : room));
  // The window of the root, at depth 0, begins first.
  const int32_t window = window_at<has_chunks>(problem, request.prefix);
  if (window >= 0)
    request.begin = static_cast<int32_t>(between(request.prefix - int64_t{window} + 1, 0, request.prefix));
  return request;
}

// The page that holds `key`, or the request if there is no block table. The address of the key depends on this load.
PASS_EXT_HOST_DEVICE int64_t outer_of(const AttentionProblem& problem, const AttentionRequest& request, int32_t key) {
  if (!problem.block_table || (problem.k_new.data && key >= request.prefix)) return request.index;
  return problem.block_table[request.index * problem.table_stride + key / problem.page_size];
}

// The row of `key` for one key head, or null if the block table names no page. `cache` and `fresh` are those of K, or
// those of V.
template <typename T>
PASS_EXT_HOST_DEVICE const T* row_in(const AttentionProblem& problem, const AttentionRequest& request,
                                     const KeyRows& cache, const KeyRows& fresh, int64_t outer, int32_t key,
                                     int32_t head) {
  if (fresh.data && key >= request.prefix)
    return static_cast<const T*>(fresh.data) + (request.first + (key - request.prefix)) * fresh.slot +
           head * fresh.head;
  if (problem.block_table && (outer < 0 || outer >= problem.pages)) return nullptr;
  const int32_t slot = problem.block_table ? key % problem.page_size : key;
  return static_cast<const T*>(cache.data) + outer * cache.outer + slot * cache.slot + head * cache.head;
}

template <typename T>
PASS_EXT_HOST_DEVICE const T* key_row(const AttentionProblem& problem, const AttentionRequest& request,
                                      const KeyRows& cache, const KeyRows& fresh, int32_t key, int32_t head) {
  return row_in<T>(problem, request, cache, fresh, outer_of(problem, request, key), key, head);
}

// True if every node of the request sees all keys in [first, first + count).
template <bool has_chunks = false>
PASS_EXT_HOST_DEVICE bool all_see(const AttentionProblem& problem, const AttentionRequest& request, int32_t first,
                                  int32_t count) {
  if (first + count > request.prefix) return false;
  // The window of the deepest possible node, at depth nodes - 1, begins last.
  const int32_t window = window_at<has_chunks>(problem, request.prefix + request.nodes - 1);
  return window < 0 || first > int64_t{request.prefix} + request.nodes - 1 - window;
}

PASS_EXT_HOST_DEVICE uint64_t ones_below(int64_t count) {
  return count <= 0 ? 0 : count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

PASS_EXT_HOST_DEVICE int32_t depth_of(const AttentionProblem& problem, const AttentionRequest& request, int32_t node) {
  return static_cast<int32_t>(between(problem.depths[request.first + node], 0, request.nodes - 1));
}

// The keys among [first, first + 64) that node `node` of the request sees: bit i for key first + i. word(i) is word i
// of the node's row in `visible`.
template <bool has_chunks = false, typename Word>
PASS_EXT_HOST_DEVICE uint64_t visible_keys(const AttentionProblem& problem, const AttentionRequest& request,
                                           int32_t node, int32_t first, const Word& word) {
  const int32_t start = first - request.prefix;  // the node of the first key; negative in the prefix
  uint64_t seen = ones_below(-int64_t{start});   // the prefix
  uint64_t nodes = 0;
  if (start > -64 && start < request.nodes) {
    if (start <= 0) {
      nodes = word(0) << -start;
    } else {
      const int32_t i = start / 64, shift = start % 64;
      nodes = word(i) >> shift;
      if (shift > 0 && 64 * (i + 1) < request.nodes) nodes |= word(i + 1) << (64 - shift);
    }
    nodes &= ones_below(int64_t{request.nodes} - start);
  }
  if (has_reach<has_chunks>(problem)) {
    const int32_t depth = depth_of(problem, request, node);
    const int32_t window = window_at<has_chunks>(problem, request.prefix + depth);
    const int64_t lowest = int64_t{request.prefix} + depth - window + 1;  // position of the first key in reach
    seen &= ~ones_below(lowest - first);
    if (depth >= window) {  // rare: no loop of 64 turns, which compilers write out wherever this is inlined
      int32_t other = start;
      for (uint64_t left = nodes, bit = 1; left != 0; left >>= 1, bit <<= 1, ++other)
        if (left & 1 && depth - depth_of(problem, request, other) >= window) nodes &= ~bit;
    }
  }
  return seen | nodes;
}

PASS_EXT_HOST_DEVICE uint64_t visible_word(const AttentionProblem& problem, const AttentionRequest& request,
                                           int32_t node, int32_t i) {
  return static_cast<uint64_t>(problem.visible[(request.first + node) * problem.visible_stride + i]);
}

template <bool has_chunks = false>
PASS_EXT_HOST_DEVICE uint64_t visible_keys(const AttentionProblem& problem, const AttentionRequest& request,
                                           int32_t node, int32_t first) {
  return visible_keys<has_chunks>(problem, request, node, first,
                                  [&](int32_t i) { return visible_word(problem, request, node, i); });
}

constexpr float kLargest = 3.40282347e38f;  // its negative is the maximum of a row before its first key

// ln(2^maximum sum): kernels keep a row's total as maximum and sum.
PASS_EXT_HOST_DEVICE float log_of_total(float maximum, float sum) {
  if (!(sum > 0.0f)) return sum == 0.0f ? float_of(0xff800000u) : sum;
  return fused(maximum, 0.693147181f, logarithm(sum));
}

// What a sink leaves of a total: sum / (sum + 2^sink). The sink's logit is relative to what the sum is in powers of.
PASS_EXT_HOST_DEVICE float share_beside_sink(float sum, float sink) {
  if (!(sum > 0.0f)) return sum;
  const bool is_large = sink > 0.0f;
  const float power = power_of_two(is_large ? -sink : sink);  // of one term, relative to the other
  const float scaled = is_large ? sum * power : sum;
  return scaled / (scaled + (is_large ? 1.0f : power));
}

// The sink of row `row` of [rows, heads], relative to a total in powers of 2^maximum. `sinks`: [heads].
PASS_EXT_HOST_DEVICE float sink_of_row(const float* sinks, int32_t heads, int64_t row, float maximum) {
  return fused(sinks[row % heads], kLog2E, -maximum);
}

// The factors of two results in their merge. A side of weight 0 does not count and may hold anything.
struct MergeWeights {
  float a, b, lse;
};

PASS_EXT_HOST_DEVICE MergeWeights weights_of(float lse_a, float lse_b) {
  const float none = float_of(0xff800000u);
  if (lse_a == none || lse_b == none)
    return {lse_a == none ? 0.0f : 1.0f, lse_b == none ? 0.0f : 1.0f, lse_a == none ? lse_b : lse_a};
  const float highest = lse_a > lse_b ? lse_a : lse_b;
  const float a = power_of_two((lse_a - highest) * kLog2E), b = power_of_two((lse_b - highest) * kLog2E);
  const float sum = a + b;
  return {a / sum, b / sum, highest + logarithm(sum)};
}

// The same for row `row` of a merge, beside its sink.
PASS_EXT_HOST_DEVICE MergeWeights weights_of(const MergeProblem& problem, int64_t row) {
  MergeWeights weights = weights_of(problem.lse_a[row], problem.lse_b[row]);
  if (problem.sinks && weights.lse != float_of(0xff800000u)) {
    const float share = share_beside_sink(1.0f, (problem.sinks[row % problem.heads] - weights.lse) * kLog2E);
    weights.a *= share;
    weights.b *= share;
  }
  return weights;
}

}  // namespace pass_ext
