// A layer that keeps a state, over the trees of a step: the problem as raw pointers. Per request and head, with a state
// S [dk, dv] and a node's decay D, read along the path from the root (or the request's state) to the node:
//   S = D S + k u^T    out = S^T (scale q)    additive: u = beta v    delta: u = beta (v - (D S)^T k)
// The formulas of one number, and the order of sums: core/recurrent-inl.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/half.h"
#include "core/platform.h"
#include "core/scalar.h"

namespace pass_ext {

// pass_ext.ops.recurrent.FORMS in this order.
enum class RecurrentForm : int32_t { delta, additive };
constexpr int64_t kRecurrentForms = 2;

// What a decay D belongs to: e^g of a head [rows, heads], of a key channel [rows, heads, dk], or of each element,
// e^(g rate) with g of a value column [rows, heads, dv] and rates [heads, dk, dv].
enum class Decay : int32_t { head, channel, element };

constexpr int64_t kMostKeyChannels = 256;  // dk
constexpr int kSumParts = 4;               // row i of S adds to part i % 4 of a sum over rows

// The type of q, k, v and out where a kernel learns it at run time.
enum class RowType : int32_t { bfloat16, float16, float32 };

template <typename T>
constexpr RowType row_type_of() {
  if (sizeof(T) == sizeof(float)) return RowType::float32;
  return std::is_same<T, bfloat16>::value ? RowType::bfloat16 : RowType::float16;
}

// Heads of the rows of a step, each head contiguous. Distances in elements.
template <typename T>
struct HeadRows {
  const T* data;
  int64_t row_distance, head_distance;

  PASS_EXT_HOST_DEVICE const T* at(int64_t row, int64_t head) const {
    return data + row * row_distance + head * head_distance;
  }
};

// The decays of all rows, contiguous.
struct RecurrentDecay {
  const float* log;    // [rows, heads], [rows, heads, dk] or [rows, heads, dv], as `kind` says
  const float* rates;  // [heads, dk, dv] for Decay::element
  Decay kind;

  PASS_EXT_HOST_DEVICE const float* of_row(int64_t row, int64_t head, int64_t heads, int64_t dk, int64_t dv) const {
    const int64_t width = kind == Decay::head ? 1 : kind == Decay::channel ? dk : dv;
    return log + (row * heads + head) * width;
  }
};

// States [slots, heads, dk, dv]. Distances in elements.
struct StateLayout {
  int64_t slots, slot, head, row, column;

  PASS_EXT_HOST_DEVICE int64_t offset(int64_t slot_index, int64_t head_index) const {
    return slot_index * slot + head_index * head;
  }
};

// T: the type of q, k, v and out.
template <typename T>
struct RecurrentTree {
  HeadRows<T> q, k;  // [rows, key_heads, dk]
  HeadRows<T> v;     // [rows, heads, dv]
  RecurrentDecay decay;
  const float* beta;  // [rows, heads]; null: 1
  const float* states;
  StateLayout layout;
  const int32_t* state_index;  // [requests], the slot of each; null: the request's own number
  const int32_t* parents;      // [rows]
  const int32_t* cu_nodes;     // [requests + 1]
  T* out;                      // [rows, heads, dv]
  float* u;                    // [rows, heads, dv]
  int64_t rows, requests, heads, key_heads, dk, dv;
  float scale;
  RecurrentForm form;

  PASS_EXT_HOST_DEVICE int64_t key_head(int64_t head) const { return head / (heads / key_heads); }
};

// The slot of a request's state, or -1 if there is none.
PASS_EXT_HOST_DEVICE int64_t slot_of(const int32_t* state_index, int64_t request, int64_t slots) {
  const int64_t slot = state_index ? state_index[request] : request;
  return slot >= 0 && slot < slots ? slot : -1;
}

#include "core/recurrent-inl.h"

}  // namespace pass_ext
