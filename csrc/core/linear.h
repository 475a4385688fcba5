// A linear layer for few rows, by raw pointers:
//   product[r][o] = bias[o] + sum over i of x[r][i] weight[o][i], the sum in fp32, rounded once
//   out = product,  or residual + scale product (core/step-inl.h)
#pragma once

#include <cstdint>

namespace pass_ext {

template <typename T>
struct LinearRows {
  const T* x;
  const T* weight;
  const T* bias;  // or null
  T* out;         // [rows, outputs]
  int64_t rows, in, outputs;
  int64_t x_row, weight_row;    // strides
  const T* residual = nullptr;  // [rows, outputs], or null
  float scale = 1.0f;           // of the product before it is added
};

}  // namespace pass_ext
