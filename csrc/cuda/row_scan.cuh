// The scan of a row: the first pass over its logits. It writes two small summaries to global memory: the largest logit
// of every group of 64 tokens, and the largest logit and share of the softmax sum of every chunk of 1,024. Races, top-k
// and top-p then read only the groups that can matter. If the noise of the row's race is known and few
// blocks scan (plan_rows), the scan also draws ln first_g of every group (core/noise.h) while the logits are being
// loaded, and finds the champion of each chunk (row_champion.cuh): one block would take longer for that than for all
// the rest of the row. Sums use the processor's 2^x, within 2
// ulp; the probability of a single token never does.
#pragma once

#include <cstdint>

#include "core/distribution.h"
#include "core/noise.h"
#include "cuda/primitives.cuh"
#include "cuda/row_champion.cuh"
#include "cuda/row_pieces.cuh"

namespace pass_ext::gpu {

constexpr int kChunk = 1024;                          // logits that a warp scans at once: four pieces per lane
constexpr int kGroupsPerChunk = kChunk / kGroup;      // 16
constexpr int kPieces = kChunk / kPiece / 32;         // 4
constexpr int kLanesPerGroup = kGroup / kPiece;       // 8
constexpr int kGroupsPerPiece = 32 / kLanesPerGroup;  // of all lanes together: 4

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
  bool crowns;  // true: also the champion of every chunk, over all tokens by their weights; else there is none
  Noise noise;  // the noise of the row's first race
};

// True if describing a row needs the softmax sum over all of it.
PASS_EXT_DEVICE bool is_sum_needed(const SamplingParameters& parameters, bool needs_mass) {
  return has_filter(parameters) ? parameters.top_p < 1.0f && parameters.top_k == 0 : needs_mass;
}

// True if the tokens that a filter leaves are listed, and race without the scan's help.
PASS_EXT_DEVICE bool is_shortlisted(const SamplingParameters& parameters) {
  return parameters.top_k > 0 || parameters.top_p < 1.0f;
}

// The largest logit of a lane's piece, then of more lanes; NaN or +inf among them is seen. With `packed` two bfloat16
// at a time, which needs half the instructions.
template <bool packed>
struct Peak {
  float largest = -kInfinity;
  bool is_good = true;  // of this lane's own logits

  PASS_EXT_DEVICE void take(const RawPiece&, const float (&z)[kPiece]) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      is_good = is_good && z[i] < kInfinity;
      largest = larger(z[i], largest);
    }
  }
  PASS_EXT_DEVICE void take(const Peak& other) {
    largest = larger(largest, other.largest);
    is_good = is_good && other.is_good;
  }
  PASS_EXT_DEVICE void take_lane(int step) { largest = larger(largest, shuffle_xor(largest, step)); }
  PASS_EXT_DEVICE float value() const { return largest; }
  PASS_EXT_DEVICE bool is_good_everywhere() const { return all(is_good); }
};

template <>
struct Peak<true> {
  uint32_t pair = 0xff80ff80u;  // -inf, -inf

  PASS_EXT_DEVICE void take(const RawPiece& raw, const float (&)[kPiece]) {
    pair = larger_bfloat16s(larger_bfloat16s(raw.word[0], raw.word[1]), larger_bfloat16s(raw.word[2], raw.word[3]));
  }
  PASS_EXT_DEVICE void take(const Peak& other) { pair = larger_bfloat16s(pair, other.pair); }
  PASS_EXT_DEVICE void take_lane(int step) { pair = larger_bfloat16s(pair, shuffle_xor(pair, step)); }
  PASS_EXT_DEVICE float value() const { return larger(unpack_low<bfloat16>(pair), unpack_high<bfloat16>(pair)); }
  PASS_EXT_DEVICE bool is_good_everywhere() const {  // a NaN has come along
    return unpack_low<bfloat16>(pair) < kInfinity && unpack_high<bfloat16>(pair) < kInfinity;
  }
};

PASS_EXT_DEVICE void forbid_pairs(uint32_t allowed, RawPiece& raw) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = allowed >> 2 * i & 1u ? raw.word[i] & 0xffffu : 0xff80u;
    raw.word[i] = (allowed >> 2 * i & 2u ? raw.word[i] & 0xffff0000u : 0xff800000u) | low;
  }
}

