// A linear layer on the CPU for few rows:  out[r][o] = bias[o] + sum over i of x[r][i] weight[o][i].
// Between linear.cpp, which shares outputs among threads, and linear_kernels.h, which computes them.
#pragma once

#include <cstdint>

namespace pass_ext {

constexpr int kTileOutputs = 4;    // whose weights are read side by side
constexpr int64_t kPiece = 768;    // of their weights that are multiplied before the next: fits beside rows of x
constexpr int kGroupOutputs = 64;  // that one block of rows is arranged for, at least

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

// Work space of one thread, 64-byte aligned, for at most `rows` rows at a time. `width` is `in`, up to whole steps.
struct LinearScratch {
  float* x;        // [rows, width]
  float* weights;  // [kTileOutputs, kPiece]
  float* between;  // [rows, kTileOutputs, kMostStep / 2]
  float* sums;     // [rows, kGroupOutputs]
  int64_t rows;
};

}  // namespace pass_ext
