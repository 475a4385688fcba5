// The functions that -fsanitize=thread makes a kernel call at every load and store: each becomes a checked access.
// We link these instead of the sanitizer's own runtime. Called by compiled kernels.
#include <cstddef>

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

extern "C" {
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* address, size_t bytes) { check_access(address, bytes, Access::read, false); }
void __tsan_write_range(void* address, size_t bytes) { check_access(address, bytes, Access::write, false); }
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
