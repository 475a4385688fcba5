// Gated adapters: a product of low rank that rows of look-ahead slots, and no others, add to the output of a linear
// layer.
//   hidden = down[k] x[n],   out[n] = out[n] + scale (hidden up[k])    for ids[n] < 0
// k = -1 - ids[n], the row's slot, or 0 if all slots share one adapter. Sums are fp32; out is rounded once.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/platform.h"

namespace pass_ext {

constexpr int kMaxAdapterRank = 128;

// The adapters of one linear layer; rank 0: it has none.
template <typename T>
struct AdapterWeights {
  const T* down = nullptr;  // [adapters, rank, in]
  const T* up = nullptr;    // [adapters, rank, outputs]
  int64_t rank = 0;
};

// The ids of a step's rows, and what all its adapters share; ids null: no row has an adapter.
struct AdapterIds {
  const void* ids = nullptr;  // [rows]
  bool is_int64 = false;      // else int32
  int64_t adapters = 0;
  float scale = 1.0f;

  PASS_EXT_HOST_DEVICE int64_t operator[](int64_t row) const {
    return is_int64 ? static_cast<const int64_t*>(ids)[row] : static_cast<const int32_t*>(ids)[row];
  }
};

template <typename T, typename Id>
struct AdapterRows {
  static constexpr const char* op = "adapter_rows_";
  const Id* ids;  // [rows]
  const T* x;     // [rows, in], `x_row` elements apart
  const T* down;  // [adapters, rank, in]
  const T* up;    // [adapters, rank, outputs]
  T* out;         // [rows, outputs], `out_row` elements apart
  int64_t rows, in, outputs, adapters, rank, x_row, out_row;
  float scale;
};

// The adapter of a row, or -1 if it has none: a token, or a slot out of range.
PASS_EXT_HOST_DEVICE int64_t adapter_of_id(int64_t id, int64_t adapters) {
  if (id >= 0) return -1;
  if (adapters == 1) return 0;
  return -1 - id < adapters ? -1 - id : -1;
}

}  // namespace pass_ext
