// Eight neighbouring numbers of a row, as a thread reads and writes them: in units of 16 bytes if addresses and sizes
// allow it (`wide`), else one by one.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kNumbers = 8;  // of a thread

inline bool is_aligned16(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

// True if a number of elements takes whole units of eight numbers; then it also keeps the alignment.
inline bool is_whole(int64_t elements) { return elements % kNumbers == 0; }

// Numbers behind `count` are 0. Wide: count is a multiple of eight.
template <bool wide, typename T>
PASS_EXT_DEVICE void load_numbers(float (&value)[kNumbers], const T* from, int64_t count) {
  if constexpr (!wide) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) value[i] = i < count ? to_float(from[i]) : 0.0f;
  } else if constexpr (sizeof(T) == sizeof(float)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Bytes16 bytes = load16(from + 4 * half);
#pragma unroll
      for (int i = 0; i < 4; ++i) value[4 * half + i] = float_of(bytes.word[i]);
    }
  } else {
    const Bytes16 bytes = load16(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      value[2 * i] = unpack_low<T>(bytes.word[i]);
      value[2 * i + 1] = unpack_high<T>(bytes.word[i]);
    }
  }
}

template <bool wide, typename T>
PASS_EXT_DEVICE void store_numbers(T* to, const float (&value)[kNumbers], int64_t count) {
  if constexpr (!wide) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i)
      if (i < count) to[i] = from_float<T>(value[i]);
  } else if constexpr (sizeof(T) == sizeof(float)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Bytes16 bytes;
#pragma unroll
      for (int i = 0; i < 4; ++i) bytes.word[i] = bits_of(value[4 * half + i]);
      store16(to + 4 * half, bytes);
    }
  } else {
    Bytes16 bytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) bytes.word[i] = pack2<T>(value[2 * i], value[2 * i + 1]);
    store16(to, bytes);
  }
}

}  // namespace pass_ext::gpu
