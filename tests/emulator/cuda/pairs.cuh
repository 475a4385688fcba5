// The emulator's implementation of csrc/cuda/pairs.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/half.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

template <typename T>
uint32_t fused2(uint32_t a, uint32_t b, uint32_t c) {
  static_assert(std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>);
  return emulator::fused_pair(a, b, c, std::is_same_v<T, bfloat16>);
}
using emulator::pick_bytes;

}  // namespace pass_ext::gpu
