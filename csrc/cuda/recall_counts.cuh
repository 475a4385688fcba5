// What a text recalls behind one path, counted by threads that share its places, in shared memory; counts are whole
// numbers, so their order changes nothing. For the kernels of recall.cuh and next.cuh. The formula:
// core/recall.h.
#pragma once

#include <cstdint>

#include "core/recall.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// Counts behind one path, in shared memory.
struct RecallCounts {
  int32_t* places;    // [3]
  int32_t* followed;  // [3, count]
};

PASS_EXT_DEVICE RecallCounts carve_recall(int32_t* shared) { return {shared, shared + kRecallTokens}; }
PASS_EXT_HOST_DEVICE int64_t recall_numbers(int64_t count) { return kRecallTokens * (1 + count); }

// The threads that count together, a barrier before and behind: sets all counts to 0.
PASS_EXT_DEVICE void clear_recall(const RecallCounts& counts, int32_t count, int32_t thread, int32_t threads) {
#pragma unroll 1
  for (int32_t i = thread; i < recall_numbers(count); i += threads) counts.places[i] = 0;
}

// The same threads: counts the places of the text.
PASS_EXT_DEVICE void count_recall(const RecallCounts& counts, const RecallText& text, const RecallContext& context,
                                  const int64_t* tokens, int32_t count, int32_t thread, int32_t threads) {
#pragma unroll 1
  for (int64_t place = text.begin + thread; place + 1 < text.end; place += threads) {
    const int32_t n = recalled_at(text, context, place);
    if (n == 0) continue;
    atomic_add(&counts.places[n - 1], int32_t{1});
    const int64_t behind = text.tokens[place + 1];
#pragma unroll 1
    for (int32_t k = 0; k < count; ++k)
      if (tokens[k] == behind) atomic_add(&counts.followed[(n - 1) * count + k], int32_t{1});
  }
}

}  // namespace pass_ext::gpu
