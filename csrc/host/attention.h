// Checks the attention ops' arguments, the same on every device, packs them into core/attention.h's AttentionProblem
// and makes the outputs. Each op is a template over the function that fills them.
#pragma once

#include <cmath>
#include <string>
#include <tuple>

#include "core/attention.h"
#include "core/attention_lists.h"
#include "host/packed.h"
#include "host/quantize.h"

namespace pass_ext {

using AttentionResult = std::tuple<Tensor, Tensor>;  // out, lse

constexpr int64_t kMostHeads = 1 << 20;  // heads times the nodes of a request are rows, counted in int32

inline FloatType float_type_of(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::BFloat16 ? FloatType::bfloat16
         : tensor.scalar_type() == ScalarType::Half   ? FloatType::float16
                                                      : FloatType::float32;
}

struct AttentionArguments {
  const Tensor &q, &k_cache, &v_cache, &prefix_lens, &cu_nodes, &visible;
  int64_t max_nodes;
  const OptionalTensor &k_new, &v_new, &block_table, &depths;
  std::optional<double> scale;
  double softcap;
  int64_t window;
  const OptionalTensor& sinks;
  int64_t chunk;
  CodeType codes;  // of K and V
};

// The dtype of K and V.
inline ScalarType key_dtype(const AttentionArguments& arguments) {
  return arguments.codes == CodeType::none ? arguments.q.scalar_type() : arguments.k_cache.scalar_type();
}

// The columns of a row in a cache in front of its numbers.
inline int64_t header_of(const AttentionArguments& arguments) {
  return arguments.codes == CodeType::none ? 0 : kCodeHeader;
}

// A cache's rows: [outer, slot, head, width].
inline KeyRows cache_rows_of(const char* op, const char* argument, const Tensor& cache) {
  return {data_of<void>(op, argument, cache), cache.stride(0), cache.stride(1), cache.stride(2)};
}

inline KeyRows checked_cache_rows_of(const char* op, const AttentionArguments& arguments, const char* argument,
                                     const Tensor& cache) {
  const Tensor& q = arguments.q;
  check_dtype(op, argument, cache, {key_dtype(arguments)});
  check_dim(op, argument, cache, 4, arguments.block_table ? "[pages, page, Hkv, D]" : "[B, S, Hkv, D]");
  check_same_device(op, argument, cache, "q", q);
  check_contiguous_rows(op, argument, cache);
  return cache_rows_of(op, argument, cache);
}

// The rows of the nodes themselves, [N, head, width], which go into `cache`.
inline KeyRows new_rows_of(const char* op, const AttentionArguments& arguments, const char* argument,
                           const Tensor& fresh, const Tensor& cache) {
  const Tensor& q = arguments.q;
  check_dtype(op, argument, fresh, {key_dtype(arguments)});
  check_dim(op, argument, fresh, 3, "[N, Hkv, D]");
  check_size(op, argument, fresh, 0, q.size(0), "the packed nodes of q");
  check_size(op, argument, fresh, 1, arguments.k_cache.size(2), "the heads of k_cache");
  check_size(op, argument, fresh, 2, cache.size(3), "the width of its cache");
  check_same_device(op, argument, fresh, "q", q);
  check_contiguous_rows(op, argument, fresh);
  return {data_of<void>(op, argument, fresh), 0, fresh.stride(0), fresh.stride(1)};
}

inline void check_width(const char* op, const char* argument, const Tensor& rows, int64_t width, int64_t most) {
  if (width >= kWidthStep && width <= most && width % kWidthStep == 0) return;
  refuse(op, argument, " must have a head size that is a multiple of ", kWidthStep, ", at most ", most, ", got ",
         describe(rows));
}

inline void check_queries(const char* op, const Tensor& q) {
  check_dtype(op, "q", q, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  check_dim(op, "q", q, 3, "[N, Hq, D]");
  check_width(op, "q", q, q.size(2), kMostKeyDim);
  check_below(op, "q", q, 0, kInt32Limit, "rows");
  check_below(op, "q", q, 1, kMostHeads + 1, "heads");
}

// The sinks, one for each of `heads`; null if there are none.
inline const float* checked_sinks(const char* op, const OptionalTensor& sinks, int64_t heads, const char* of,
                                  const char* other_name, const Tensor& other) {
  if (!sinks) return nullptr;
  check_dtype(op, "sinks", *sinks, {ScalarType::Float});
  check_dim(op, "sinks", *sinks, 1, "[Hq]");
  check_size(op, "sinks", *sinks, 0, heads, of);
  check_same_device(op, "sinks", *sinks, other_name, other);
  check_contiguous_rows(op, "sinks", *sinks);
  return data_of<float>(op, "sinks", *sinks);
}

// The list of each of `rows` rows; rows may be strided.
inline KeyLists checked_lists(const char* op, const OptionalTensor& lists, const Tensor& q) {
  if (!lists) return {};
  check_dtype(op, "key_lists", *lists, {ScalarType::Int});
  check_dim(op, "key_lists", *lists, 2, "[N, keys of a row]");
  check_size(op, "key_lists", *lists, 0, q.size(0), "the packed nodes of q");
  check_below(op, "key_lists", *lists, 1, kInt32Limit, "keys");
  if (lists->size(1) < 1) refuse(op, "key_lists must have room for at least 1 key, got ", describe(*lists));
  check_same_device(op, "key_lists", *lists, "q", q);
  check_contiguous_rows(op, "key_lists", *lists);
  return {data_of<int32_t>(op, "key_lists", *lists), lists->stride(0), static_cast<int32_t>(lists->size(1))};
}

inline void check_window(const char* op, int64_t window) {
  if (window < -1 || window == 0 || window > INT32_MAX)
    refuse(op, "window must be positive, or -1 for none, got ", window);
}

inline void check_chunk(const char* op, int64_t chunk) {
  if (chunk < -1 || chunk == 0 || chunk > INT32_MAX) refuse(op, "chunk must be positive, or -1 for none, got ", chunk);
}

// Makes the outputs and packs the problem. `q` is contiguous and checked already.
inline AttentionResult prepare_attention(const char* op, const AttentionArguments& arguments,
                                         AttentionProblem& problem) {
  const Tensor &q = arguments.q, &k_cache = arguments.k_cache, &v_cache = arguments.v_cache;
  check_max_nodes(op, arguments.max_nodes);
  problem.k_cache = checked_cache_rows_of(op, arguments, "k_cache", k_cache);
  const int64_t header = header_of(arguments);
  check_size(op, "k_cache", k_cache, 3, q.size(2) + header,
             header ? "16 bytes for the scale, and q's head size D" : "q's head size D");
  problem.v_cache = checked_cache_rows_of(op, arguments, "v_cache", v_cache);
  check_width(op, "v_cache", v_cache, v_cache.size(3) - header, kMostValueDim);
  for (int64_t i = 0; i < 3; ++i) check_size(op, "v_cache", v_cache, i, k_cache.size(i), "as k_cache");
  // Positions count the cache slots, then the nodes, then the rest of a tile of keys, all in int32.
  constexpr int64_t kMostSlots = INT32_MAX - 2 * kMaxTreeNodes;
  check_below(op, "k_cache", k_cache, 0, kInt32Limit, arguments.block_table ? "pages" : "requests");
  check_below(op, "k_cache", k_cache, 1, kMostSlots + 1, "slots");
  check_below(op, "k_cache", k_cache, 2, kMostHeads + 1, "heads");
  if (k_cache.size(2) < 1 || q.size(1) % k_cache.size(2) != 0)
    refuse(op, "q must have a multiple of the ", k_cache.size(2), " heads of k_cache, got ", describe(q));
  if (arguments.k_new.has_value() != arguments.v_new.has_value())
    refuse(op, "k_new and v_new must come together, got only ", arguments.k_new ? "k_new" : "v_new");
  if (arguments.k_new) {
    problem.k_new = new_rows_of(op, arguments, "k_new", *arguments.k_new, k_cache);
    problem.v_new = new_rows_of(op, arguments, "v_new", *arguments.v_new, v_cache);
  }
  const Bounds bounds = check_cu_nodes(op, arguments.cu_nodes, "q", q);
  problem.cu_nodes = bounds.cu_nodes;
  problem.requests = bounds.requests;
  problem.prefix_lens = check_integers(op, "prefix_lens", arguments.prefix_lens, "q", q);
  check_size(op, "prefix_lens", arguments.prefix_lens, 0, problem.requests, "the requests of cu_nodes");
  problem.visible = check_visible(op, arguments.visible, arguments.max_nodes, q.size(0), "q", q);
  if (arguments.block_table) {
    const Tensor& table = *arguments.block_table;
    problem.block_table = check_block_table(op, table, problem.requests, "q", q);
    problem.table_stride = table.stride(0);
    if (table.size(1) < 1) refuse(op, "block_table must have at least 1 page for each request, got ", describe(table));
    if (k_cache.size(1) < 1) refuse(op, "k_cache must have pages of at least 1 slot, got ", describe(k_cache));
    if (table.size(1) > kMostSlots / k_cache.size(1))
      refuse(op, "block_table must give a request at most ", kMostSlots, " slots, got ", describe(table),
             " with pages of ", k_cache.size(1));
    problem.slots = table.size(1) * k_cache.size(1);
  } else {
    check_size(op, "k_cache", k_cache, 0, problem.requests, "the requests of cu_nodes; no block_table was given");
    problem.slots = k_cache.size(1);
  }
  problem.page_size = static_cast<int32_t>(k_cache.size(1));
  problem.pages = static_cast<int32_t>(k_cache.size(0));
  check_window(op, arguments.window);
  problem.window = static_cast<int32_t>(arguments.window);
  check_chunk(op, arguments.chunk);
  problem.chunk = static_cast<int32_t>(arguments.chunk);
  const bool has_reach = problem.window >= 0 || problem.chunk >= 0;
  if (arguments.depths) {
    const int32_t* depths = check_integers(op, "depths", *arguments.depths, "q", q);
    check_size(op, "depths", *arguments.depths, 0, q.size(0), "the packed nodes of q");
    if (has_reach) problem.depths = depths;
  } else if (has_reach) {
    refuse(op, "depths must be given with a ", problem.window >= 0 ? "window" : "chunk",
           " (tree_prepare makes them), got None");
  }
  problem.softcap = static_cast<float>(arguments.softcap);
  if (!(arguments.softcap >= 0) || std::isinf(problem.softcap) || (problem.softcap == 0) != (arguments.softcap == 0))
    refuse(op, "softcap must be positive in float32, or 0 for none, got ", arguments.softcap);
  problem.scale = static_cast<float>(arguments.scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(2)))));
  if (!std::isfinite(problem.scale)) refuse(op, "scale must be finite, got ", problem.scale);
  problem.q = data_of<void>(op, "q", q);
  problem.rows = q.size(0);
  problem.heads = static_cast<int32_t>(q.size(1));
  problem.kv_heads = static_cast<int32_t>(k_cache.size(2));
  problem.group = problem.heads / problem.kv_heads;
  problem.head_dim = static_cast<int32_t>(q.size(2));
  problem.value_dim = static_cast<int32_t>(v_cache.size(3) - header);
  problem.max_nodes = static_cast<int32_t>(arguments.max_nodes);
  problem.visible_stride = arguments.visible.stride(0);
  problem.type = float_type_of(q);
  problem.sinks = checked_sinks(op, arguments.sinks, q.size(1), "q's heads", "q", q);
  const Tensor out = empty_of_shape(op, q, {q.size(0), q.size(1), v_cache.size(3) - header});
  const Tensor lse = empty_of_shape(op, q, {q.size(0), q.size(1)}, ScalarType::Float);
  problem.out = output_of<void>(out);
  problem.lse = output_of<float>(lse);
  return {out, lse};
}

