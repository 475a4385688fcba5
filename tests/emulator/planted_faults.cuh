// Kernels with one fault each, behind a switch: `broken` takes the needed line away. The emulator must report every
// broken one and pass every whole one, under every seed.
#pragma once

#include <cuda/primitives.cuh>  // not in quotes: nvcc must find the one in csrc/, not the one beside this file

namespace pass_ext::gpu {

// Reverses 64 values through shared memory.
PASS_EXT_KERNEL block_barrier_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  tile[i] = in[i];
  if (!broken) sync_block();
  out[i] = tile[63 - i];
}

// The neighbour's value within a warp; a shuffle meanwhile orders no memory.
PASS_EXT_KERNEL warp_barrier_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  tile[i] = in[i];
  const int zero = shuffle(0, 0);
  if (!broken) sync_warp();
  out[i] = tile[i ^ 1] + zero;
}

PASS_EXT_KERNEL shared_bounds_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  PASS_EXT_SHARED(int, other, 64);
  const unsigned i = thread_index().x;
  other[i] = 0;
  tile[i + (broken ? 1 : 0)] = in[i];
  out[i] = tile[i + (broken ? 1 : 0)] + other[i];
}

PASS_EXT_KERNEL dynamic_bounds_kernel(const int* in, int* out, bool broken) {
  int* tile = dynamic_shared<int>();  // 64 ints
  const unsigned i = thread_index().x;
  tile[broken && i == 63 ? 64 : i] = in[i];
  out[i] = in[i];
}

PASS_EXT_KERNEL uninitialised_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  if (!broken || i != 17) tile[i] = in[i];
  out[i] = tile[i];
}

// Two threads write a word by halves, which is no race; or one of them writes nothing.
PASS_EXT_KERNEL unwritten_half_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(uint16_t, tile, 128);
  const unsigned i = thread_index().x;
  tile[2 * i] = static_cast<uint16_t>(in[i]);
  if (!broken) tile[2 * (63 - i) + 1] = 0;
  sync_block();
  out[i] = tile[2 * i] + tile[2 * i + 1];
}

// One thread writes a word, another reads half of it.
PASS_EXT_KERNEL half_of_a_word_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  tile[i] = in[i];
  if (!broken) sync_block();
  uint16_t half = 0;
  if (i == 0) memcpy(&half, &tile[63], sizeof half);
  out[i] = half;
}

PASS_EXT_KERNEL one_word_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  out[broken ? i / 2 : i] = in[0];  // both write the same value: still a race
}

PASS_EXT_KERNEL shared_word_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, flag, 1);
  const unsigned i = thread_index().x;
  if (broken ? i < 2 : i == 0) flag[0] = in[i];
  sync_block();
  out[i] = flag[0];
}

// A second pass over a tile must not start before everybody has read the first.
PASS_EXT_KERNEL overwrite_kernel(const int* in, int* out, bool broken) {
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

PASS_EXT_KERNEL global_bounds_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  out[i] = in[i + (broken ? 1 : 0)];
}

PASS_EXT_KERNEL read_only_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  if (broken) const_cast<int*>(in)[i] = 1;
  out[i] = in[i];
}

PASS_EXT_KERNEL misaligned_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  if (i < 15) store16(out + 4 * i, load16(in + 4 * i + (broken ? 1 : 0)));
}

// Two blocks; the last to arrive adds both partial sums.
PASS_EXT_KERNEL device_fence_kernel(const int* in, int* out, bool broken) {
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

// As above, with one fence behind a barrier instead of every thread's own; before the barrier it covers thread 0 alone.
PASS_EXT_KERNEL device_fence_order_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, ticket, 1);
  const unsigned i = thread_index().x, block = block_index().x;
  if (broken && i == 0) fence_device();
  if (i > 0 && i < 31) out[1 + 31 * block + i] = in[i];
  sync_block();
  if (!broken && i == 0) fence_device();
  if (i == 0) ticket[0] = atomic_add(out, 1);
  sync_block();
  if (ticket[0] != 1 || i >= 31) return;
  out[1 + i] = out[1 + i] + out[32 + i];
}

// What a thread writes behind its ticket is not published by it.
PASS_EXT_KERNEL device_late_write_kernel(const int* in, int* out, bool broken) {
  const unsigned block = block_index().x;
  if (thread_index().x != 0) return;
  if (!broken) out[1 + block] = in[0];
  fence_device();
  const int ticket = atomic_add(out, 1);
  if (broken) out[1 + block] = in[0];
  if (ticket == 1) out[3] = out[1] + out[2];
}

