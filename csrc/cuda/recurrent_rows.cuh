// What the kernels of layers with a state share: the requests of a step, the rows that nobody owns, and numbers whose
// type is known at run time.
//
// Malformed input raises nothing, because an error message would need a synchronisation. A parent that is no earlier
// node makes a root. Rows that cannot be computed are 0: nodes beyond the 1,024th of a request, all nodes of a request
// whose state does not exist, and all rows if the bounds do not divide the rows, because two requests might share one.
#pragma once

#include "core/recurrent.h"
#include "core/tree.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// The trees of a step.
struct Forest {
  const int32_t* parents;      // [rows]
  const int32_t* cu_nodes;     // [requests + 1]
  const int32_t* state_index;  // [requests]; null: the request's own number
  int64_t rows, requests, slots;
};

template <typename Problem>
PASS_EXT_HOST_DEVICE Forest forest_of(const Problem& problem, int64_t slots) {
  return {problem.parents, problem.cu_nodes, problem.state_index, problem.rows, problem.requests, slots};
}

// Blocks of a launch: at least one request's, which clears the rows of a step without requests.
inline int64_t requests_of_launch(const Forest& forest) { return forest.requests > 0 ? forest.requests : 1; }

inline int32_t most_nodes(const Forest& forest) {
  return static_cast<int32_t>(forest.rows < kMaxTreeNodes ? forest.rows : kMaxTreeNodes);
}

// A request as its blocks see it: they compute rows first to first + nodes from the state in `slot`, and clear rows
// [first + nodes, end) and the rows outside all requests on its side of them.
struct RequestTree {
  int64_t first, end, slot;
  int32_t nodes;
  bool divided;  // the bounds divide the rows

  // All threads of the block call it.
  PASS_EXT_DEVICE RequestTree(const Forest& forest, int64_t request) : first(0), end(0), slot(-1), nodes(0) {
    bool rises = forest.requests > 0;
#pragma unroll 1
    for (int64_t b = thread_rank(); b < forest.requests; b += block_size().x)
      rises &= forest.cu_nodes[b] >= 0 && forest.cu_nodes[b] <= forest.cu_nodes[b + 1] &&
               forest.cu_nodes[b + 1] <= forest.rows;
    divided = sync_block_count(!rises) == 0;
    if (!divided) return;
    first = forest.cu_nodes[request];
    end = forest.cu_nodes[request + 1];
    slot = slot_of(forest.state_index, request, forest.slots);
    if (slot >= 0) nodes = static_cast<int32_t>(end - first < kMaxTreeNodes ? end - first : kMaxTreeNodes);
  }

  // clear(row) for the rows that this request's blocks clear.
  template <typename Function>
  PASS_EXT_DEVICE void for_each_cleared_row(const Forest& forest, int64_t request, Function clear) const {
    if (request == 0)
#pragma unroll 1
      for (int64_t row = 0; row < (divided ? first : forest.rows); ++row) clear(row);
    if (!divided) return;
    const int64_t stop = request + 1 == forest.requests ? forest.rows : end;
#pragma unroll 1
    for (int64_t row = first + nodes; row < stop; ++row) clear(row);
  }
};

// ---- a number whose type is known at run time: loaded as bits, which do not wait for the load, then converted ----

PASS_EXT_DEVICE uint32_t load_bits(const void* from, int64_t i, RowType type) {
  const bool is_wide = type == RowType::float32;
  const char* const at = static_cast<const char*>(from) + (i << (is_wide ? 2 : 1));
  return is_wide ? *reinterpret_cast<const uint32_t*>(at) : *reinterpret_cast<const uint16_t*>(at);
}

PASS_EXT_DEVICE float float_of_bits(uint32_t bits, RowType type) {
  if (type == RowType::float32) return float_of(bits);
  if (type == RowType::bfloat16) return to_float(bfloat16{static_cast<uint16_t>(bits)});
  return to_float(float16{static_cast<uint16_t>(bits)});
}

PASS_EXT_DEVICE void store_float(void* to, int64_t i, float value, RowType type) {
  if (type == RowType::float32)
    static_cast<float*>(to)[i] = value;
  else if (type == RowType::bfloat16)
    static_cast<bfloat16*>(to)[i] = to_bfloat16(value);
  else
    static_cast<float16*>(to)[i] = to_float16(value);
}

}  // namespace pass_ext::gpu