// The op with its torch signature; `run` fills in the outputs on its device.

using RunAttention = void (*)(const AttentionProblem& problem, CodeType codes, const KeyLists& lists,
                              bool batch_invariant, const Tensor& q);

template <RunAttention run>
AttentionResult attention_tree(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& prefix_lens,
                               const Tensor& cu_nodes, const Tensor& visible, int64_t max_nodes,
                               const OptionalTensor& k_new, const OptionalTensor& v_new,
                               const OptionalTensor& block_table, const OptionalTensor& depths,
                               std::optional<double> scale, double softcap, int64_t window, const OptionalTensor& sinks,
                               int64_t chunk, const OptionalTensor& key_lists, bool batch_invariant) {
  constexpr const char* op = "attention_tree";
  AttentionProblem problem{};
  check_queries(op, q);  // before they are copied
  const Tensor flat_q = contiguous_of(op, "q", q);
  const CodeType codes = codes_of(k_cache.scalar_type());
  const KeyLists lists = checked_lists(op, key_lists, q);
  const AttentionResult result =
      prepare_attention(op,
                        {flat_q, k_cache, v_cache, prefix_lens, cu_nodes, visible, max_nodes, k_new, v_new, block_table,
                         depths, scale, softcap, window, sinks, chunk, codes},
                        problem);
  run(problem, codes, lists, batch_invariant, flat_q);
  return result;
}

