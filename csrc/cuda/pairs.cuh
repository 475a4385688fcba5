// Arithmetic of the machine on both halves of a register and on its bytes. Like cuda/primitives.cuh, this header has a
// second implementation, tests/emulator/cuda/pairs.cuh; here, so that kernels that do without stay as they are.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// Half by half a b + c, rounded once.
template <typename T>
PASS_EXT_DEVICE uint32_t fused2(uint32_t a, uint32_t b, uint32_t c);

template <>
PASS_EXT_DEVICE uint32_t fused2<bfloat16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}
template <>
PASS_EXT_DEVICE uint32_t fused2<float16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}

// Four bytes of eight, those of `a` and behind them those of `b`. Each four bits of the selector, the lowest for the
// lowest byte, are the number of one; plus 8: its sign, eight times.
PASS_EXT_DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
}

}  // namespace pass_ext::gpu
