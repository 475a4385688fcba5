// The scan of a row: the first pass over its logits. It writes two small summaries to global memory: the largest logit
// of every group of 64 tokens, and the largest logit and share of the softmax sum of every chunk of 1,024. Races, top-k
// and top-p then read only the groups that can matter. If the noise of the row's race is known and few
// blocks scan (plan_rows), the scan also draws ln first_g of every group (core/noise.h) while the logits are being
// loaded: one block would take longer for that than for the rest of the race. Sums use the processor's 2^x, within 2
// ulp; the probability of a single token never does.
#pragma once

#include <cstdint>

#include "core/distribution.h"
#include "core/noise.h"
#include "cuda/primitives.cuh"
#include "cuda/row_pieces.cuh"

namespace pass_ext::gpu {

constexpr int kChunk = 1024;                      // logits that a warp scans at once: four pieces per lane
constexpr int kGroupsPerChunk = kChunk / kGroup;  // 16
constexpr int kPieces = kChunk / kPiece / 32;     // 4
constexpr int kLanesPerGroup = kGroup / kPiece;   // 8
constexpr float kLog2E = 1.44269504f;

PASS_EXT_HOST_DEVICE int32_t chunks_of(int32_t vocabulary) { return (vocabulary + kChunk - 1) / kChunk; }

// A chunk's largest logit and sum of exp((z - largest) scale); the sum is NaN where a logit is NaN or +inf.
struct ChunkSum {
  float maximum, sum;
};

// A row's summary: maxima [groups], -inf behind the row's last group; chunks [chunks].
struct RowSummary {
  float* maxima;
  ChunkSum* chunks;
  int32_t groups;
};

// What a scan computes of a row.
struct ScanSettings {
  float scale;
  bool needs_sum;
  bool races;   // true: also ln first_g of every group, if there is memory for it
  Noise noise;  // the noise of the row's first race
};

// True if describing a row needs the softmax sum over all of it.
PASS_EXT_DEVICE bool is_sum_needed(const SamplingParameters& parameters, bool needs_mass) {
  return has_filter(parameters) ? parameters.top_p < 1.0f && parameters.top_k == 0 : needs_mass;
}

// One warp: computes the summary of one chunk. read_settings() returns the ScanSettings; it is called after the loads
// of the logits, so that both take place at the same time. If `races`, and log_firsts [groups] is not null, it gets ln
// first_g of the chunk's groups.
template <typename ReadSettings>
PASS_EXT_DEVICE void scan_chunk(const LogitRow& row, int32_t chunk, const RowSummary& summary, float* log_firsts,
                                const ReadSettings& read_settings) {
  RawPiece raw[kPieces];
  uint32_t allowed[kPieces];
  const int32_t lane = static_cast<int32_t>(lane_index());
  load_pieces(row, chunk * kChunk, raw);
#pragma unroll
  for (int k = 0; k < kPieces; ++k) allowed[k] = load_allowed(row, chunk * kChunk + (k * 32 + lane) * kPiece);
  const ScanSettings settings = read_settings();
  if (log_firsts != nullptr && settings.races) {
    const int32_t group = chunk * kGroupsPerChunk + lane;
    if (lane < kGroupsPerChunk && group < summary.groups) log_firsts[group] = log_first(settings.noise, group);
  }
  float z[kPieces][kPiece];
  bool good = true;
  float largest = -kInfinity;
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    convert(row.type, raw[k], z[k]);
    if (row.allowed != nullptr) forbid(allowed[k], z[k]);
    float piece = -kInfinity;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      good = good && z[k][i] < kInfinity;
      piece = larger(z[k][i], piece);
    }
#pragma unroll
    for (int step = kLanesPerGroup / 2; step > 0; step /= 2) piece = larger(piece, shuffle_xor(piece, step));
    const int32_t group = chunk * kGroupsPerChunk + k * (32 / kLanesPerGroup) + lane / kLanesPerGroup;
    if (lane % kLanesPerGroup == 0 && group < summary.groups) summary.maxima[group] = piece;
    largest = larger(largest, piece);
  }
#pragma unroll
  for (int step = 16; step >= kLanesPerGroup; step /= 2) largest = larger(largest, shuffle_xor(largest, step));
  float sum = 0.0f;
  if (settings.needs_sum && largest > -kInfinity) {
    const float scale = settings.scale * kLog2E;
#pragma unroll
    for (int k = 0; k < kPieces; ++k)
#pragma unroll
      for (int i = 0; i < kPiece; ++i) sum += exp2_approximate((z[k][i] - largest) * scale);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += shuffle_xor(sum, step);
  }
  good = all(good);
  if (lane == 0) summary.chunks[chunk] = {largest, good ? sum : float_of(0x7fc00000u)};
}