using RunMerge = void (*)(const MergeProblem& problem, const Tensor& out);

template <RunMerge run>
AttentionResult attention_merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
                                const OptionalTensor& sinks) {
  constexpr const char* op = "attention_merge";
  check_dtype(op, "out_a", out_a, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  check_dtype(op, "out_b", out_b, {out_a.scalar_type()});
  if (out_a.dim() < 1) refuse(op, "out_a must have shape [..., D], got ", describe(out_a));
  const int64_t dim = out_a.dim() - 1;
  check_below(op, "out_a", out_a, dim, kInt32Limit, "numbers in a row");
  check_dim(op, "out_b", out_b, dim + 1, "as out_a");
  for (int64_t i = 0; i <= dim; ++i) check_size(op, "out_b", out_b, i, out_a.size(i), "as out_a");
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < dim; ++i) shape.push_back(out_a.size(i));
  for (const auto& [name, lse] : {std::pair{"lse_a", &lse_a}, std::pair{"lse_b", &lse_b}}) {
    check_dtype(op, name, *lse, {ScalarType::Float});
    check_dim(op, name, *lse, dim, "out_a's without the last dimension");
    for (int64_t i = 0; i < dim; ++i) check_size(op, name, *lse, i, shape[i], "as out_a");
    check_same_device(op, name, *lse, "out_a", out_a);
  }
  check_same_device(op, "out_b", out_b, "out_a", out_a);
  const int64_t heads = dim > 0 ? shape.back() : 1;
  const float* const checked = checked_sinks(op, sinks, heads, "the last dimension of lse_a", "out_a", out_a);
  if (checked) check_below(op, "lse_a", lse_a, dim - 1, kInt32Limit, "heads");
  const Tensor flat_out_a = contiguous_of(op, "out_a", out_a), flat_out_b = contiguous_of(op, "out_b", out_b);
  const Tensor flat_lse_a = contiguous_of(op, "lse_a", lse_a), flat_lse_b = contiguous_of(op, "lse_b", lse_b);
  const Tensor lse = empty_of_shape(op, out_a, shape, ScalarType::Float);
  shape.push_back(out_a.size(dim));
  const Tensor out = empty_of_shape(op, out_a, shape);
  run({data_of<void>(op, "out_a", flat_out_a), data_of<void>(op, "out_b", flat_out_b),
       data_of<float>(op, "lse_a", flat_lse_a), data_of<float>(op, "lse_b", flat_lse_b), output_of<void>(out),
       output_of<float>(lse), lse.numel(), static_cast<int32_t>(out_a.size(dim)), float_type_of(out_a), checked,
       static_cast<int32_t>(heads)},
      out);
  return {out, lse};
}

}  // namespace pass_ext
