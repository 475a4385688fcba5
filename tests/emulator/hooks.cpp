// The functions that -fsanitize=thread makes a kernel call at every load and store: each becomes a checked access. And
// the one that -fsanitize-coverage=trace-pc makes it call at every basic block, for critical paths.
// We link these instead of the sanitizer's own runtime.
#include <cstddef>
#include <cstring>

#include "engine.h"

using emulator::Access;
using emulator::check_access;

#define ACCESS(bytes)                                                                                       \
  void __tsan_read##bytes(void* address) { check_access(address, bytes, Access::read, true); }              \
  void __tsan_write##bytes(void* address) { check_access(address, bytes, Access::write, true); }            \
  void __tsan_unaligned_read##bytes(void* address) { check_access(address, bytes, Access::read, false); }   \
  void __tsan_unaligned_write##bytes(void* address) { check_access(address, bytes, Access::write, false); } \
  void __tsan_volatile_read##bytes(void* address) { check_access(address, bytes, Access::read, true); }     \
  void __tsan_volatile_write##bytes(void* address) { check_access(address, bytes, Access::write, true); }

static void check_both_halves(void* address, Access access) {
  check_access(address, 8, access, true);
  check_access(static_cast<char*>(address) + 8, 8, access, true);
}

extern "C" {
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
// A copy of 16 bytes that the compiler knows to begin at a multiple of 8. Kernels ask for 16 by load16, which checks.
void __tsan_read16(void* address) { check_both_halves(address, Access::read); }
void __tsan_write16(void* address) { check_both_halves(address, Access::write); }
void __tsan_unaligned_read16(void* address) { check_access(address, 16, Access::read, false); }
void __tsan_unaligned_write16(void* address) { check_access(address, 16, Access::write, false); }
void __tsan_read_range(void* address, size_t bytes) { check_access(address, bytes, Access::read, false); }
void __tsan_write_range(void* address, size_t bytes) { check_access(address, bytes, Access::write, false); }
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
// A tensor's owners, counted by an op's host code. Kernels have atomics of primitives.cuh.
int __tsan_atomic32_fetch_add(volatile int* address, int value, int) {
  check_access(const_cast<int*>(address), sizeof value, Access::atomic, true);
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
void __sanitizer_cov_trace_pc() {
  if (emulator::enters_code) emulator::enter_code(__builtin_return_address(0));
}
}

// ---- the calls of checked_memory.h ----

namespace emulator {

void* checked_move(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return to;
  check_access(from, bytes, Access::read, false);
  check_access(to, bytes, Access::write, false);
  return memmove(to, from, bytes);
}

void* checked_set(void* to, int value, size_t bytes) {
  if (bytes > 0) check_access(to, bytes, Access::write, false);
  return memset(to, value, bytes);
}

}  // namespace emulator