// One warp a block, ordered by sync_warp alone: before the fence of lane 0, and behind its ticket.
PASS_EXT_KERNEL device_warp_release_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x, block = block_index().x;
  if (i >= 31) return;
  out[1 + 31 * block + i] = in[i];
  if (!broken) sync_warp(0x7fffffffu);
  int ticket = 0;
  if (i == 0) {
    fence_device();
    ticket = atomic_add(out, 1);
  }
  sync_warp(0x7fffffffu);
  if (shuffle(ticket, 0, 0x7fffffffu) == 1) out[1 + i] = out[1 + i] + out[32 + i];
}
PASS_EXT_KERNEL device_warp_acquire_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x, block = block_index().x;
  if (i >= 31) return;
  out[1 + 31 * block + i] = in[i];
  sync_warp(0x7fffffffu);
  int ticket = 0;
  if (i == 0) {
    fence_device();
    ticket = atomic_add(out, 1);
  }
  if (!broken) sync_warp(0x7fffffffu);
  if (shuffle(ticket, 0, 0x7fffffffu) == 1) out[1 + i] = out[1 + i] + out[32 + i];
}

// A sum by relaxed atomics, read plainly by the last block: its own atomic on it orders nothing.
PASS_EXT_KERNEL device_sum_kernel(const int* in, int* out, bool broken) {
  if (thread_index().x != 0) return;
  atomic_add(&out[1], in[block_index().x]);
  if (!broken) fence_device();
  if (atomic_add(out, 1) == 1) out[2] = out[1];
}

// Waiting for another block in a loop; blocks need not run at the same time.
PASS_EXT_KERNEL endless_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  if (i > 0) out[i] = in[i];
  while (broken && i == 0 && atomic_add(out, 0) == 0) {
  }
}

// Copies that the compiler does not turn into loads and stores are checked too.
PASS_EXT_KERNEL copy_bounds_kernel(const int* in, int* out, bool broken) {
  if (thread_index().x == 0) memcpy(out, in + (broken ? 60 : 58), 24);
}
PASS_EXT_KERNEL fill_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  if (i < 2) memset(out + 4 * i, 0, (broken ? 16 : 12) + in[0]);  // in[0] is 1
}

// The source of a copy must stay as it is until the copy is waited for.
PASS_EXT_KERNEL async_source_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  out[i] = in[i];
  copy_async4(&tile[i], out + i);
  copy_async_commit();
  if (broken) out[i] = 0;
  copy_async_wait<0>();
  out[i] = tile[i];
}

// A copy may land at once, on what a neighbour still reads.
PASS_EXT_KERNEL async_target_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  tile[i] = in[i];
  sync_block();
  const int other = tile[63 - i];
  if (!broken) sync_block();
  copy_async4(&tile[i], in + i);
  copy_async_commit();
  copy_async_wait<0>();
  out[i] = tile[i] + other;
}

PASS_EXT_KERNEL different_masks_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  sync_warp(broken && i % 32 < 16 ? 0xffffu : kFullWarp);
  out[i] = in[i];
}

PASS_EXT_KERNEL own_lane_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  if (i < (broken ? 17 : 16)) out[i] = any(in[i] > 0, 0xffffu);
}

PASS_EXT_KERNEL async_wait_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  copy_async4(&tile[i], in + i);
  copy_async_commit();
  if (!broken) copy_async_wait<0>();
  out[i] = tile[i];
}

PASS_EXT_KERNEL async_commit_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  copy_async4(&tile[i], in + i);
  if (!broken) copy_async_commit();
  copy_async_wait<0>();
  out[i] = tile[i];
}

PASS_EXT_KERNEL async_barrier_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(int, tile, 64);
  const unsigned i = thread_index().x;
  copy_async4(&tile[i], in + i);
  copy_async_commit();
  copy_async_wait<0>();
  if (!broken) sync_block();
  out[i] = tile[63 - i];
}

PASS_EXT_KERNEL divergent_barrier_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  if (!broken || i < 32) sync_block();
  if (broken && i >= 32) sync_block_count(true);
  out[i] = in[i];
}

PASS_EXT_KERNEL divergent_shuffle_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  out[i] = in[i];
  if (broken && i == 5) return;
  out[i] = shuffle(in[i], 0);
}

PASS_EXT_KERNEL absent_lane_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  out[i] = in[i];
  if (i < 16) out[i] = shuffle(in[i], broken ? 20 : 3, 0xffffu);
}

PASS_EXT_KERNEL streaming_kernel(const int* in, int* out, bool broken) {
  const unsigned i = thread_index().x;
  if (i >= 16) return;
  store16(out + 4 * i, load16(in + 4 * i));
  load16_streaming((broken ? out : in) + 4 * i);
}

PASS_EXT_KERNEL global_store_kernel(const int* in, int* out, bool broken) {
  PASS_EXT_SHARED(Bytes16, tile, 16);
  const unsigned i = thread_index().x;
  if (i >= 16) return;
  tile[i] = load16(in + 4 * i);
  store16_global(broken ? static_cast<void*>(&tile[i]) : out + 4 * i, tile[i]);
}

}  // namespace pass_ext::gpu
