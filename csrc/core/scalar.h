// The arithmetic of the formulas in core/, for one float: each name is one IEEE operation, so a formula gives the same
// bits on every processor (no flag lets a compiler fuse or reorder: setup.py). cpu/simd-inl.h has the same names for
// vectors.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/platform.h"

namespace pass_ext {

PASS_EXT_HOST_DEVICE float constant(float /*like*/, float value) { return value; }
PASS_EXT_HOST_DEVICE uint32_t constant(uint32_t /*like*/, uint32_t value) { return value; }

// a b + c with one rounding
PASS_EXT_HOST_DEVICE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
PASS_EXT_HOST_DEVICE float maximum(float a, float b) { return a > b ? a : b; }
PASS_EXT_HOST_DEVICE float minimum(float a, float b) { return a < b ? a : b; }
PASS_EXT_HOST_DEVICE bool less(float a, float b) { return a < b; }
PASS_EXT_HOST_DEVICE float select(bool condition, float yes, float no) { return condition ? yes : no; }

PASS_EXT_HOST_DEVICE float float_of_signed(uint32_t two_complement) {
  return static_cast<float>(static_cast<int32_t>(two_complement));
}
PASS_EXT_HOST_DEVICE float float_of_unsigned(uint32_t value) { return static_cast<float>(value); }
PASS_EXT_HOST_DEVICE uint32_t shift_left(uint32_t value, int bits) { return value << bits; }
PASS_EXT_HOST_DEVICE uint32_t shift_right_signed(uint32_t value, int bits) {
  return static_cast<uint32_t>(static_cast<int32_t>(value) >> bits);
}
PASS_EXT_HOST_DEVICE void multiply_wide(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) {
  const uint64_t product = static_cast<uint64_t>(a) * b;
  high = static_cast<uint32_t>(product >> 32);
  low = static_cast<uint32_t>(product);
}

constexpr float kLog2E = 1.44269504f;  // e^x is 2^(x kLog2E), the power that a processor has

#include "core/elementary-inl.h"

}  // namespace pass_ext
