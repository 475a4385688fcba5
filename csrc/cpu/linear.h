// A linear layer on the CPU for few rows:  out[r][o] = bias[o] + sum over i of x[r][i] weight[o][i]. linear.cpp cuts
// the outputs into groups, linear_kernels-inl.h computes them.
#pragma once

#include <cstdint>

namespace pass_ext {

constexpr int kMostTileOutputs = 4;    // outputs whose weights are read side by side
constexpr int64_t kPiece = 768;        // weights of each multiplied before the next piece: fits beside rows of x
constexpr int64_t kGroupOutputs = 48;  // most outputs that a thread takes at once: whole tiles of 2, 3 or 4
constexpr int64_t kMostStep = 32;      // two vectors of the widest level

template <typename T>
struct LinearRows {
  const T* x;
  const T* weight;
  const T* bias;  // or null
  T* out;         // [rows, outputs]
  int64_t rows, in, outputs;
  int64_t x_row, weight_row;  // strides
};

// Bytes of `rows` rows in the order of multiplication, at most.
constexpr int64_t arranged_bytes(int64_t rows, int64_t in) {
  return rows * ((in + kMostStep - 1) / kMostStep * kMostStep) * int64_t{sizeof(float)};
}

// Work space of one thread, 64-byte aligned, for `rows` rows.
struct LinearScratch {
  float* between;  // [rows, kMostTileOutputs, kMostStep / 2]
  float* sums;     // [rows, kGroupOutputs]
  float* copy;     // [kMostTileOutputs, kPiece], of weights

  static constexpr int64_t kBetween = kMostTileOutputs * kMostStep / 2;
  static constexpr int64_t floats(int64_t rows) {
    return rows * (kBetween + kGroupOutputs) + kMostTileOutputs * kPiece;
  }
  LinearScratch(float* memory, int64_t rows)
      : between(memory), sums(memory + rows * kBetween), copy(memory + rows * (kBetween + kGroupOutputs)) {}
};

}  // namespace pass_ext
