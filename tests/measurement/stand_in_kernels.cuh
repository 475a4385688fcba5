// Two small kernels in the manner of the real ones, which test_kernel_code compiles as they are and with a word
// missing.
//   stand_in_scan_kernel  sums exp(z - bound) over logits; each lane loads all its pieces of eight before it uses one
//   stand_in_walk_kernel  keeps `values` sums in registers; blocks of 512 threads, one at once, have 128 registers a
//   thread

#include <cstdint>

#include "core/distribution.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kStandInPieces = 12;

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(128)
    stand_in_scan_kernel(const void* logits, LogitType type, int32_t vocabulary, float bound, float* sums) {
  Bytes16 raw[kStandInPieces];
#pragma unroll
  for (int k = 0; k < kStandInPieces; ++k) {
    const int32_t first = 8 * static_cast<int32_t>(thread_rank() + block_size().x * k);
    if (type == LogitType::bfloat16 && first + 8 <= vocabulary) {
      raw[k] = load16_streaming(static_cast<const bfloat16*>(logits) + first);
    } else {  // minus infinity behind the end
      for (int i = 0; i < 4; ++i) {
        const int32_t id = first + 2 * i;
        raw[k].word[i] = pack2<bfloat16>(id < vocabulary ? load_logit(logits, type, id) : -kInfinity,
                                         id + 1 < vocabulary ? load_logit(logits, type, id + 1) : -kInfinity);
      }
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kStandInPieces; ++k)
    for (int i = 0; i < 4; ++i)
      sum += exponential(unpack_low<bfloat16>(raw[k].word[i]) - bound) +
             exponential(unpack_high<bfloat16>(raw[k].word[i]) - bound);
  sums[thread_rank()] = sum;
}

template <int values>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(512, 1) stand_in_walk_kernel(const float* given, int32_t rounds, float* result) {
  float value[values];
#pragma unroll
  for (int i = 0; i < values; ++i) value[i] = 0.0f;
  for (int32_t round = 0; round < rounds; ++round)
#pragma unroll
    for (int i = 0; i < values; ++i) value[i] += exponential(given[(round * values + i) * 512 + thread_rank()]);
#pragma unroll
  for (int i = 0; i < values; ++i) result[thread_rank() + 512 * i] = value[i];
}

template PASS_EXT_KERNEL stand_in_walk_kernel<52>(const float*, int32_t, float*);
template PASS_EXT_KERNEL stand_in_walk_kernel<54>(const float*, int32_t, float*);

}  // namespace pass_ext::gpu
