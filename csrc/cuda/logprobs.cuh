// Log probabilities of the tokens that an accept step emitted, on the GPU: a block for each token reads its row again,
// from the L2 cache if it is there. The formulas: core/logprobs.h. Only the rows on the accepted paths are read, and
// only for sums that the walk did not need; a block without such a sum and without alternatives reads one logit.
#pragma once

#include <cstdint>

#include "core/logprobs.h"
#include "cuda/block.cuh"
#include "cuda/primitives.cuh"
#include "cuda/row_pieces.cuh"

namespace pass_ext::gpu {

constexpr unsigned kLogprobThreads = 512;

// The work of one block on the row of an emitted token. All threads call every method together. A thread owns the
// pieces thread_rank() + k threads of a row.
struct LogprobBlock {
  BlockScratch& scratch;
  const EmittedToken& emitted;

  // take(first id, eight logits) for the pieces of a thread.
  template <typename Take>
  PASS_EXT_DEVICE void for_each_piece(const LogitRow& row, const Take& take) const {
    for (int32_t first = static_cast<int32_t>(thread_rank()) * kPiece; first < row.vocabulary;
         first += static_cast<int32_t>(kLogprobThreads) * kPiece) {
      float z[kPiece];
      load_piece(row, first, z);
      take(first, z);
    }
  }

  // The best of this thread's tokens by their unmasked logits.
  PASS_EXT_DEVICE Best best_of_thread() const {
    Best best{-kInfinity, -1};
    for_each_piece(emitted.unmasked, [&](int32_t first, const float (&z)[kPiece]) {
      for (int i = 0; i < kPiece; ++i)
        if (is_better({z[i], first + i}, best)) best = {z[i], first + i};
    });
    return best;
  }

  // The warp of the thread that owns `last`: the best of that thread's tokens behind `last`.
  PASS_EXT_DEVICE Best best_behind(const Best& last, int32_t owner) const {
    const LogitRow& row = emitted.unmasked;
    const int32_t stride = static_cast<int32_t>(kLogprobThreads) * kPiece;
    Best best{-kInfinity, -1};
    for (int32_t first = owner * kPiece + static_cast<int32_t>(lane_index()) * stride; first < row.vocabulary;
         first += 32 * stride) {
      float z[kPiece];
      load_piece(row, first, z);
      for (int i = 0; i < kPiece; ++i) {
        const Best token{z[i], first + i};
        if (is_better(last, token) && is_better(token, best)) best = token;
      }
    }
    return best_of_warp(best);
  }

  // Sum over the support of exp((z - maximum) scale); NaN if a logit is NaN or +inf.
  PASS_EXT_DEVICE double mass(const LogitRow& row, const Distribution& distribution) const {
    const float scale = distribution.scale * kLog2E;
    double mass = 0.0;
    for_each_piece(row, [&](int32_t first, const float (&z)[kPiece]) {
      float sum = 0.0f;
      for (int i = 0; i < kPiece; ++i) {
        const bool counts = in_support(distribution, z[i], first + i) || !(z[i] < kInfinity);
        sum += counts ? exp2_approximate((z[i] - distribution.maximum) * scale) : 0.0f;
      }
      mass += sum;
    });
    return sum_of_block(scratch, mass);
  }
};

PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kLogprobThreads, 2)
    logprobs_kernel(PASS_EXT_PARAMETER AcceptProblem problem, PASS_EXT_PARAMETER LogprobArrays results) {
  begin_kernel(problem, results);
  const int64_t width = int64_t{problem.max_depth} + 1;
  const EmittedToken emitted =
      emitted_token(problem, block_index().x / width, static_cast<int32_t>(block_index().x % width));
  const bool is_leader = thread_rank() == 0, is_masked = emitted.row.allowed != nullptr;
  const LogprobBlock block{*dynamic_shared<BlockScratch>(), emitted};
  int32_t filled = 0;
  if (emitted.token < 0) {
    if (is_leader) results.raw[emitted.place] = results.processed[emitted.place] = -kInfinity;
  } else {
    Distribution processed = emitted.processed, raw = raw_distribution(processed.maximum);
    Best own{-kInfinity, -1};  // of this thread's tokens behind those that are written
    if (is_masked || results.count > 0) {
      own = block.best_of_thread();
      raw.maximum = best_of_block(block.scratch, own).score;
    }
    if (!is_masked && is_softmax(processed) && has_mass(processed))
      raw = processed;
    else
      set_mass(raw, block.mass(emitted.unmasked, raw));
    if (!has_mass(processed)) {
      if (!is_masked && is_softmax(processed))
        processed = raw;
      else
        set_mass(processed, block.mass(emitted.row, processed));
    }
    if (is_leader) {
      const float log_p = log_probability(raw, emitted.unmasked, emitted.token);
      results.raw[emitted.place] = has_mass(raw) ? log_p : float_of(0x7fc00000u);
      results.processed[emitted.place] = log_probability(processed, emitted.row, emitted.token);
    }
    for (; filled < results.count && has_mass(raw); ++filled) {
      const Best best = best_of_block(block.scratch, own);
      if (best.id < 0) break;
      const int32_t owner = best.id / kPiece % static_cast<int32_t>(kLogprobThreads);
      if (static_cast<int32_t>(warp_index()) == owner / 32) {
        const Best next = block.best_behind(best, owner);
        if (static_cast<int32_t>(lane_index()) == owner % 32) own = next;
      }
      if (!is_leader) continue;
      const int64_t place = emitted.place * results.count + filled;
      results.top_tokens[place] = best.id;
      results.top_raw[place] = log_probability(raw, emitted.unmasked, best.id);
      results.top_processed[place] = log_probability(processed, emitted.row, best.id);
    }
  }
  for (int32_t i = filled + static_cast<int32_t>(thread_rank()); i < results.count; i += kLogprobThreads) {
    const int64_t place = emitted.place * results.count + i;
    results.top_tokens[place] = -1;
    results.top_raw[place] = results.top_processed[place] = -kInfinity;
  }
}

inline void launch_logprobs(const AcceptProblem& problem, const LogprobArrays& results, Stream stream) {
  if (problem.requests == 0 || results.raw == nullptr) return;
  launch("accept (log probabilities)", logprobs_kernel,
         LaunchShape{{problem.requests * (int64_t{problem.max_depth} + 1)}, {kLogprobThreads}, sizeof(BlockScratch)},
         stream, problem, results);
}

}  // namespace pass_ext::gpu