// The same with the type as a constant: each copy has the loads and registers of one type only.
template <typename ReadSettings>
PASS_EXT_DEVICE void scan_chunk_of_any_type(LogitRow row, int32_t chunk, const RowSummary& summary, float* log_firsts,
                                            const ReadSettings& read_settings) {
  if (row.type == LogitType::bfloat16) {
    row.type = LogitType::bfloat16;
    scan_chunk(row, chunk, summary, log_firsts, read_settings);
  } else if (row.type == LogitType::float16) {
    row.type = LogitType::float16;
    scan_chunk(row, chunk, summary, log_firsts, read_settings);
  } else {
    row.type = LogitType::float32;
    scan_chunk(row, chunk, summary, log_firsts, read_settings);
  }
}

// function(i, four neighbouring numbers of groups, from group i on) for this thread's share of the groups from `begin`,
// a multiple of four, to `end`; `kLoads` are under way at once.
template <int kLoads, typename Function>
PASS_EXT_DEVICE void for_each_four_groups(const float* maxima, int32_t begin, int32_t end, int32_t threads,
                                          const Function& function) {
#pragma unroll kLoads
  for (int32_t i = begin + static_cast<int32_t>(thread_rank()) * 4; i < end; i += threads * 4) {
    const Bytes16 four = load16(maxima + i);
    const float largest[4] = {float_of(four.word[0]), float_of(four.word[1]), float_of(four.word[2]),
                              float_of(four.word[3])};
    function(i, largest);
  }
}

// True if a piece is one aligned load, or two of float32. For others load_any is called, where the piece is needed: it
// waits for its own loads anyway.
PASS_EXT_DEVICE bool is_aligned(const LogitRow& row, int32_t first) {
  return shift_of(row) == 0 && first + kPiece <= row.vocabulary;
}

// function(first id, eight logits) for this thread's share of the pieces of `count` groups, listed in shared memory.
// Four loads of 16 bytes are under way at once: four pieces, or two of float32. More would not fit into the registers
// that callers leave, nor would these if they were kept across a call: a load that goes to local memory is waited for.
template <typename Function>
PASS_EXT_DEVICE void for_each_listed_piece(const LogitRow& row, const int32_t* groups, int32_t count,
                                           const Function& function) {
  constexpr int32_t kLoads = 4;
  const bool is_wide = row.type == LogitType::float32;
  const int32_t stride = static_cast<int32_t>(block_size().x), pieces = count * kLanesPerGroup;
  const auto first_of = [&](int32_t piece) {
    return groups[piece / kLanesPerGroup] * kGroup + piece % kLanesPerGroup * kPiece;
  };
  for (int32_t base = static_cast<int32_t>(thread_rank()); base < pieces;) {
    int32_t first[kLoads];
    bool aligned = shift_of(row) == 0;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int32_t piece = base + (is_wide ? k / 2 : k) * stride;
      first[k] = piece < pieces ? first_of(piece) : -1;
      aligned = aligned && first[k] + kPiece <= row.vocabulary;
    }
    Bytes16 raw[kLoads] = {};
    if (aligned) {
#pragma unroll
      for (int k = 0; k < kLoads; ++k)
        if (first[k] >= 0) raw[k] = load16_streaming(piece_address(row, first[k]) + (is_wide ? k % 2 * 16 : 0));
    } else {
      const RawPiece piece = load_raw(row, first[0]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        raw[0].word[i] = piece.word[i];
        raw[1].word[i] = piece.word[4 + i];
      }
    }
    const int32_t loaded = !aligned ? 1 : is_wide ? kLoads / 2 : kLoads;
    // Each piece moves to the front in turn: one copy of the code below.
#pragma unroll 1
    for (int32_t k = 0; k < loaded && base < pieces; ++k, base += stride) {
      RawPiece piece;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        piece.word[i] = raw[0].word[i];
        piece.word[4 + i] = raw[1].word[i];
      }
      const int32_t id = first_of(base);
      float z[kPiece];
      convert(row.type, piece, z);
      if (row.allowed != nullptr) forbid(load_allowed(row, id), z);
      function(id, z);
#pragma unroll
      for (int i = 0; i + 1 < kLoads; ++i) raw[i] = is_wide && i + 2 < kLoads ? raw[i + 2] : raw[i + 1];
    }
  }
}

}  // namespace pass_ext::gpu
