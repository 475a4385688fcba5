// A linear layer on the CPU for few rows:  out[r][o] = bias[o] + sum over i of x[r][i] weight[o][i]. linear.cpp shares
// outputs among threads, linear_kernels-inl.h computes them.
#pragma once

#include <cstdint>

namespace pass_ext {

constexpr int kTileOutputs = 4;    // outputs whose weights are read side by side
constexpr int64_t kPiece = 768;    // weights of each multiplied before the next piece: fits beside rows of x
constexpr int kGroupOutputs = 64;  // least outputs for which a block of rows is arranged

template <typename T>
struct LinearRows {
  const T* x;
  const T* weight;
  const T* bias;  // or null
  T* out;         // [rows, outputs]
  int64_t rows, in, outputs;
  int64_t x_row, weight_row;  // strides
};

constexpr int64_t kMostStep = 32;  // two vectors of the widest level

// Work space of one thread, 64-byte aligned, for at most `rows` rows at a time. `width` is `in`, rounded up to whole
// steps.
struct LinearScratch {
  float* x;        // [rows, width]
  float* weights;  // [kTileOutputs, kPiece]
  float* between;  // [rows, kTileOutputs, kMostStep / 2]
  float* sums;     // [rows, kGroupOutputs]
  int64_t rows;
};

}  // namespace pass_ext
