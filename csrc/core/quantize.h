// A row of keys or values in 8 bits: 16 bytes, of which the first four are a float32, and behind them a code for each
// number:
//   number = scale * value of its code
// So a row is moved with its scale, starts at a multiple of 16 bytes wherever it did without one, and the values of
// multi-head latent attention, the first numbers of its keys, have the scale of these.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/half.h"
#include "core/platform.h"
#include "core/step.h"

namespace pass_ext {

// none: numbers in the dtype of the queries.
enum class CodeType : int32_t { none, int8, float8_e4m3, float8_e5m2 };

constexpr int32_t kCodeHeader = 16;  // bytes; pass_ext.ops.quantize.CODE_HEADER

// Rows of numbers of type T, and the same as codes.
template <typename T>
struct QuantizeRows {
  RowGroups<T> from;  // [rows, dim]
  uint8_t* to;        // [rows, kCodeHeader + dim]
  int64_t rows, dim;
  CodeType codes;
};

PASS_EXT_HOST_DEVICE float scale_of_codes(const uint8_t* row) {
  float scale;
  memcpy(&scale, row, sizeof scale);
  return scale;
}

// The number of a code before its scale. Those in fp8 are fp16 with fewer bits: e5m2 the upper half of one, e4m3 one
// whose exponent is 8 less.
PASS_EXT_HOST_DEVICE float value_of_code(CodeType type, uint8_t code) {
  if (type == CodeType::int8) return static_cast<float>(static_cast<int8_t>(code));
  if (type == CodeType::float8_e5m2) return to_float(float16{static_cast<uint16_t>(code << 8)});
  const uint32_t size = code & 0x7fu, sign = (code & 0x80u) << 8;
  return size == 0x7fu ? float_of(0x7fc00000u) : 256.0f * to_float(float16{static_cast<uint16_t>(sign | size << 7)});
}

// The largest code; pass_ext.ops.quantize.MOST_OF_CODES.
PASS_EXT_HOST_DEVICE float most_of_codes(CodeType type) {
  return type == CodeType::int8 ? 127.0f : type == CodeType::float8_e4m3 ? 448.0f : 57344.0f;
}

// The scale of a row whose largest size has these bits, in whose order a NaN is above all numbers.
PASS_EXT_HOST_DEVICE float scale_for(uint32_t highest, float most) {
  constexpr uint32_t kInfinityBits = 0x7f800000u;
  return highest > kInfinityBits ? float_of(0x7fc00000u) : float_of(highest) / most;
}

// The code in fp8 nearest to a number of at most the largest code, ties to even. kFraction bits of fraction: 3 in e4m3,
// 2 in e5m2.
template <int kFraction>
PASS_EXT_HOST_DEVICE uint8_t float8_of(float number) {
  constexpr uint32_t kBias = kFraction == 3 ? 7 : 15, kDropped = 23 - kFraction;
  constexpr uint32_t kLeastNormal = (128 - kBias) << 23;  // as the bits of a float32
  // Adding a power of two puts the unit of the subnormal codes at the last bit of the sum, so the addition rounds.
  constexpr uint32_t kRounder = (128 - kBias + kDropped) << 23;
  const uint32_t bits = bits_of(number), magnitude = bits & 0x7fffffffu;
  const uint32_t small = bits_of(float_of(magnitude) + float_of(kRounder)) - kRounder;
  const uint32_t normal =
      (magnitude - ((127 - kBias) << 23) + ((1u << (kDropped - 1)) - 1) + (magnitude >> kDropped & 1u)) >> kDropped;
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | (magnitude < kLeastNormal ? small : normal));
}

// The code of a number over its row's scale: rounded to nearest, ties to even. NaN, which is 0 / 0, has code 0.
PASS_EXT_HOST_DEVICE uint8_t code_of(CodeType type, float number, float most) {
  const float known = number == number ? number : 0.0f;
  const float low = known < -most ? -most : known, clamped = low > most ? most : low;
  if (type == CodeType::float8_e4m3) return float8_of<3>(clamped);
  if (type == CodeType::float8_e5m2) return float8_of<2>(clamped);
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: its sum with a small number is whole
  return static_cast<uint8_t>(static_cast<int8_t>(static_cast<int32_t>((clamped + kRounder) - kRounder)));
}

}  // namespace pass_ext
