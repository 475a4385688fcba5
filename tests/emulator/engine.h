// The machine behind cuda/primitives.cuh on the host: one fiber per CUDA thread, real barriers and warp operations, the
// order shuffled by a seed. Blocks run one after another in a shuffled order. See README.md for what is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "critical_path.h"

namespace emulator {

struct Index3 {
  unsigned x = 1, y = 1, z = 1;
};

// What a buffer that a launch may touch holds before it.
enum class Content { read_only, uninitialised, initialised };

// ---- from tests ----
void begin_session(uint64_t seed);
void add_buffer(const std::string& name, void* address, size_t bytes, Content content);
void end_session();

// From an op's host code: an argument that is told twice is one buffer, written to if it may be; new memory is unnamed.
void tell_buffer(const std::string& name, void* address, size_t bytes, Content content);

// The GPU of the session's ops.
constexpr int64_t kCounters = 4096;
void set_gpu(int multiprocessors, int resident_blocks);
int multiprocessors();
int resident_blocks();  // of any kernel on a multiprocessor
int32_t* counters();    // kCounters of them, zero at first
bool counters_are_zero();

// An asynchronous copy of one launch: who read what, and how many groups of copies its thread had committed before.
struct CopyRecord {
  uint32_t block, group;
  uintptr_t from;
};
// From now on copies are recorded; what was recorded is returned, and forgotten, by taken_copies.
void record_copies();
std::vector<CopyRecord> taken_copies();
// From now on the critical path of each launch is recorded; what was recorded is returned, and forgotten, by
// taken_paths.
void record_paths(PathSettings settings);
std::vector<LaunchPath> taken_paths();
uint64_t count_launches();  // since the library was loaded
uint64_t count_accesses();  // of kernels to buffers and shared memory in this session, each whatever its size

// Bytes that kernels loaded from a buffer and stored there; a byte counts each time.
struct Traffic {
  uint64_t loaded = 0, stored = 0;
};
std::map<std::string, Traffic> count_bytes();  // of the last session that ended, by the buffer's name

// How far 2^x is off on this machine: not at all; or by 2 units in the last place, the most that the PTX ISA allows
// ex2.approx.f32 ("2 ulp from correctly rounded result across the full range of inputs"), all in one direction or up
// and down by a hash of x. 2^0 is 1, by the table there.
enum class Exp2Error { none, up, down, mixed };
void set_exp2_error(Exp2Error error);

// ---- from launch() ----
// Runs thread_body(call) once per thread; `call` (the kernel and its parameters) is memory that threads may read.
void run_grid(const char* name, Index3 grid, Index3 block, size_t dynamic_shared_bytes,
              void (*thread_body)(const void*), const void* call, size_t call_bytes);

// ---- from kernels: about the running thread ----
Index3 thread_index();
Index3 block_index();
Index3 block_size();
Index3 grid_size();
unsigned thread_rank();

void* shared_array(const void* site, const char* name, size_t bytes);
void* dynamic_shared();

int block_barrier(const char* name, bool vote);  // how many threads voted true
void warp_barrier(unsigned mask);
uint64_t shuffle(const char* name, uint64_t value, int source_lane, unsigned mask);
unsigned ballot(const char* name, bool vote, unsigned mask);
uint32_t largest(const char* name, uint32_t value, unsigned mask);  // of the lanes' values
void fence();

enum class Access { read, write, atomic };
// Checks an access that the compiler does not report itself, or one that must be aligned to its size.
void check_access(const void* address, size_t bytes, Access access, bool aligned);
float exp2_approximate(float x);
// Here, so that a path counts few instructions for them.
uint32_t larger_bfloat16s(uint32_t a, uint32_t b);
uint32_t fused_pair(uint32_t a, uint32_t b, uint32_t c, bool are_bfloat16);
uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector);
// Copies without a check; the caller has made its own.
void copy_bytes(void* to, const void* from, size_t bytes);
extern bool enters_code;                                  // paths are recorded
void enter_code(const void* address);                     // a basic block begins
void check_streaming(const void* address, size_t bytes);  // global, and not written in this launch
void check_global(const char* name, const void* address);

void copy_async(void* shared, const void* global, size_t bytes, bool valid);
void copy_async_commit();
void copy_async_wait(int pending);

void load_matrices(uint32_t* fragment, const void* row, int count, bool transposed);
void multiply(float* d, const uint32_t* a, const uint32_t* b, bool is_bfloat16);

}  // namespace emulator
