// One small kernel per primitive, so that tests can compare each with its definition. Written against the primitives
// only: nvcc compiles this file too.
#pragma once

#include <cuda/pairs.cuh>  // not in quotes: nvcc must find those in csrc/, not those beside this file
#include <cuda/primitives.cuh>
#include "core/half.h"
#include "core/philox.h"

namespace pass_ext::gpu {

// out[linear thread of the grid] = {thread x y z, block x y z, block size x, grid size x, rank, lane}
PASS_EXT_KERNEL indices_kernel(int* out) {
  const Index3 t = thread_index(), b = block_index(), bs = block_size(), gs = grid_size();
  const unsigned block = b.x + gs.x * (b.y + gs.y * b.z);
  int* to = out + (block * bs.x * bs.y * bs.z + thread_rank()) * 10;
  const unsigned values[10] = {t.x, t.y, t.z, b.x, b.y, b.z, bs.x, gs.x, thread_rank(), lane_index()};
  for (int i = 0; i < 10; ++i) to[i] = static_cast<int>(values[i]);
}

// kind 0 shuffle from (lane * 7 + 3) % 32, 1 xor 5, 2 up 3, 3 down 3; only lanes of `mask` take part.
PASS_EXT_KERNEL shuffle_kernel(const double* in, double* out, int kind, unsigned mask, int from) {
  const unsigned lane = lane_index();
  if (!(mask >> lane & 1)) return;
  const double value = in[lane];
  out[lane] = kind == 0   ? shuffle(value, from < 0 ? static_cast<int>(lane * 7 + 3) % 32 : from, mask)
              : kind == 1 ? shuffle_xor(value, 5, mask)
              : kind == 2 ? shuffle_up(value, 3u, mask)
                          : shuffle_down(value, 3u, mask);
}

PASS_EXT_KERNEL votes_kernel(const int* in, int* out, unsigned mask) {
  const unsigned lane = lane_index();
  if (!(mask >> lane & 1)) return;
  const bool vote = in[lane] != 0;
  out[4 * lane] = static_cast<int>(ballot(vote, mask));
  out[4 * lane + 1] = any(vote, mask);
  out[4 * lane + 2] = all(vote, mask);
  out[4 * lane + 3] = first_set_bit(ballot(vote, mask)) + 100 * count_set_bits(mask);
}

// out[lane] = {the largest input of the lanes of `mask`, the smallest}; only these take part.
PASS_EXT_KERNEL reductions_kernel(const uint32_t* in, uint32_t* out, unsigned mask) {
  const unsigned lane = lane_index();
  if (!(mask >> lane & 1)) return;
  out[2 * lane] = reduce_max(in[lane], mask);
  out[2 * lane + 1] = reduce_min(in[lane], mask);
}

// out = the block's reversed input, through static and dynamic shared memory; votes[block] = how many inputs are odd.
PASS_EXT_KERNEL reverse_kernel(const int* in, int* out, int* votes) {
  PASS_EXT_SHARED(int, first, 256);
  int* second = dynamic_shared<int>();
  const unsigned n = block_size().x, i = thread_index().x, base = block_index().x * n;
  first[i] = in[base + i];
  sync_block();
  second[i] = first[n - 1 - i];
  const int odd = sync_block_count(second[i] % 2 != 0);
  out[base + i] = second[i];
  if (i == 0) votes[block_index().x] = odd;
}

// A butterfly sum over each warp through shared memory, ordered by sync_warp alone.
PASS_EXT_KERNEL warp_sum_kernel(const int* in, int* out) {
  PASS_EXT_SHARED(int, sums, 64);
  const unsigned i = thread_index().x;
  sums[i] = in[i];
  for (unsigned step = 16; step > 0; step /= 2) {
    sync_warp();
    const int other = sums[i ^ step];
    sync_warp();
    sums[i] += other;
  }
  out[i] = sums[i];
}

PASS_EXT_KERNEL atomics_kernel(const int* in, int* ints, float* sum, unsigned long long* wide) {
  PASS_EXT_SHARED(int, count, 1);
  const unsigned i = thread_index().x;
  if (i == 0) count[0] = 0;
  sync_block();
  const int ticket = atomic_add(&count[0], 1);
  atomic_add(&ints[0], in[i]);
  atomic_max(&ints[1], in[i]);
  atomic_min(&ints[2], in[i]);
  atomic_or(&ints[3], 1 << (i % 31));
  atomic_compare_and_swap(&ints[4], 0, in[i]);
  atomic_exchange(&ints[5 + ticket], in[i]);
  atomic_add(sum, 0.5f);
  atomic_add(wide, 1ull << 33);
}

// Each thread counts once and keeps the number that it found.
PASS_EXT_KERNEL counter_kernel(int* counter, int* found, int count) {
  found[thread_index().x] = count_arrival(counter, count);
}

// Sum over blocks by the last block to arrive: each block's partial sum, fence, ticket; the last one adds them in
// order.
PASS_EXT_KERNEL last_arriver_kernel(const float* in, float* partial, unsigned* tickets, float* out) {
  PASS_EXT_SHARED(unsigned, ticket, 1);
  if (thread_index().x == 0) {
    float sum = 0;
    for (unsigned i = 0; i < 32; ++i) sum += in[block_index().x * 32 + i];
    partial[block_index().x] = sum;
    fence_device();
  }
  sync_block();
  if (thread_index().x == 0) ticket[0] = atomic_add(tickets, 1u);
  sync_block();
  if (ticket[0] + 1 != grid_size().x) return;
  fence_device();
  if (thread_index().x != 1) return;
  float total = 0;
  for (unsigned i = 0; i < grid_size().x; ++i) total += partial[i];
  out[0] = total;
}

// The same by count_arrival alone; each block also writes how many came before it.
PASS_EXT_KERNEL arrivals_kernel(const int* in, int* partial, int32_t* counter, int* out) {
  PASS_EXT_SHARED(int, before, 1);
  const unsigned block = block_index().x, blocks = grid_size().x;
  if (thread_index().x == 1) partial[block] = in[block];
  sync_block();
  if (thread_index().x == 0) before[0] = count_arrival(counter, static_cast<int32_t>(blocks));
  sync_block();
  if (thread_index().x != 1) return;
  out[1 + block] = before[0];
  if (before[0] + 1 != static_cast<int>(blocks)) return;
  int total = 0;
  for (unsigned i = 0; i < blocks; ++i) total += partial[i];
  out[0] = total;
}

PASS_EXT_KERNEL copy16_kernel(const int* in, int* out) {
  const unsigned i = 4 * thread_rank();
  const Bytes16 a = load16(in + i), b = load16_streaming(in + i);
  Bytes16 sum;
  for (int k = 0; k < 4; ++k) sum.word[k] = a.word[k] + b.word[k];
  if (thread_rank() % 2 == 0)
    store16(out + i, sum);
  else
    store16_global(out + i, sum);
}

// A three-stage pipeline: stage s is copied while stage s - 2 is used; every third chunk is filled with zeros.
PASS_EXT_KERNEL pipeline_kernel(const int* in, int* out, int stages) {
  int* buffer = dynamic_shared<int>();  // [3, 128]
  const unsigned i = thread_index().x;  // 32 threads, 4 ints each
  for (int stage = 0; stage < stages + 2; ++stage) {
    if (stage < stages) copy_async16(buffer + stage % 3 * 128 + 4 * i, in + stage * 128 + 4 * i, (stage + i) % 3 != 0);
    copy_async_commit();
    if (stage < 2) continue;
    copy_async_wait<2>();
    sync_warp();
    for (int k = 0; k < 4; ++k) out[(stage - 2) * 128 + 32 * k + i] = buffer[(stage - 2) % 3 * 128 + 32 * k + i];
    sync_warp();
  }
}

PASS_EXT_KERNEL copy4_kernel(const int* in, int* out) {
  PASS_EXT_SHARED(int, buffer, 32);
  const unsigned i = thread_index().x;
  copy_async4(&buffer[i], in + i, i % 5 != 0);
  copy_async_commit();
  copy_async_wait<0>();
  out[i] = buffer[i];
}

// d = a b + c for one tile: a [16, 16], b [8, 16] (column major), c, d [16, 8].
template <typename T>
PASS_EXT_KERNEL multiply_kernel(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  const unsigned g = lane_index() / 4, t = lane_index() % 4;
  const uint32_t fa[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]};
  const uint32_t fb[2] = {b[g * 8 + t], b[g * 8 + t + 4]};
  float fd[4];
  for (int i = 0; i < 4; ++i) fd[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  multiply_m16n8k16<T>(fd, fa, fb);
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = fd[i];
}

// in: [4 matrices, 8, 8] 16-bit values, copied to shared memory with rows 16 bytes apart; out [32 lanes, count].
template <int count, bool transposed>
PASS_EXT_KERNEL matrices_kernel(const uint16_t* in, uint32_t* out) {
  uint16_t* tile = dynamic_shared<uint16_t>();
  const unsigned lane = lane_index();
  for (int i = 0; i < 8; ++i) tile[8 * lane + i] = in[8 * lane + i];
  sync_warp();
  uint32_t fragment[count];
  load_matrices<count, transposed>(fragment, shared_address(tile) + 16 * (lane % (8 * count)));
  for (int m = 0; m < count; ++m) out[lane * count + m] = fragment[m];
}

// All conversions of csrc/core/half.h: bits up to fp32, fp32 down to bits, and pairs.
PASS_EXT_KERNEL widen_kernel(const uint16_t* in, float* bfloats, float* halves) {
  const unsigned i = block_index().x * block_size().x + thread_index().x;
  bfloats[i] = to_float(bfloat16{in[i]});
  halves[i] = to_float(float16{in[i]});
}
PASS_EXT_KERNEL narrow_kernel(const float* in, uint16_t* bfloats, uint16_t* halves, uint32_t* pairs) {
  const unsigned i = block_index().x * block_size().x + thread_index().x;
  bfloats[i] = to_bfloat16(in[i]).bits;
  halves[i] = to_float16(in[i]).bits;
  const uint32_t pair = pack2<bfloat16>(in[i], -in[i]);
  pairs[i] = pack2<bfloat16>(unpack_low<bfloat16>(pair), unpack_high<bfloat16>(pair));
}

PASS_EXT_KERNEL exp2_kernel(const float* in, float* out) {
  const unsigned i = block_index().x * block_size().x + thread_index().x;
  out[i] = exp2_approximate(in[i]);
}

PASS_EXT_KERNEL larger_kernel(const float* in, float* out) {
  const unsigned i = thread_index().x;
  out[i] = larger(in[2 * i], in[2 * i + 1]);
}

PASS_EXT_KERNEL larger_pairs_kernel(const uint32_t* in, uint32_t* out) {
  const unsigned i = thread_index().x;
  out[i] = larger_bfloat16s(in[2 * i], in[2 * i + 1]);
}

PASS_EXT_KERNEL fused_pairs_kernel(const uint32_t* in, uint32_t* bfloats, uint32_t* halves) {
  const unsigned i = thread_index().x;
  bfloats[i] = fused2<bfloat16>(in[3 * i], in[3 * i + 1], in[3 * i + 2]);
  halves[i] = fused2<float16>(in[96 + 3 * i], in[96 + 3 * i + 1], in[96 + 3 * i + 2]);
}

PASS_EXT_KERNEL pick_bytes_kernel(const uint32_t* in, uint32_t* out) {
  const unsigned i = thread_index().x;
  out[i] = pick_bytes(in[3 * i], in[3 * i + 1], in[3 * i + 2]);
}

// positions[2 i] = leading_zeros(in[i]), positions[2 i + 1] = last_set_bit(the low half of in[i])
PASS_EXT_KERNEL bits_kernel(const uint64_t* in, int* positions) {
  const unsigned i = thread_index().x;
  positions[2 * i] = leading_zeros(in[i]);
  positions[2 * i + 1] = last_set_bit(static_cast<uint32_t>(in[i]));
}

// words[i] = philox4x32(counters[i], keys[i])
PASS_EXT_KERNEL philox_kernel(const uint32_t* counters, const uint64_t* keys, uint32_t* words) {
  const unsigned i = block_index().x * block_size().x + thread_index().x;
  PhiloxBlock counter;
  for (int k = 0; k < 4; ++k) counter.word[k] = counters[4 * i + k];
  counter = philox4x32(counter, keys[i]);
  for (int k = 0; k < 4; ++k) words[4 * i + k] = counter.word[k];
}

// For critical paths. Two warps: all threads load twice, `chased` says how often from where the first load sends them;
// the second warp shuffles; all wait at a barrier, or two.
PASS_EXT_KERNEL path_kernel(const int* in, int* out, int chased, int shuffles, int barriers) {
  int place = in[0];
  if (chased > 0) place = in[place + 32];
  if (chased > 1) place = in[place + 64];
  if (warp_index() == 1)
    for (int i = 0; i < shuffles; ++i) place = shuffle_xor(place, 1);
  sync_block();
  if (barriers > 1) sync_block();
  out[thread_rank()] = place;
}

}  // namespace pass_ext::gpu
