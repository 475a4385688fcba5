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

}  // namespace pass_ext::gpu
