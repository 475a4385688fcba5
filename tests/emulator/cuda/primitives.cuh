// The host's implementation of csrc/cuda/primitives.cuh, name for name: kernels that include "cuda/primitives.cuh" get
// this one where tests/emulator comes first on the include path. What each name means is said there; the work is in
// engine.cpp. Kernel files that include it are compiled with -fsanitize=thread, whose calls hooks.cpp answers.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "core/grid.h"
#include "core/half.h"
#include "engine.h"

#define PASS_EXT_KERNEL inline void
#define PASS_EXT_DEVICE inline
#define PASS_EXT_DEVICE_CALL inline
#define PASS_EXT_LAUNCH_BOUNDS(...)
#define PASS_EXT_PARAMETER const
#define PASS_EXT_SHARED(type, name, count) \
  static const char name##_site = 0;       \
  type(&name)[count] =                     \
      *reinterpret_cast<type(*)[count]>(::emulator::shared_array(&name##_site, #name, sizeof(type[count])))

namespace pass_ext::gpu {

constexpr unsigned kFullWarp = 0xffffffffu;

using emulator::block_index;
using emulator::block_size;
using emulator::grid_size;
using emulator::Index3;
using emulator::thread_index;
using emulator::thread_rank;

inline unsigned lane_index() { return thread_rank() % 32; }
inline unsigned warp_index() { return thread_rank() / 32; }

template <typename T>
T* dynamic_shared() {
  return static_cast<T*>(emulator::dynamic_shared());
}

using SharedAddress = uintptr_t;
inline SharedAddress shared_address(const void* shared) { return reinterpret_cast<SharedAddress>(shared); }

inline void sync_block() { emulator::block_barrier("sync_block", false); }
inline int sync_block_count(bool vote) { return emulator::block_barrier("sync_block_count", vote); }
inline void sync_warp(unsigned mask = kFullWarp) { emulator::warp_barrier(mask); }
inline void fence_device() { emulator::fence(); }
template <typename... Parameters>
inline void begin_kernel(const Parameters&...) {}

// ---- warp ----

template <typename T>
T shuffle_as(const char* name, T value, int source_lane, unsigned mask) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = emulator::shuffle(name, bits, source_lane, mask);
  memcpy(&value, &bits, sizeof value);
  return value;
}
template <typename T>
T shuffle(T value, int source_lane, unsigned mask = kFullWarp) {
  return shuffle_as("shuffle", value, source_lane & 31, mask);
}
template <typename T>
T shuffle_xor(T value, int lane_mask, unsigned mask = kFullWarp) {
  const int source = static_cast<int>(lane_index()) ^ lane_mask;
  return shuffle_as("shuffle_xor", value, source < 32 ? source : static_cast<int>(lane_index()), mask);
}
template <typename T>
T shuffle_up(T value, unsigned delta, unsigned mask = kFullWarp) {
  const unsigned lane = lane_index();
  return shuffle_as("shuffle_up", value, static_cast<int>(delta > lane ? lane : lane - delta), mask);
}
template <typename T>
T shuffle_down(T value, unsigned delta, unsigned mask = kFullWarp) {
  const unsigned lane = lane_index();
  return shuffle_as("shuffle_down", value, static_cast<int>(lane + delta > 31 ? lane : lane + delta), mask);
}
inline unsigned ballot(bool vote, unsigned mask = kFullWarp) { return emulator::ballot("ballot", vote, mask); }
inline bool any(bool vote, unsigned mask = kFullWarp) { return emulator::ballot("any", vote, mask) != 0; }
inline bool all(bool vote, unsigned mask = kFullWarp) { return emulator::ballot("all", !vote, mask) == 0; }
inline uint32_t reduce_max(uint32_t value, unsigned mask = kFullWarp) {
  return emulator::largest("reduce_max", value, mask);
}
inline uint32_t reduce_min(uint32_t value, unsigned mask = kFullWarp) {
  return ~emulator::largest("reduce_min", ~value, mask);
}

inline int first_set_bit(unsigned bits) { return bits == 0 ? -1 : __builtin_ctz(bits); }
inline int last_set_bit(unsigned bits) { return bits == 0 ? -1 : 31 - __builtin_clz(bits); }
inline int leading_zeros(uint64_t bits) { return bits == 0 ? 64 : __builtin_clzll(bits); }
inline int count_set_bits(unsigned bits) { return __builtin_popcount(bits); }

// ---- atomics: fibers switch only at barriers and warp operations, so a plain update is atomic ----

template <typename T, typename Update>
T atomic_update(T* address, Update update) {
  emulator::check_access(address, sizeof(T), emulator::Access::atomic, true);
  T former, next;
  emulator::copy_bytes(&former, address, sizeof(T));
  next = update(former);
  emulator::copy_bytes(address, &next, sizeof(T));
  return former;
}
template <typename T>
T atomic_add(T* address, T value) {
  return atomic_update(address, [value](T former) { return static_cast<T>(former + value); });
}
template <typename T>
T atomic_max(T* address, T value) {
  return atomic_update(address, [value](T former) { return former < value ? value : former; });
}
template <typename T>
T atomic_min(T* address, T value) {
  return atomic_update(address, [value](T former) { return value < former ? value : former; });
}
template <typename T>
T atomic_or(T* address, T value) {
  return atomic_update(address, [value](T former) { return static_cast<T>(former | value); });
}
template <typename T>
T atomic_exchange(T* address, T value) {
  return atomic_update(address, [value](T) { return value; });
}
template <typename T>
T atomic_compare_and_swap(T* address, T expected, T desired) {
  return atomic_update(address, [=](T former) { return former == expected ? desired : former; });
}
inline int32_t count_arrival(int32_t* counter, int32_t expected) {
  emulator::check_global("count_arrival", counter);
  emulator::fence();
  return atomic_update(counter, [expected](int32_t before) { return before + 1 >= expected ? 0 : before + 1; });
}

// ---- 16 bytes ----

struct alignas(16) Bytes16 {
  uint32_t word[4];
};

inline Bytes16 load16(const void* address) {
  emulator::check_access(address, 16, emulator::Access::read, true);
  Bytes16 value;
  emulator::copy_bytes(&value, address, 16);
  return value;
}
inline void store16(void* address, Bytes16 value) {
  emulator::check_access(address, 16, emulator::Access::write, true);
  emulator::copy_bytes(address, &value, 16);
}
inline void store16_global(void* address, Bytes16 value) {
  emulator::check_global("store16_global", address);
  store16(address, value);
}
inline Bytes16 load16_streaming(const void* address) {
  emulator::check_streaming(address, 16);
  return load16(address);
}

// ---- asynchronous copies ----

inline void copy_async16(void* shared, const void* global, bool valid = true) {
  emulator::copy_async(shared, global, 16, valid);
}
inline void copy_async16(SharedAddress shared, const void* global, bool valid = true) {
  copy_async16(reinterpret_cast<void*>(shared), global, valid);
}
inline void copy_async4(void* shared, const void* global, bool valid = true) {
  emulator::copy_async(shared, global, 4, valid);
}
inline void copy_async_commit() { emulator::copy_async_commit(); }
template <int pending>
void copy_async_wait() {
  emulator::copy_async_wait(pending);
}

// ---- arithmetic ----

inline float larger(float a, float b) { return std::fmax(a, b); }
using emulator::exp2_approximate;

// ---- pairs of 16-bit floats ----

template <typename T>
uint32_t pack2(float low, float high) {
  return static_cast<uint32_t>(from_float<T>(low).bits) | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}
template <typename T>
float unpack_low(uint32_t pair) {
  return to_float(T{static_cast<uint16_t>(pair)});
}
template <typename T>
float unpack_high(uint32_t pair) {
  return to_float(T{static_cast<uint16_t>(pair >> 16)});
}

using emulator::larger_bfloat16s;

// ---- matrix fragments ----

template <int count, bool transposed = false>
void load_matrices(uint32_t (&fragment)[count], const void* shared_row) {
  static_assert(count == 1 || count == 2 || count == 4, "ldmatrix loads 1, 2 or 4 matrices");
  emulator::load_matrices(fragment, shared_row, count, transposed);
}
template <int count, bool transposed = false>
void load_matrices(uint32_t (&fragment)[count], SharedAddress row) {
  load_matrices<count, transposed>(fragment, reinterpret_cast<const void*>(row));
}

template <typename T>
void multiply_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>);
  emulator::multiply(d, a, b, std::is_same_v<T, bfloat16>);
}

// ---- launch ----

struct Stream {};

enum class Overlap { none, if_asked, always };  // launches run one after the other

struct BlockSize {
  unsigned x;
};

struct LaunchShape {
  Grid grid;
  BlockSize block;
  size_t dynamic_shared_bytes = 0;
  Overlap overlap = Overlap::none;
};

template <typename... Parameters>
struct Call {
  void (*kernel)(Parameters...);
  std::tuple<Parameters...> parameters;
  static void run(const void* self) {
    const Call& call = *static_cast<const Call*>(self);
    std::apply(call.kernel, call.parameters);
  }
};

template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape, Stream, Arguments... arguments) {
  const Call<Parameters...> call{kernel, {static_cast<Parameters>(arguments)...}};
  check_grid(name, shape.grid);
  const Index3 grid{static_cast<unsigned>(shape.grid.x), static_cast<unsigned>(shape.grid.y),
                    static_cast<unsigned>(shape.grid.z)};
  emulator::run_grid(name, grid, {shape.block.x}, shape.dynamic_shared_bytes, &Call<Parameters...>::run, &call,
                     sizeof call);
}

}  // namespace pass_ext::gpu
