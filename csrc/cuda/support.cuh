// The supports that an accept step's emitted tokens were drawn from, on the GPU: a block for each token reads its row
// twice, once to count and, where the ids have room, once to write them. The second time a warp reads only if its part
// of the row holds any. The formulas: core/logprobs.h.
#pragma once

#include <cstdint>

#include "core/logprobs.h"
#include "cuda/primitives.cuh"
#include "cuda/row_pieces.cuh"

namespace pass_ext::gpu {

constexpr unsigned kSupportThreads = 512;

// A warp's part of an emitted token's row: pieces side by side, so that the warps' ids follow each other.
struct SupportPart {
  const EmittedToken& emitted;
  int32_t begin, end;

  // take(first id, bits of those of this lane's eight ids that are in the support), by all lanes together.
  template <typename Take>
  PASS_EXT_DEVICE void for_each_piece(const Take& take) const {
    for (int32_t first = begin; first < end; first += 32 * kPiece) {
      const int32_t own = first + static_cast<int32_t>(lane_index()) * kPiece;
      unsigned bits = 0;
      if (own < emitted.row.vocabulary) {
        float z[kPiece];
        load_piece(emitted.row, own, z);
        for (int i = 0; i < kPiece; ++i)
          bits |= static_cast<unsigned>(in_support(emitted.processed, z[i], own + i)) << i;
      }
      take(own, bits);
    }
  }
};

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kSupportThreads, 2)
    support_kernel(PASS_EXT_PARAMETER AcceptProblem problem, PASS_EXT_PARAMETER SupportArrays results) {
  begin_kernel(problem, results);
  constexpr int32_t kWarps = kSupportThreads / 32, kStep = 32 * kPiece;
  const int64_t width = int64_t{problem.max_depth} + 1;
  const EmittedToken emitted =
      emitted_token(problem, block_index().x / width, static_cast<int32_t>(block_index().x % width));
  int32_t* const counts = dynamic_shared<int32_t>();
  const int32_t warp = static_cast<int32_t>(warp_index());
  // The part is a whole number of steps; a row's last ones may be empty.
  const int32_t steps = ((problem.target.vocabulary + kStep - 1) / kStep + kWarps - 1) / kWarps;
  const int32_t begin = warp * steps * kStep, behind = begin + steps * kStep;
  const int32_t end = behind < problem.target.vocabulary ? behind : problem.target.vocabulary;
  const SupportPart part{emitted, begin, emitted.token < 0 ? begin : end};
  int32_t own = 0;
  part.for_each_piece([&](int32_t, unsigned bits) { own += count_set_bits(bits); });
  for (int step = 16; step > 0; step /= 2) own += shuffle_xor(own, step);
  if (lane_index() == 0) counts[warp] = own;
  sync_block();
  int32_t total = 0, place = 0;
  for (int32_t i = 0; i < kWarps; ++i) {
    if (i == warp) place = total;
    total += counts[i];
  }
  if (thread_rank() == 0) results.counts[emitted.place] = total;
  int32_t* const ids = results.ids + emitted.place * results.room;
  const int32_t listed = total <= results.room ? total : 0;
  for (int32_t i = listed + static_cast<int32_t>(thread_rank()); i < results.room; i += kSupportThreads) ids[i] = -1;
  if (listed == 0 || own == 0) return;
  part.for_each_piece([&](int32_t first, unsigned bits) {
    if (!any(bits != 0)) return;
    const int32_t count = count_set_bits(bits);
    int32_t sum = count;  // of the lanes up to this one
    for (unsigned step = 1; step < 32; step *= 2) {
      const int32_t before = shuffle_up(sum, step);
      if (lane_index() >= step) sum += before;
    }
    int32_t at = place + sum - count;
    for (; bits != 0; bits &= bits - 1) ids[at++] = first + first_set_bit(bits);
    place += shuffle(sum, 31);
  });
}

inline void launch_supports(const AcceptProblem& problem, const SupportArrays& results, Stream stream) {
  if (problem.requests == 0 || results.counts == nullptr) return;
  launch("accept (supports)", support_kernel,
         LaunchShape{{problem.requests * (int64_t{problem.max_depth} + 1)},
                     {kSupportThreads},
                     kSupportThreads / 32 * sizeof(int32_t)},
         stream, problem, results);
}

}  // namespace pass_ext::gpu
