// The machine, as kernels see it: indices, shared memory, barriers, warp operations, atomics, wide and asynchronous
// copies, matrix fragments, launch. Kernels (*.cuh) use these names and nothing else of CUDA, because this header has a
// second implementation, tests/emulator/cuda/primitives.cuh, on which the same kernels run on a CPU with every access
// checked. Both must offer the same names with the same meaning; tests/emulator/test_primitives.py compares each.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "core/grid.h"
#include "core/half.h"

#define PASS_EXT_KERNEL __global__ void
#define PASS_EXT_DEVICE __device__ __forceinline__
#define PASS_EXT_DEVICE_CALL inline __device__ __noinline__         // called: large, and used in several places
#define PASS_EXT_LAUNCH_BOUNDS(...) __launch_bounds__(__VA_ARGS__)  // threads; blocks at once on a multiprocessor
#define PASS_EXT_PARAMETER const __grid_constant__  // a kernel's large parameter: read in place, not copied
#define PASS_EXT_SHARED(type, name, count) __shared__ type name[count]  // static shared memory, inside a kernel

namespace pass_ext::gpu {

constexpr unsigned kFullWarp = 0xffffffffu;

// ---- indices ----

struct Index3 {
  unsigned x = 1, y = 1, z = 1;
};

PASS_EXT_DEVICE Index3 thread_index() { return {threadIdx.x, threadIdx.y, threadIdx.z}; }
PASS_EXT_DEVICE Index3 block_index() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
PASS_EXT_DEVICE Index3 block_size() { return {blockDim.x, blockDim.y, blockDim.z}; }
PASS_EXT_DEVICE Index3 grid_size() { return {gridDim.x, gridDim.y, gridDim.z}; }

// Blocks have one dimension (LaunchShape): ranks along y and z would cost each use three instructions.
PASS_EXT_DEVICE unsigned thread_rank() { return threadIdx.x; }
PASS_EXT_DEVICE unsigned lane_index() { return thread_rank() % 32; }
PASS_EXT_DEVICE unsigned warp_index() { return thread_rank() / 32; }

// ---- shared memory and order ----

// The launch's dynamic shared memory, 512-byte aligned. Its contents are undefined at entry.
template <typename T>
PASS_EXT_DEVICE T* dynamic_shared() {
  extern __shared__ __align__(512) unsigned char pass_ext_dynamic_shared[];
  return reinterpret_cast<T*>(pass_ext_dynamic_shared);
}

// The place of an object in shared memory, as a number to compute with: for a few addresses near each other.
using SharedAddress = unsigned;
PASS_EXT_DEVICE SharedAddress shared_address(const void* shared) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(shared));
}

PASS_EXT_DEVICE void sync_block() { __syncthreads(); }
PASS_EXT_DEVICE int sync_block_count(bool vote) { return __syncthreads_count(vote); }
PASS_EXT_DEVICE void sync_warp(unsigned mask = kFullWarp) { __syncwarp(mask); }
// Other blocks see this thread's reads and writes before the fence earlier than those behind it: both halves of "last
// block merges". __threadfence would also order them among all fences of the device, which costs more and is not
// needed.
PASS_EXT_DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Reads a word of each line of a kernel's parameters. The constant cache is cold at every launch, and an instruction
// whose operand misses it holds its warp up: two misses in turn for every line that is met on the way.
template <typename Parameter>
PASS_EXT_DEVICE void touch(const Parameter& parameter) {
  constexpr int kWords = sizeof(Parameter) / sizeof(uint32_t), kLine = 16;
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(&parameter);
#pragma unroll
  for (int i = 0; i < kWords; i += kLine) asm volatile("" ::"r"(words[i]));
}

