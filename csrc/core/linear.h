// A linear layer for few rows, by raw pointers:
//   product[r][o] = bias[o] + sum over i of x[r][i] weight[o][i], the sum in fp32, rounded once
//   out = product,  or residual + scale product (core/step-inl.h)
//
// A packed weight has 4 or 8 bits for each number, and numbers for each block of 32 inputs of an output:
//   weight[o][i] = scale code[o][i] + offset,  or with table[code[o][i]] for the code
// In the K forms eight blocks share a scale and an offset, and a block, or each half of it, has whole numbers for them:
//   weight[o][i] = (scale factor) code[o][i] + (offset factor'),  both exact in fp32
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
template <typename Scale, int bits>
struct PackedBlock {
  static constexpr int kBits = bits, kSteps = 1, kParts = 1;  // steps of 32 inputs, and the parts of each
  Scale scale[kPackedOutputs], offset[kPackedOutputs];
  uint32_t codes[kSteps][bits][kPackedOutputs];
};

// The same in 4 bits, where a table of the block has what each code stands for.
template <typename Scale>
struct PackedTableBlock {
  static constexpr int kBits = 4, kSteps = 1, kParts = 1;
  Scale scale[kPackedOutputs], offset[kPackedOutputs];
  uint8_t table[16];
  uint32_t codes[kSteps][4][kPackedOutputs];
};

// 256 inputs of 16 outputs, with factors for each 32 of them, or for each 16.
template <int bits, int parts>
struct PackedKBlock {
  static constexpr int kBits = bits, kSteps = 8, kParts = parts;
  float16 scale[kPackedOutputs], offset[kPackedOutputs];
  struct {
    int8_t scale[parts][kPackedOutputs], offset[parts][kPackedOutputs];
  } factors[kSteps];
  uint32_t codes[kSteps][bits][kPackedOutputs];
};

using PackedFour = PackedBlock<float16, 4>;
using PackedFourWide = PackedBlock<float, 4>;
using PackedTable = PackedTableBlock<float16>;
using PackedTableWide = PackedTableBlock<float>;
using PackedEight = PackedBlock<float16, 8>;
using PackedEightWide = PackedBlock<float, 8>;
using PackedFourK = PackedKBlock<4, 1>;
using PackedFourKHalves = PackedKBlock<4, 2>;
using PackedEightK = PackedKBlock<8, 1>;
using PackedEightKHalves = PackedKBlock<8, 2>;

template <typename Block>
constexpr int64_t kPackedBytes = sizeof(Block) / Block::kSteps;  // of 32 inputs

enum class PackedForm {
  none,
  four,
  four_wide,
  table,
  table_wide,
  eight,
  eight_wide,
  four_k,
  four_k_halves,
  eight_k,
  eight_k_halves
};

// The form with so many bytes for 32 inputs of 16 outputs; none: there is none.
inline PackedForm packed_form_of(int64_t bytes) {
  switch (bytes) {
    case kPackedBytes<PackedFour>: return PackedForm::four;
    case kPackedBytes<PackedFourWide>: return PackedForm::four_wide;
    case kPackedBytes<PackedTable>: return PackedForm::table;
    case kPackedBytes<PackedTableWide>: return PackedForm::table_wide;
    case kPackedBytes<PackedEight>: return PackedForm::eight;
    case kPackedBytes<PackedEightWide>: return PackedForm::eight_wide;
    case kPackedBytes<PackedFourK>: return PackedForm::four_k;
    case kPackedBytes<PackedFourKHalves>: return PackedForm::four_k_halves;
    case kPackedBytes<PackedEightK>: return PackedForm::eight_k;
    case kPackedBytes<PackedEightKHalves>: return PackedForm::eight_k_halves;
    default: return PackedForm::none;
  }
}
inline bool is_k_form(PackedForm form) { return form >= PackedForm::four_k; }

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