// The token of a lane's pieces that has the highest bound. highest: the largest logit of each piece; first, log_first:
// of the chunk's group `lane`.
PASS_EXT_DEVICE LaneToken best_of_lane(int32_t chunk, const float (&z)[kPieces][kPiece],
                                       const float (&highest)[kPieces], float peak, float scale,
                                       const FirstOfGroup& first, float log_first) {
  const int32_t lane = static_cast<int32_t>(lane_index());
  const auto bound_of = [&](float logit, float log_e) {
    return logit > -kInfinity ? race_score(logit, peak, scale, log_e) : -kInfinity;
  };
  LaneToken token{-kInfinity, 0, {}, -kInfinity};
  float bound = -kInfinity, log_e = 0.0f;
  int piece = 0;
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    const float log_e_k = shuffle(log_first, k * kGroupsPerPiece + lane / kLanesPerGroup);
    const float bound_k = bound_of(highest[k], log_e_k);
    token.others = larger(token.others, bound_k > bound ? bound : bound_k);
    if (bound_k > bound) {
      bound = bound_k;
      log_e = log_e_k;
      piece = k;
    }
  }
  float behind = -kInfinity;
  int place = 0;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    float logit = z[0][i];
#pragma unroll
    for (int k = 1; k < kPieces; ++k) logit = piece == k ? z[k][i] : logit;  // an index would put z into local memory
    behind = larger(behind, logit > token.logit ? token.logit : logit);
    if (logit > token.logit) {
      token.logit = logit;
      place = i;
    }
  }
  token.id = chunk * kChunk + (piece * 32 + lane) * kPiece + place;
  token.others = larger(token.others, bound_of(behind, log_e));
  token.first.value = shuffle(first.value, piece * kGroupsPerPiece + lane / kLanesPerGroup);
  token.first.leader = shuffle(first.leader, piece * kGroupsPerPiece + lane / kLanesPerGroup);
  return token;
}

// One warp: computes the summary of one chunk. read_settings() returns the ScanSettings; it is called after the loads
// of the logits, so that both take place at the same time. If `races`, and `race` has memory, it gets what the race
// needs of the chunk.
template <bool packed, typename ReadSettings>
PASS_EXT_DEVICE void scan_chunk(const LogitRow& row, int32_t chunk, const RowSummary& summary, const RowRace& race,
                                const ReadSettings& read_settings) {
  RawPiece raw[kPieces];
  uint32_t allowed[kPieces];
  const int32_t lane = static_cast<int32_t>(lane_index());
  load_pieces(row, chunk * kChunk, raw);
#pragma unroll
  for (int k = 0; k < kPieces; ++k) allowed[k] = load_allowed(row, chunk * kChunk + (k * 32 + lane) * kPiece);
  const ScanSettings settings = read_settings();
  const bool races = race.log_firsts != nullptr && settings.races;
  FirstOfGroup first{};
  float log_first = 0.0f;  // of the chunk's group `lane`, if there is one
  if (races) {
    const int32_t group = chunk * kGroupsPerChunk + lane;
    first = first_of_group(settings.noise, group);
    log_first = logarithm(first.value);
    if (lane < kGroupsPerChunk && group < summary.groups) race.log_firsts[group] = log_first;
  }
  float z[kPieces][kPiece], highest[kPieces];  // of each piece
  Peak<packed> peak;
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    if (packed && row.allowed != nullptr) forbid_pairs(allowed[k], raw[k]);
    convert(row.type, raw[k], z[k]);
    if (!packed && row.allowed != nullptr) forbid(allowed[k], z[k]);
    Peak<packed> piece;
    piece.take(raw[k], z[k]);
    highest[k] = piece.value();
#pragma unroll
    for (int step = kLanesPerGroup / 2; step > 0; step /= 2) piece.take_lane(step);
    const int32_t group = chunk * kGroupsPerChunk + k * kGroupsPerPiece + lane / kLanesPerGroup;
    if (lane % kLanesPerGroup == 0 && group < summary.groups) summary.maxima[group] = piece.value();
    peak.take(piece);
  }
#pragma unroll
  for (int step = 16; step >= kLanesPerGroup; step /= 2) peak.take_lane(step);
  const float largest = peak.value();
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
  const bool good = peak.is_good_everywhere();
  if (lane == 0) summary.chunks[chunk] = {largest, good ? sum : float_of(0x7fc00000u)};
  if (!races) return;
  if (!settings.crowns || !good) {
    if (lane == 0) race.champions[chunk] = {-kInfinity, 0.0f, -1, 0.0f};
    return;
  }
  const LaneToken token = best_of_lane(chunk, z, highest, largest, settings.scale, first, log_first);
  crown_champion(token, settings.scale, largest, settings.noise, race.champions + chunk);
}

// The same with the type as a constant: each copy has the loads and registers of one type only.
template <typename ReadSettings>
PASS_EXT_DEVICE void scan_chunk_of_any_type(LogitRow row, int32_t chunk, const RowSummary& summary, const RowRace& race,
                                            const ReadSettings& read_settings) {
  if (row.type == LogitType::bfloat16) {
    row.type = LogitType::bfloat16;
    scan_chunk<true>(row, chunk, summary, race, read_settings);
  } else if (row.type == LogitType::float16) {
    row.type = LogitType::float16;
    scan_chunk<false>(row, chunk, summary, race, read_settings);
  } else {
    row.type = LogitType::float32;
    scan_chunk<false>(row, chunk, summary, race, read_settings);
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