// Every kernel calls this in all its threads, with its large parameters, before it reads or writes what another kernel
// may have written or read. On sm_90 and later a launch begins while the one in front still runs: here it waits until
// that one has ended, and then lets the next begin. In this order no kernel begins before the last but one in front has
// ended.
template <typename... Parameters>
PASS_EXT_DEVICE void begin_kernel(const Parameters&... parameters) {
  (touch(parameters), ...);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Counts an arrival at a counter in global memory and returns how many came before; the `expected`-th sets the counter
// back to 0. Both halves of "last block merges" in one instruction: it releases what the thread knows to be written,
// and acquires what those before it released. A relaxed atomic between two fences costs a second MEMBAR.
PASS_EXT_DEVICE int32_t count_arrival(int32_t* counter, int32_t expected) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(expected - 1)
               : "memory");
  return static_cast<int32_t>(before);
}

// ---- within a warp; every lane of `mask` must call it. None of these orders memory: that needs sync_warp ----

template <typename T>
PASS_EXT_DEVICE T shuffle(T value, int source_lane, unsigned mask = kFullWarp) {
  return __shfl_sync(mask, value, source_lane);
}
template <typename T>
PASS_EXT_DEVICE T shuffle_xor(T value, int lane_mask, unsigned mask = kFullWarp) {
  return __shfl_xor_sync(mask, value, lane_mask);
}
template <typename T>
PASS_EXT_DEVICE T shuffle_up(T value, unsigned delta, unsigned mask = kFullWarp) {
  return __shfl_up_sync(mask, value, delta);
}
template <typename T>
PASS_EXT_DEVICE T shuffle_down(T value, unsigned delta, unsigned mask = kFullWarp) {
  return __shfl_down_sync(mask, value, delta);
}
PASS_EXT_DEVICE unsigned ballot(bool vote, unsigned mask = kFullWarp) { return __ballot_sync(mask, vote); }
PASS_EXT_DEVICE bool any(bool vote, unsigned mask = kFullWarp) { return __any_sync(mask, vote); }
PASS_EXT_DEVICE bool all(bool vote, unsigned mask = kFullWarp) { return __all_sync(mask, vote); }

// The largest and the smallest value of the lanes.
PASS_EXT_DEVICE uint32_t reduce_max(uint32_t value, unsigned mask = kFullWarp) {
  return __reduce_max_sync(mask, value);
}
PASS_EXT_DEVICE uint32_t reduce_min(uint32_t value, unsigned mask = kFullWarp) {
  return __reduce_min_sync(mask, value);
}

PASS_EXT_DEVICE int first_set_bit(unsigned bits) { return __ffs(bits) - 1; }                    // -1 for none
PASS_EXT_DEVICE int last_set_bit(unsigned bits) { return 31 - __clz(static_cast<int>(bits)); }  // -1 for none
PASS_EXT_DEVICE int leading_zeros(uint64_t bits) { return __clzll(static_cast<long long>(bits)); }
PASS_EXT_DEVICE int count_set_bits(unsigned bits) { return __popc(bits); }

// ---- atomics, relaxed, on global or shared memory; each returns the old value ----

template <typename T>
PASS_EXT_DEVICE T atomic_add(T* address, T value) {
  return atomicAdd(address, value);
}
template <typename T>
PASS_EXT_DEVICE T atomic_max(T* address, T value) {
  return atomicMax(address, value);
}
template <typename T>
PASS_EXT_DEVICE T atomic_min(T* address, T value) {
  return atomicMin(address, value);
}
template <typename T>
PASS_EXT_DEVICE T atomic_or(T* address, T value) {
  return atomicOr(address, value);
}
template <typename T>
PASS_EXT_DEVICE T atomic_exchange(T* address, T value) {
  return atomicExch(address, value);
}
template <typename T>
PASS_EXT_DEVICE T atomic_compare_and_swap(T* address, T expected, T desired) {
  return atomicCAS(address, expected, desired);
}

// ---- 16 bytes at once; addresses 16-byte aligned ----

struct alignas(16) Bytes16 {
  uint32_t word[4];
};

