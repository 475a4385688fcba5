// A linear layer for few rows, by raw pointers:
//   product[r][o] = bias[o] + sum over i of x[r][i] weight[o][i], the sum in fp32, rounded once
//   out = product,  or residual + scale product (core/step-inl.h)
//
// A packed weight has 4 or 8 bits for each number, and numbers for each block of 32 inputs of an output, or for each
// half of it:
//   weight[o][i] = scale code[o][i] + offset,  or with table[code[o][i]] for the code
// Each block of a row becomes whole numbers of 16 bits, unit = the largest |x| of the block / 32512:
//   x[i] = unit digit[i],  within unit / 2
//   sum <- sum + (scale unit) (sum over i of code digit) + offset (unit (sum over i of digit)),  block behind block
// Sums over i are exact integers, and the rest has one order: the same bits on every processor.
#pragma once

#include <cstdint>

#include "core/half.h"

namespace pass_ext {

constexpr int64_t kPackedOutputs = 16, kPackedInputs = 32;  // of a block
constexpr float kLargestDigit = 32512.0f;   // 16 bits hold the sum of a digit and a code, of 255 at most
constexpr float kLeastLargest = 0x1p-100f;  // a block of x without larger numbers counts as zeros

// 32 inputs of 16 outputs, which lie side by side. A word has the codes of one output: of inputs 8t .. 8t + 7 in 4
// bits, of inputs 4t .. 4t + 3 in 8 bits. Its lower half has the even ones, its upper half the odd ones.
template <typename Scale, int bits, int parts>
struct PackedBlock {
  static constexpr int kBits = bits, kParts = parts;
  struct {
    Scale scale[kPackedOutputs], offset[kPackedOutputs];
  } part[parts];
  uint32_t codes[bits][kPackedOutputs];
};

// The same in 4 bits, where a table of the block has what each code stands for.
template <typename Scale>
struct PackedTableBlock {
  static constexpr int kBits = 4, kParts = 1;
  struct {
    Scale scale[kPackedOutputs], offset[kPackedOutputs];
  } part[1];
  uint8_t table[16];
  uint32_t codes[4][kPackedOutputs];
};

using PackedFour = PackedBlock<float16, 4, 1>;
using PackedFourWide = PackedBlock<float, 4, 1>;
using PackedFourHalves = PackedBlock<float, 4, 2>;
using PackedTable = PackedTableBlock<float16>;
using PackedTableWide = PackedTableBlock<float>;
using PackedEight = PackedBlock<float16, 8, 1>;
using PackedEightWide = PackedBlock<float, 8, 1>;
using PackedEightHalves = PackedBlock<float, 8, 2>;

enum class PackedForm { none, four, four_wide, four_halves, table, table_wide, eight, eight_wide, eight_halves };

// The form whose blocks have so many bytes; none: there is none.
inline PackedForm packed_form_of(int64_t bytes) {
  switch (bytes) {
    case sizeof(PackedFour): return PackedForm::four;
    case sizeof(PackedFourWide): return PackedForm::four_wide;
    case sizeof(PackedFourHalves): return PackedForm::four_halves;
    case sizeof(PackedTable): return PackedForm::table;
    case sizeof(PackedTableWide): return PackedForm::table_wide;
    case sizeof(PackedEight): return PackedForm::eight;
    case sizeof(PackedEightWide): return PackedForm::eight_wide;
    case sizeof(PackedEightHalves): return PackedForm::eight_halves;
    default: return PackedForm::none;
  }
}

template <typename T>
struct LinearRows {
  const T* x;
  const T* weight;  // or null
  const T* bias;    // or null
  T* out;           // [rows, outputs]
  int64_t rows, in, outputs;
  int64_t x_row, weight_row;     // strides
  const T* residual = nullptr;   // [rows, outputs], or null
  float scale = 1.0f;            // of the product before it is added
  const void* packed = nullptr;  // the weight as blocks [outputs / 16, in / 32], in place of `weight`
  PackedForm form = PackedForm::none;
};

}  // namespace pass_ext
