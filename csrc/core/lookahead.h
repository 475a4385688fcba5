// Look-ahead embedding injection: the problem as raw pointers, and the rule by which an id picks its row.
//   out[n] = table[ids[n]]            for 0 <= ids[n] < vocabulary
//   out[n] = lookahead[-1 - ids[n]]   for -slots <= ids[n] < 0
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/platform.h"

namespace pass_ext {

// T: the table's and the output's type. S: the look-ahead rows' type, T or float.
template <typename T, typename S, typename Id>
struct LookaheadEmbed {
  const Id* ids;       // [rows]
  const T* table;      // [vocabulary, dim], rows `table_stride` elements apart
  const S* lookahead;  // [slots, dim]
  T* out;              // [rows, dim]
  int64_t rows, dim, vocabulary, slots, table_stride;
};

// The gradient to one source, the table or the look-ahead rows:
//   out[r] = sum of grad[n] over the n whose id picks row r of that source, in the order of n
// T: the gradient's type. S: the result's type, T or float.
template <typename T, typename S, typename Id>
struct LookaheadEmbedBackward {
  const T* grad;  // [rows, dim]
  const Id* ids;  // [rows]
  S* out;         // [out_rows, dim]
  int64_t rows, dim, out_rows;
  bool slots;  // the source is the look-ahead rows
};

// The row of the source that `id` picks, or -1 when it picks none (an id of the other source, or out of range).
PASS_EXT_HOST_DEVICE int64_t row_of_id(int64_t id, bool slots, int64_t source_rows) {
  const int64_t row = slots ? -1 - id : id;
  return row >= 0 && row < source_rows ? row : -1;
}

// Sums run in fp32, for fp64 gradients in fp64.
template <typename T>
struct SumType {
  using type = float;
};
template <>
struct SumType<double> {
  using type = double;
};
template <typename T>
using sum_t = typename SumType<T>::type;

}  // namespace pass_ext