PASS_EXT_DEVICE Bytes16 load16(const void* address) {
  const uint4 v = *static_cast<const uint4*>(address);
  return {{v.x, v.y, v.z, v.w}};
}
PASS_EXT_DEVICE void store16(void* address, Bytes16 value) {
  *static_cast<uint4*>(address) = make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
}
// Stores to global memory, as one instruction for certain: nvcc 13.0 makes four of some unrolled store16.
PASS_EXT_DEVICE void store16_global(void* address, Bytes16 value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.word[0]), "r"(value.word[1]),
               "r"(value.word[2]), "r"(value.word[3])
               : "memory");
}
// Loads from global memory that this launch only reads, and once: not kept in L1.
PASS_EXT_DEVICE Bytes16 load16_streaming(const void* address) {
  Bytes16 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(address));
  return v;
}

// ---- asynchronous copies from global to shared memory ----
// Data is in shared memory only after copy_async_wait, and for other threads only after a barrier behind that.

// 16 bytes, both sides aligned; !valid writes zeros and reads nothing.
PASS_EXT_DEVICE void copy_async16(SharedAddress shared, const void* global, bool valid = true) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
PASS_EXT_DEVICE void copy_async16(void* shared, const void* global, bool valid = true) {
  copy_async16(shared_address(shared), global, valid);
}
// 4 bytes, both sides aligned; !valid writes zeros and reads nothing.
PASS_EXT_DEVICE void copy_async4(void* shared, const void* global, bool valid = true) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
}
PASS_EXT_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's committed groups are still under way.
template <int pending>
PASS_EXT_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

#ifdef PASS_EXT_STAMPS
// The clock of this multiprocessor, and the GPU's nanoseconds, which tick seldom: builds that stamp phases (rows.cuh).
struct Stamp {
  uint64_t cycles, nanoseconds;
};
PASS_EXT_DEVICE Stamp read_clocks() {
  Stamp stamp;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(stamp.cycles)::"memory");
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(stamp.nanoseconds)::"memory");
  return stamp;
}
#endif

// ---- arithmetic with an instruction of its own ----

// The larger number; a number beats NaN.
PASS_EXT_DEVICE float larger(float a, float b) { return fmaxf(a, b); }
// 2^x, within 2 ulp; results below 2^-126 are 0. NaN stays NaN.
PASS_EXT_DEVICE float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- pairs of 16-bit floats in one register; `low` sits at the lower address ----

template <typename T>
PASS_EXT_DEVICE uint32_t pack2(float low, float high);

template <>
PASS_EXT_DEVICE uint32_t pack2<bfloat16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
PASS_EXT_DEVICE uint32_t pack2<float16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <typename T>
PASS_EXT_DEVICE float unpack_low(uint32_t pair) {
  return to_float(T{static_cast<uint16_t>(pair)});
}
template <typename T>
PASS_EXT_DEVICE float unpack_high(uint32_t pair) {
  return to_float(T{static_cast<uint16_t>(pair >> 16)});
}

// Half by half the larger number of two pairs; NaN beats a number.
PASS_EXT_DEVICE uint32_t larger_bfloat16s(uint32_t a, uint32_t b) {
  uint32_t pair;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

// ---- matrix fragments; every lane of the warp must call it ----

// Loads `count` (1, 2 or 4) 8x8 matrices of 16-bit values from shared memory. Lane 8m + r gives the 16-byte aligned
// address of row r of matrix m; lane l receives, in fragment[m], elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) +
// 1), of the matrix or, `transposed`, of its transpose.
template <int count, bool transposed = false>
PASS_EXT_DEVICE void load_matrices(uint32_t (&fragment)[count], SharedAddress row) {
  static_assert(count == 1 || count == 2 || count == 4, "ldmatrix loads 1, 2 or 4 matrices");
  if constexpr (count == 4 && !transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(row)
                 : "memory");
  else if constexpr (count == 4)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(row)
                 : "memory");
  else if constexpr (count == 2 && !transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragment[0]), "=r"(fragment[1])
                 : "r"(row)
                 : "memory");
  else if constexpr (count == 2)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragment[0]), "=r"(fragment[1])
                 : "r"(row)
                 : "memory");
  else if constexpr (!transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(fragment[0]) : "r"(row) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(fragment[0])
                 : "r"(row)
                 : "memory");
}

