// The two 16-bit floats as storage types, and their conversions to and from fp32: exact upwards, round to nearest even
// downwards, NaN stays NaN. The host runs the bit arithmetic below; the device has an instruction for each.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/platform.h"

namespace pass_ext {

struct bfloat16 {
  uint16_t bits;
};

struct float16 {
  uint16_t bits;
};

PASS_EXT_HOST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

PASS_EXT_HOST_DEVICE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

PASS_EXT_HOST_DEVICE float to_float(bfloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

PASS_EXT_HOST_DEVICE float to_float(float16 value) {
#if defined(__CUDA_ARCH__)
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const uint32_t fraction = value.bits & 0x3ffu;
  if (exponent == 0x1fu) return float_of(sign | 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0u));
  if (exponent != 0) return float_of(sign | (exponent + 112u) << 23 | fraction << 13);
  return float_of(sign | bits_of(static_cast<float>(fraction) * 0x1p-24f));  // zero and subnormals
#endif
}

PASS_EXT_HOST_DEVICE float to_float(float value) { return value; }

PASS_EXT_HOST_DEVICE bfloat16 to_bfloat16(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return {bits};
#else
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};  // NaN, as the device writes it
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
#endif
}

PASS_EXT_HOST_DEVICE float16 to_float16(float value) {
#if defined(__CUDA_ARCH__)
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return {bits};
#else
  const uint32_t bits = bits_of(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};                                  // NaN, as the device writes it
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds past 65504
  if (magnitude >= 0x38800000u) {                                                // normal: round off 13 bits
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return {static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13)};
  }
  // Subnormal: adding 0.5 puts the unit of the result, 2^-24, at the last bit of the sum, so the addition rounds.
  const uint32_t sum = bits_of(float_of(magnitude) + 0.5f);
  return {static_cast<uint16_t>(sign | (sum - 0x3f000000u))};
#endif
}

// from_float<T>(x): to_bfloat16 and the others under one name, for templates over the storage type.
template <typename T>
PASS_EXT_HOST_DEVICE T from_float(float value);
template <>
PASS_EXT_HOST_DEVICE float from_float<float>(float value) {
  return value;
}
template <>
PASS_EXT_HOST_DEVICE double from_float<double>(float value) {
  return value;
}
template <>
PASS_EXT_HOST_DEVICE bfloat16 from_float<bfloat16>(float value) {
  return to_bfloat16(value);
}
template <>
PASS_EXT_HOST_DEVICE float16 from_float<float16>(float value) {
  return to_float16(value);
}

}  // namespace pass_ext
