// Sixteen codes of 8 bits (core/quantize.h) as pairs of numbers of 16, exactly and without their scale: the bytes of
// two codes go into one register, and an instruction for both halves makes their numbers.
//   fp8:   the bits of a code at the place of the type's are its number but for the bias of the exponent, so
//          number = those bits * 2^bias, subnormal ones too
//   int8:  7 bits of a code behind the exponent of 2^7 in bf16 are 128 + those bits: number = that - 128, or - 256 if
//          its sign is set; in fp16 8 bits behind that of 2^10
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/half.h"
#include "core/quantize.h"
#include "cuda/pairs.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// 2^k: the largest power of two by which no scale of fp16 numbers becomes too large for a weight in fp16.
PASS_EXT_DEVICE float weight_unit(CodeType codes) {
  return codes == CodeType::int8 ? 0x1p6f : codes == CodeType::float8_e4m3 ? 0x1p8f : 0x1p15f;
}

// In both halves of a register.
template <uint32_t half>
constexpr uint32_t kTwice = half | half << 16;

// How codes in fp8 become numbers of type T. In e5m2 they are the upper halves of fp16 numbers, which takes no such.
template <typename T, CodeType type>
struct Float8 {
  static constexpr bool kIsUpperHalf = std::is_same_v<T, float16> && type == CodeType::float8_e5m2;
  static constexpr bool kIsBfloat = std::is_same_v<T, bfloat16>, kIsE4m3 = type == CodeType::float8_e4m3;
  // Of the bits of a code, whose sign fills all bits above: to the left, and which of them remain.
  static constexpr int kShift = !kIsBfloat ? 7 : kIsE4m3 ? 4 : 5;
  static constexpr uint32_t kBits = 0x8000u | 0x7fu << kShift;
  // 2^bias: the number whose exponent is the bias of T and the difference of both biases.
  static constexpr uint32_t kScale = !kIsBfloat ? (15 + 8) << 10 : kIsE4m3 ? (127 + 120) << 7 : (127 + 112) << 7;
  // A code that is no number, or infinite, is one of the largest: what carries them, and no others, into the sign's
  // place; the bits of the first of them as a number; and those that are set in all that are not finite.
  static constexpr uint32_t kCarry = kIsE4m3 ? 0x01010101u : 0x04040404u;
  static constexpr uint32_t kBeyond = !kIsBfloat ? 0x5f80u : kIsE4m3 ? 0x43f0u : 0x4780u;
  static constexpr uint32_t kExponent = kIsBfloat ? 0x7f80u : 0x7c00u;
};

// Two codes of four, the lower or the upper two.
template <typename T, CodeType type, bool upper>
PASS_EXT_DEVICE uint32_t pair_of_codes(uint32_t codes) {
  if constexpr (type == CodeType::int8) {
    constexpr uint32_t kBehind = upper ? 0x4342u : 0x4140u;  // each code behind a byte of the other register
    if constexpr (std::is_same_v<T, bfloat16>) {
      const uint32_t bytes = pick_bytes(codes, 0x43434343u, kBehind);
      return fused2<T>(bytes & kTwice<0xff80u>, kTwice<0xbf80u>, bytes & kTwice<0xff7fu>);
    } else {
      const uint32_t bytes = pick_bytes(codes ^ 0x80808080u, 0x64646464u, kBehind);
      return fused2<T>(bytes, kTwice<0x3c00u>, kTwice<0xe480u>);  // less 1024 + 128
    }
  } else {
    using Format = Float8<T, type>;
    if constexpr (Format::kIsUpperHalf) return pick_bytes(codes, 0u, upper ? 0x3424u : 0x1404u);
    const uint32_t bytes = pick_bytes(codes, 0u, upper ? 0xb3a2u : 0x9180u) << Format::kShift;
    return fused2<T>(bytes & kTwice<Format::kBits>, kTwice<Format::kScale>, kTwice<0x8000u>);
  }
}

// Eight threads that store numbers of sixteen codes each reach all banks if every second four of them begin with their
// second half: which half is the first, and the codes in that order.
PASS_EXT_DEVICE unsigned first_half_of(unsigned chunk) { return chunk / 4 % 2; }
PASS_EXT_DEVICE Bytes16 in_order(const Bytes16& codes, unsigned first_half) {
  return first_half == 0 ? codes : Bytes16{{codes.word[2], codes.word[3], codes.word[0], codes.word[1]}};
}

// The numbers of sixteen codes.
template <typename T, CodeType type>
PASS_EXT_DEVICE void numbers_of_codes(Bytes16 (&numbers)[2], const Bytes16& codes) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    numbers[i / 2].word[i % 2 * 2] = pair_of_codes<T, type, false>(codes.word[i]);
    numbers[i / 2].word[i % 2 * 2 + 1] = pair_of_codes<T, type, true>(codes.word[i]);
  }
  if constexpr (type != CodeType::int8) {
    using Format = Float8<T, type>;
    if constexpr (Format::kIsUpperHalf) return;
    uint32_t carries = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) carries |= (codes.word[i] + Format::kCarry) ^ codes.word[i];
    if ((carries & 0x80808080u) == 0) return;  // a carry out of a code comes from one that is not finite
#pragma unroll
    for (Bytes16& eight : numbers)
#pragma unroll
      for (uint32_t& pair : eight.word) {
        const uint32_t sizes = pair & 0x7fff7fffu;
        pair |= ((sizes + kTwice<0x8000u - Format::kBeyond>) >> 15 & 0x00010001u) * Format::kExponent;
      }
  }
}

}  // namespace pass_ext::gpu