template <int count, bool transposed = false>
PASS_EXT_DEVICE void load_matrices(uint32_t (&fragment)[count], const void* shared_row) {
  load_matrices<count, transposed>(fragment, shared_address(shared_row));
}

// D = A B + D for one warp: A 16 x 16 (row major), B 16 x 8 (column major), T in {bfloat16, float16}, fp32
// accumulation. Lane l, g = l / 4, t = l % 4, holds, two values a register:
//   a = {A[g][2t..], A[g+8][2t..], A[g][2t+8..], A[g+8][2t+8..]},  b = {B[2t..][g], B[2t+8..][g]},
//   d = {D[g][2t], D[g][2t+1], D[g+8][2t], D[g+8][2t+1]}.
template <typename T>
PASS_EXT_DEVICE void multiply_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
PASS_EXT_DEVICE void multiply_m16n8k16<bfloat16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
PASS_EXT_DEVICE void multiply_m16n8k16<float16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- launch (host) ----

using Stream = cudaStream_t;

struct BlockSize {
  unsigned x;
};

struct LaunchShape {
  Grid grid;
  BlockSize block;
  size_t dynamic_shared_bytes = 0;
};

// True if a kernel waits in begin_kernel: its code for the current device is for a GPU that can.
inline bool waits_to_begin(const void* kernel) {
  static std::mutex mutex;
  static auto* const known = new std::map<std::pair<const void*, int>, bool>;  // never destroyed: exit order
  int device = 0;
  cudaGetDevice(&device);
  const std::lock_guard lock(mutex);
  const auto entry = known->find({kernel, device});
  if (entry != known->end()) return entry->second;
  cudaFuncAttributes attributes{};
  const bool can = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
  return (*known)[{kernel, device}] = can;
}

// Allows a kernel more than 48 KB of dynamic shared memory and asks for the largest carve-out: the driver's own choice
// may let one block fit instead of two. Once per kernel and device, because the attributes cost 3 us a call.
inline void allow_dynamic_shared(const void* kernel, size_t bytes) {
  static std::mutex mutex;
  static auto* const allowed = new std::map<std::pair<const void*, int>, size_t>;  // never destroyed: exit order
  int device = 0;
  cudaGetDevice(&device);
  const std::lock_guard lock(mutex);
  size_t& largest = (*allowed)[{kernel, device}];
  if (bytes <= largest) return;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)) != cudaSuccess)
    return;  // the launch reports the error
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  largest = bytes;
}

// Starts `kernel` on `stream`; error messages call it `name`. check_launch (runtime.h) raises errors.
template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape, Stream stream,
            Arguments... arguments) {
  if (shape.dynamic_shared_bytes > 48 * 1024)
    allow_dynamic_shared(reinterpret_cast<const void*>(kernel), shape.dynamic_shared_bytes);
  check_grid(name, shape.grid);
  const dim3 grid(static_cast<unsigned>(shape.grid.x), static_cast<unsigned>(shape.grid.y),
                  static_cast<unsigned>(shape.grid.z));
  if (waits_to_begin(reinterpret_cast<const void*>(kernel))) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(shape.block.x);
    config.dynamicSmemBytes = shape.dynamic_shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);  // check_launch raises its error
    return;
  }
  kernel<<<grid, shape.block.x, shape.dynamic_shared_bytes, stream>>>(static_cast<Parameters>(arguments)...);
}

}  // namespace pass_ext::gpu
