// memcpy, memmove and memset in kernels, checked. The sanitizer reports loads and stores but not these calls, so
// __init__.py puts this header before every kernel file: sizes that the compiler turns into one load and store stay its
// own, all others go through hooks.cpp.
#pragma once

#include <cstddef>
#include <cstring>

namespace emulator {
void* checked_move(void* to, const void* from, size_t bytes);
void* checked_set(void* to, int value, size_t bytes);
}  // namespace emulator

__attribute__((always_inline)) inline void* emulator_memcpy(void* to, const void* from, size_t bytes) {
  const bool is_one_access = __builtin_constant_p(bytes) && bytes <= 16 && (bytes & (bytes - 1)) == 0;
  return is_one_access ? __builtin_memcpy(to, from, bytes) : emulator::checked_move(to, from, bytes);
}
inline void* emulator_memmove(void* to, const void* from, size_t bytes) {
  return emulator::checked_move(to, from, bytes);
}
inline void* emulator_memset(void* to, int value, size_t bytes) { return emulator::checked_set(to, value, bytes); }

namespace std {  // for kernels that say std::memcpy
using ::emulator_memcpy;
using ::emulator_memmove;
using ::emulator_memset;
}  // namespace std

#define memcpy emulator_memcpy
#define memmove emulator_memmove
#define memset emulator_memset
