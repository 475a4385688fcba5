// Kernels with one fault each, behind a switch: `broken` takes the needed line away. The emulator must report every
// broken one and pass every whole one, under every seed. Called by planted_faults.cpp, from test_planted_faults.py.
#pragma once

#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// Reverses 64 values through shared memory.
inline PASS_EXT_KERNEL block_barrier_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  tile[i] = in[i];
  if (!broken) sync_block();
  out[i] = tile[63 - i];
}

// The neighbour's value within a warp; a shuffle meanwhile orders no memory.
inline PASS_EXT_KERNEL warp_barrier_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  tile[i] = in[i];
  const int zero = shuffle(0, 0);
  if (!broken) sync_warp();
  out[i] = tile[i ^ 1] + zero;
}

inline PASS_EXT_KERNEL shared_bounds_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  PASS_EXT_SHARED(int, other, 64);
  const unsigned i = thread_index().x;
  other[i] = 0;
  tile[i + (broken ? 1 : 0)] = in[i];
  out[i] = tile[i + (broken ? 1 : 0)] + other[i];
}

inline PASS_EXT_KERNEL dynamic_bounds_kernel(const int* in, int* out, bool broken) {
  int* tile = dynamic_shared<int>();  // 64 ints
  const unsigned i = thread_index().x;
  tile[broken && i == 63 ? 64 : i] = in[i];
  out[i] = in[i];
}

inline PASS_EXT_KERNEL uninitialised_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  if (!broken || i != 17) tile[i] = in[i];
  out[i] = tile[i];
}

inline PASS_EXT_KERNEL one_word_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  out[broken ? i / 2 : i] = in[0];  // both write the same value: still a race
}

inline PASS_EXT_KERNEL shared_word_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, flag, 1);
  const unsigned i = thread_index().x;
  if (broken ? i < 2 : i == 0) flag[0] = in[i];
  sync_block();
  out[i] = flag[0];
}

// A second pass over a tile must not start before everybody has read the first.
inline PASS_EXT_KERNEL overwrite_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  int sum = 0;
  for (int pass = 0; pass < 3; ++pass) {
    tile[i] = in[i] + pass;
    sync_block();
    sum += tile[63 - i];
    if (!broken) sync_block();
  }
  out[i] = sum;
}

inline PASS_EXT_KERNEL global_bounds_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  out[i] = in[i + (broken ? 1 : 0)];
}

inline PASS_EXT_KERNEL read_only_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  if (broken) const_cast<int*>(in)[i] = 1;
  out[i] = in[i];
}

inline PASS_EXT_KERNEL misaligned_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  if (i < 15) store16(out + 4 * i, load16(in + 4 * i + (broken ? 1 : 0)));
}

// Two blocks; the last to arrive adds both partial sums.
inline PASS_EXT_KERNEL device_fence_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, ticket, 1);
  const unsigned i = thread_index().x, block = block_index().x;
  if (i < 31) out[1 + 31 * block + i] = in[i];
  if (!broken) fence_device();
  sync_block();
  if (i == 0) ticket[0] = atomic_add(out, 1);
  sync_block();
  if (ticket[0] != 1 || i >= 31) return;
  out[1 + i] = out[1 + i] + out[32 + i];
}

inline PASS_EXT_KERNEL async_wait_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  copy_async4(&tile[i], in + i);
  copy_async_commit();
  if (!broken) copy_async_wait<0>();
  out[i] = tile[i];
}

inline PASS_EXT_KERNEL async_commit_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  copy_async4(&tile[i], in + i);
  if (!broken) copy_async_commit();
  copy_async_wait<0>();
  out[i] = tile[i];
}

inline PASS_EXT_KERNEL async_barrier_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  copy_async4(&tile[i], in + i);
  copy_async_commit();
  copy_async_wait<0>();
  if (!broken) sync_block();
  out[i] = tile[63 - i];
}

inline PASS_EXT_KERNEL divergent_barrier_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  if (!broken || i < 32) sync_block();
  if (broken && i >= 32) sync_block_count(true);
  out[i] = in[i];
}

inline PASS_EXT_KERNEL divergent_shuffle_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  out[i] = in[i];
  if (broken && i == 5) return;
  out[i] = shuffle(in[i], 0);
}

inline PASS_EXT_KERNEL absent_lane_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  out[i] = in[i];
  if (i < 16) out[i] = shuffle(in[i], broken ? 20 : 3, 0xffffu);
}

inline PASS_EXT_KERNEL streaming_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  if (i >= 16) return;
  store16(out + 4 * i, load16(in + 4 * i));
  load16_streaming((broken ? out : in) + 4 * i);
}

}  // namespace pass_ext::gpu
