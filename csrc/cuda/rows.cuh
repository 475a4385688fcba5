// The GPU's way to work on rows of logits, one block for a row: describe it as a law, sum over it, draw from it. It is
// the `Rows` of core/accept.h and core/draft.h. A first pass leaves two small summaries of a row in global memory: the
// largest logit of every group of 64 tokens, and of every chunk of 1,024 its share of the softmax sum. Races, top-k
// and top-p then look only at the groups that can matter.
// Where rows are few, scan_rows_kernel makes these summaries for all of them beforehand, on the whole GPU; else a block
// makes them for the rows that it comes to. Sums are added in an order that does not depend on which of the two.
// Called by cuda/draft.cuh and cuda/accept.cuh.
#pragma once

#include <cstdint>

#include "core/accept.h"
#include "core/draft.h"
#include "core/law.h"
#include "core/noise.h"
#include "cuda/block.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kPiece = 8;                         // logits that a lane loads at once
constexpr int kChunk = 1024;                      // logits of one warp at once: four pieces a lane
constexpr int kGroupsPerChunk = kChunk / kGroup;  // 16
constexpr int kPieces = kChunk / kPiece / 32;     // 4
constexpr int kLanesPerGroup = kGroup / kPiece;   // 8
constexpr float kLowestExponent = -86.0f;         // e^-86 for -inf: no sum notices

PASS_EXT_HOST_DEVICE int32_t chunks_of(int32_t vocabulary) { return (vocabulary + kChunk - 1) / kChunk; }

// A chunk's largest logit and sum of exp((z - largest) scale); the sum is NaN where a logit is NaN or +inf.
struct ChunkSum {
  float maximum, sum;
};

// What is known of a row: [groups] and [chunks].
struct RowSummary {
  float* maxima;
  ChunkSum* chunks;
};

// Global memory of one problem. `rows`: summaries are kept for so many rows, made beforehand; 0: two per block, made on
// the way.
struct RowsWorkspace {
  float* maxima;     // [rows or 2 blocks, groups]
  ChunkSum* chunks;  // [rows or 2 blocks, chunks]
  float* bounds;     // [blocks, groups]
  float* cuts;       // [nodes]
  Judge* judges;     // [nodes]
  int32_t* divided;  // one: AcceptProblem::divided
  int64_t rows;
  int32_t groups, chunks_per_row;
};

// How much of it a problem needs. Few rows: all are summarised beforehand.
struct RowsPlan {
  int64_t rows, blocks, nodes;
  int32_t groups, chunks_per_row;

  int64_t summaries() const { return rows > 0 ? rows : 2 * blocks; }
  int64_t bytes() const {
    return nodes * static_cast<int64_t>(sizeof(Judge)) +
           summaries() * chunks_per_row * static_cast<int64_t>(sizeof(ChunkSum)) +
           ((summaries() + blocks) * groups + nodes + 1) * static_cast<int64_t>(sizeof(float));
  }
  RowsWorkspace carve(void* memory) const {
    RowsWorkspace workspace{};
    workspace.judges = static_cast<Judge*>(memory);
    workspace.chunks = reinterpret_cast<ChunkSum*>(workspace.judges + nodes);
    workspace.maxima = reinterpret_cast<float*>(workspace.chunks + summaries() * chunks_per_row);
    workspace.bounds = workspace.maxima + summaries() * groups;
    workspace.cuts = workspace.bounds + blocks * groups;
    workspace.divided = reinterpret_cast<int32_t*>(workspace.cuts + nodes);
    workspace.rows = rows;
    workspace.groups = groups;
    workspace.chunks_per_row = chunks_per_row;
    return workspace;
  }
};

// `rows`: what might have to be summarised; `nodes`: 0 where none are judged.
inline RowsPlan plan_rows(int64_t rows, int64_t blocks, int64_t nodes, int32_t vocabulary, int multiprocessors) {
  // A block reads a row about as fast as the whole GPU reads one row per multiprocessor, and it comes to a few of them.
  const bool beforehand = rows <= 3 * static_cast<int64_t>(multiprocessors);
  return {beforehand ? rows : 0, blocks, nodes, groups_of(vocabulary), chunks_of(vocabulary)};
}

// Threads for a block that works on one row.
inline unsigned threads_for(int32_t vocabulary) {
  return vocabulary <= 4 * kChunk ? 128 : vocabulary <= 16 * kChunk ? 256 : 512;
}

constexpr unsigned kScanWarps = 4;

PASS_EXT_DEVICE RowSummary summary_of(const RowsWorkspace& workspace, int64_t index) {
  return {workspace.maxima + index * workspace.groups, workspace.chunks + index * workspace.chunks_per_row};
}

// Eight logits from `first` on, a multiple of 8; -inf for what is not allowed or behind the end.
PASS_EXT_DEVICE void load_piece(const LogitRow& row, int32_t first, float (&z)[kPiece]) {
  const bool whole = first + kPiece <= row.vocabulary;
  const int64_t element = row.type == LogitType::float32 ? 4 : 2;
  const char* from = static_cast<const char*>(row.logits) + first * element;
  if (whole && reinterpret_cast<uintptr_t>(row.logits) % 16 == 0) {
    const Bytes16 low = load16_streaming(from);
    if (row.type == LogitType::float32) {
      const Bytes16 high = load16_streaming(from + 16);
      for (int i = 0; i < 4; ++i) {
        z[i] = float_of(low.word[i]);
        z[4 + i] = float_of(high.word[i]);
      }
    } else if (row.type == LogitType::bfloat16) {
      for (int i = 0; i < 4; ++i) {
        z[2 * i] = unpack_low<bfloat16>(low.word[i]);
        z[2 * i + 1] = unpack_high<bfloat16>(low.word[i]);
      }
    } else {
      for (int i = 0; i < 4; ++i) {
        z[2 * i] = unpack_low<float16>(low.word[i]);
        z[2 * i + 1] = unpack_high<float16>(low.word[i]);
      }
    }
  } else {
    for (int i = 0; i < kPiece; ++i)
      z[i] = first + i < row.vocabulary ? load_logit(row.logits, row.type, first + i) : -kInfinity;
  }
  if (row.allowed == nullptr || first >= row.vocabulary) return;
  const uint32_t bits = row.allowed[first / 32] >> first % 32;
  for (int i = 0; i < kPiece; ++i)
    if ((bits >> i & 1u) == 0) z[i] = -kInfinity;
}

// One warp: the summary of one chunk. `needs_sum` false leaves the sum 0.
PASS_EXT_DEVICE void scan_chunk(const LogitRow& row, int32_t chunk, float scale, bool needs_sum,
                                const RowSummary& summary) {
  float z[kPieces][kPiece];
  const int32_t lane = static_cast<int32_t>(lane_index());
  for (int k = 0; k < kPieces; ++k) load_piece(row, chunk * kChunk + (k * 32 + lane) * kPiece, z[k]);
  bool good = true;
  float largest = -kInfinity;
  for (int k = 0; k < kPieces; ++k) {
    float piece = -kInfinity;
    for (int i = 0; i < kPiece; ++i) {
      good = good && z[k][i] < kInfinity;
      piece = maximum(z[k][i], piece);
    }
    for (int step = kLanesPerGroup / 2; step > 0; step /= 2) piece = maximum(piece, shuffle_xor(piece, step));
    const int32_t group = chunk * kGroupsPerChunk + k * (32 / kLanesPerGroup) + lane / kLanesPerGroup;
    if (lane % kLanesPerGroup == 0 && group < groups_of(row.vocabulary)) summary.maxima[group] = piece;
    largest = maximum(largest, piece);
  }
  for (int step = 16; step >= kLanesPerGroup; step /= 2) largest = maximum(largest, shuffle_xor(largest, step));
  float sum = 0.0f;
  if (needs_sum && largest > -kInfinity) {
    for (int k = 0; k < kPieces; ++k)
      for (int i = 0; i < kPiece; ++i)
        sum += exponential_in_range(maximum((z[k][i] - largest) * scale, kLowestExponent));
    for (int step = 16; step > 0; step /= 2) sum += shuffle_xor(sum, step);
  }
  good = all(good);
  if (lane == 0) summary.chunks[chunk] = {largest, good ? sum : float_of(0x7fc00000u)};
}

// Makes the summaries of all rows, a warp for a chunk. source.find(index, row, scale): whether there is such a row.
template <typename Source>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(32 * kScanWarps)
    scan_rows_kernel(Source source, RowsWorkspace workspace, bool needs_sum) {
  const int32_t chunk = static_cast<int32_t>(block_index().x * kScanWarps + warp_index());
  LogitRow row;
  float scale;
  if (chunk >= workspace.chunks_per_row || !source.find(block_index().y, row, scale)) return;
  scan_chunk(row, chunk, scale, needs_sum, summary_of(workspace, block_index().y));
}

template <typename Source>
void launch_scan_rows(const char* name, const Source& source, const RowsWorkspace& workspace, bool needs_sum,
                      Stream stream) {
  const unsigned blocks = (static_cast<unsigned>(workspace.chunks_per_row) + kScanWarps - 1) / kScanWarps;
  launch(name, scan_rows_kernel<Source>,
         LaunchShape{{blocks, static_cast<unsigned>(workspace.rows)}, {32 * kScanWarps}}, stream, source, workspace,
         needs_sum);
}

// Deleted children of the node being judged, in shared memory.
struct BlockShared {
  BlockScratch scratch;
  int32_t removed_count;
  int32_t removed_ids[kMostNodes];
  float removed_cuts[kMostNodes];
};

class BlockRows {
 public:
  PASS_EXT_DEVICE BlockRows(const RowsWorkspace& workspace, BlockShared& shared)
      : workspace_(workspace), shared_(shared), scratch_(shared.scratch) {}

  PASS_EXT_DEVICE bool is_leader() const { return thread_rank() == 0; }

  template <typename Predicate>
  PASS_EXT_DEVICE int32_t first_node(int32_t from, int32_t count, const Predicate& predicate) {
    int32_t first = INT32_MAX;
    for (int32_t i = from + static_cast<int32_t>(thread_rank()); i < count; i += static_cast<int32_t>(block_size().x))
      if (predicate(i)) {
        first = i;
        break;
      }
    first = smallest_of_block(scratch_, first);
    return first == INT32_MAX ? -1 : first;
  }

  // The request's part of the workspace.
  PASS_EXT_DEVICE void begin(int64_t first_node) {
    cuts_ = workspace_.cuts + first_node;
    judges_ = workspace_.judges + first_node;
  }
  PASS_EXT_DEVICE void reset_cuts(int32_t nodes) {
    for (unsigned i = thread_rank(); i < static_cast<unsigned>(nodes); i += block_size().x) cuts_[i] = kNotCut;
    sync_block();
  }
  PASS_EXT_DEVICE float cut(int32_t node) const { return cuts_[node]; }
  PASS_EXT_DEVICE void set_cut(int32_t node, float value) {
    sync_block();
    if (is_leader()) cuts_[node] = value;
    sync_block();
  }
  PASS_EXT_DEVICE void save(int32_t node, const Judge& judge) {
    sync_block();
    if (is_leader()) judges_[node] = judge;
    sync_block();
  }
  PASS_EXT_DEVICE Judge saved(int32_t node) const { return judges_[node]; }

  PASS_EXT_DEVICE_CALL Law describe(const LogitRow& row, const LawParameters& parameters, bool needs_mass) {
    const bool filtered = has_filter(parameters);
    const bool total = filtered ? parameters.top_p < 1.0f && parameters.top_k == 0 : needs_mass;
    const RowSummary summary = summary_of_row(row, parameters.scale, total);
    Law law{-kInfinity, parameters.scale, -kInfinity, -1, 0.0f, 0.0f, 0};
    float largest = -kInfinity, bad = 0.0f;
    for (int32_t i = first_index(); i < workspace_.chunks_per_row; i += stride()) {
      const ChunkSum chunk = summary.chunks[i];
      largest = maximum(chunk.maximum, largest);
      if (!(chunk.sum == chunk.sum)) bad = 1.0f;
    }
    law.maximum = best_of_block(scratch_, {largest, 0}).score;
    if (best_of_block(scratch_, {bad, 0}).score > 0.0f)
      law.status = kBadLogits;
    else if (law.maximum == -kInfinity)
      law.status = kEmptySupport;
    if (law.status != 0) return law;
    if (filtered) {
      if (parameters.top_k > 0) cut_top_k(row, summary, parameters.top_k, law);
      if (parameters.top_p < 1.0f)
        cut_top_p(row, summary, parameters.top_p, total ? total_mass(summary, law) : mass_of(row, summary, law), law);
      if (parameters.min_p > 0.0f) cut_at_floor(law, parameters.min_p);
      if (needs_mass) set_mass(law, mass_of(row, summary, law));
    } else if (needs_mass) {
      set_mass(law, total_mass(summary, law));
    }
    return law;
  }

  PASS_EXT_DEVICE float logit(const LogitRow& row, int32_t id) const { return logit_at(row, id); }

  PASS_EXT_DEVICE_CALL double entropy(const Judge& judge) {
    double moment = 0.0;
    for_each_piece(judge.p_row, [&](int32_t first, const float (&z)[kPiece]) {
      float sum = 0.0f;
      for (int i = 0; i < kPiece; ++i)
        if (in_support(judge.p, z[i], first + i)) {
          const float exponent = maximum(log_weight(judge.p, z[i]), -100.0f);
          sum += exponential(exponent) * exponent;
        }
      moment += sum;
    });
    moment = sum_of_block(scratch_, moment);
    return judge.p.log_mass - moment * judge.p.inverse_mass;
  }

  PASS_EXT_DEVICE_CALL ResidualSums residual_sums(const Judge& judge, const AcceptRequest& request) {
    collect_removed(judge, request);
    const float beta = static_cast<float>(judge.beta);
    double weights = 0.0, remaining = 0.0;
    for_each_pair(judge, [&](int32_t first, float (&p)[kPiece], float (&q)[kPiece]) {
      float weight[kPiece];
      for (int i = 0; i < kPiece; ++i) weight[i] = residual_weight(p[i], q[i], beta);
      for_each_removed(first, kPiece, [&](int32_t i, float cut) {
        weight[i] = cut == kInfinity ? 0.0f : residual_weight(p[i], q[i], cut);
        q[i] = 0.0f;
      });
      float weight_sum = 0.0f, q_sum = 0.0f;
      for (int i = 0; i < kPiece; ++i) {
        weight_sum += weight[i];
        q_sum += q[i];
      }
      weights += weight_sum;
      remaining += q_sum;
    });
    weights = sum_of_block(scratch_, weights);
    return {weights, sum_of_block(scratch_, remaining)};
  }

  PASS_EXT_DEVICE_CALL void overlap_sums(const Judge& judge, const float* inverse_rho, double* sums) {
    for (int k = 0; k < kOverlaps; ++k) sums[k] = 0.0;
    for_each_pair(judge, [&](int32_t, float (&p)[kPiece], float (&q)[kPiece]) {
      for (int k = 0; k < kOverlaps; ++k) {
        float sum = 0.0f;
        for (int i = 0; i < kPiece; ++i) sum += kseq_overlap(p[i], q[i], inverse_rho[k]);
        sums[k] += sum;
      }
    });
    for (int k = 0; k < kOverlaps; ++k) sums[k] = sum_of_block(scratch_, sums[k]);
  }

  PASS_EXT_DEVICE_CALL int32_t draw(const Judge& judge, const Weight& weight, const AcceptRequest& request,
                                    bool rejected, const Noise& noise) {
    const RowSummary summary = summary_of_row(judge.p_row, judge.p.scale, false);
    if (rejected) collect_removed(judge, request);
    const bool is_plain = weight.kind == Weight::plain;
    bound_groups(summary, judge.p, &noise, is_plain ? 0.0f : -judge.p.log_mass);
    const auto score = [&](int32_t id, float log_e) {
      const float z = logit_at(judge.p_row, id);
      if (!in_support(judge.p, z, id)) return -kInfinity;
      float cut = kNotCut;
      if (rejected) for_each_removed(id, 1, [&](int32_t, float value) { cut = value; });
      if (cut == kInfinity) return -kInfinity;
      if (is_plain) return race_score(z, judge.p.maximum, judge.p.scale, log_e);
      const float p = probability(judge.p, z, id);
      const float q = judge.has_q ? probability(judge.q, logit_at(judge.q_row, id), id) : 0.0f;
      const float left = cut != kNotCut                ? residual_weight(p, q, cut)
                         : weight.kind == Weight::kseq ? kseq_weight(p, q, weight.first, weight.second)
                                                       : residual_weight(p, q, weight.first);
      return left < 0x1p-126f ? -kInfinity : logarithm(left) - log_e;
    };
    return next_best(judge.p_row, &noise, {kInfinity, -1}, score).id;
  }

  PASS_EXT_DEVICE_CALL void best(const LogitRow& row, const Law& law, const Noise* noise, int32_t count,
                                 int64_t* tokens, float* logprobs) {
    const RowSummary summary = summary_of_row(row, law.scale, false);
    bound_groups(summary, law, noise, 0.0f);
    const auto score = [&](int32_t id, float log_e) {
      const float z = logit_at(row, id);
      return in_support(law, z, id) ? race_score(z, law.maximum, law.scale, log_e) : -kInfinity;
    };
    Best last{kInfinity, -1};
    int32_t found = 0;
    for (; found < count; ++found) {
      last = next_best(row, noise, last, score);
      if (last.id < 0) break;
      if (is_leader()) {
        tokens[found] = last.id;
        logprobs[found] = log_weight(law, logit_at(row, last.id)) - law.log_mass;
      }
    }
    fill(tokens, logprobs, found, count);
  }

  PASS_EXT_DEVICE void fill(int64_t* tokens, float* logprobs, int32_t begin, int32_t end) {
    for (int32_t i = begin + first_index(); i < end; i += stride()) {
      tokens[i] = -1;
      logprobs[i] = -kInfinity;
    }
  }

  PASS_EXT_DEVICE void concentrate(float* logprobs, int32_t count, bool everywhere) {
    sync_block();
    for (int32_t i = first_index(); i < count; i += stride()) logprobs[i] = i == 0 || everywhere ? 0.0f : -kInfinity;
  }

 private:
  PASS_EXT_DEVICE int32_t first_index() const { return static_cast<int32_t>(thread_rank()); }
  PASS_EXT_DEVICE int32_t stride() const { return static_cast<int32_t>(block_size().x); }
  PASS_EXT_DEVICE float* bounds() const {
    return workspace_.bounds + static_cast<int64_t>(block_index().x) * workspace_.groups;
  }

  // A row's summary: made beforehand, or kept since it was last needed, or made now.
  PASS_EXT_DEVICE_CALL RowSummary summary_of_row(const LogitRow& row, float scale, bool needs_sum) {
    if (workspace_.rows > 0) return summary_of(workspace_, row.slot);
    const int64_t first = static_cast<int64_t>(block_index().x) * 2;
    for (int i = 0; i < 2; ++i)
      if (kept_slot_[i] == row.slot && (kept_sum_[i] || !needs_sum)) return summary_of(workspace_, first + i);
    const int place = next_kept_;
    next_kept_ ^= 1;
    kept_slot_[place] = row.slot;
    kept_sum_[place] = needs_sum;
    const RowSummary summary = summary_of(workspace_, first + place);
    sync_block();
    for (int32_t chunk = static_cast<int32_t>(warp_index()); chunk < workspace_.chunks_per_row;
         chunk += static_cast<int32_t>(warps_in_block()))
      scan_chunk(row, chunk, scale, needs_sum, summary);
    sync_block();
    return summary;
  }

  // function(first id, eight logits), each piece by one lane.
  template <typename Function>
  PASS_EXT_DEVICE void for_each_piece(const LogitRow& row, const Function& function) {
    for (int32_t first = first_index() * kPiece; first < row.vocabulary; first += stride() * kPiece) {
      float z[kPiece];
      load_piece(row, first, z);
      function(first, z);
    }
  }

  template <typename Function>
  PASS_EXT_DEVICE void for_each_pair(const Judge& judge, const Function& function) {
    for_each_piece(judge.p_row, [&](int32_t first, const float (&z)[kPiece]) {
      float p[kPiece], q[kPiece];
      load_piece(judge.q_row, first, q);
      for (int i = 0; i < kPiece; ++i) {
        p[i] = probability(judge.p, z[i], first + i);
        q[i] = probability(judge.q, q[i], first + i);
      }
      function(first, p, q);
    });
  }

  // function(first id, piece) for the pieces of groups whose largest logit is at least `floor`, each by one lane.
  template <typename Function>
  PASS_EXT_DEVICE void for_each_high_piece(const LogitRow& row, const RowSummary& summary, float floor,
                                           const Function& function) {
    for (int32_t first = first_index() * kPiece; first < row.vocabulary; first += stride() * kPiece) {
      if (summary.maxima[first / kGroup] < floor) continue;
      float z[kPiece];
      load_piece(row, first, z);
      function(first, z);
    }
  }

  PASS_EXT_DEVICE double total_mass(const RowSummary& summary, const Law& law) {
    double mass = 0.0;
    for (int32_t i = first_index(); i < workspace_.chunks_per_row; i += stride()) {
      const ChunkSum chunk = summary.chunks[i];
      if (chunk.maximum > -kInfinity) mass += chunk.sum * exponential(log_weight(law, chunk.maximum));
    }
    return sum_of_block(scratch_, mass);
  }

  PASS_EXT_DEVICE_CALL double mass_of(const LogitRow& row, const RowSummary& summary, const Law& law) {
    double mass = 0.0;
    for_each_high_piece(row, summary, law.cut, [&](int32_t first, const float (&z)[kPiece]) {
      float sum = 0.0f;
      for (int i = 0; i < kPiece; ++i)
        if (in_support(law, z[i], first + i)) sum += exponential(log_weight(law, z[i]));
      mass += sum;
    });
    return sum_of_block(scratch_, mass);
  }

  // The r-th lowest id among the tokens of the support whose logit is `tied`; the last of them where they are fewer.
  PASS_EXT_DEVICE_CALL int32_t select_tie(const LogitRow& row, const RowSummary& summary, const Law& law, float tied,
                                          unsigned long long rank) {
    const auto ties = [&](const auto& take) {
      for_each_high_piece(row, summary, tied, [&](int32_t first, const float (&z)[kPiece]) {
        for (int i = 0; i < kPiece; ++i)
          if (z[i] == tied && in_support(law, z[i], first + i)) take(~static_cast<uint32_t>(first + i), 1ull);
      });
    };
    return static_cast<int32_t>(~select_key(scratch_, rank, ~static_cast<uint32_t>(row.vocabulary - 1), ~0u, ties).key);
  }

  PASS_EXT_DEVICE_CALL void cut_top_k(const LogitRow& row, const RowSummary& summary, int32_t top_k, Law& law) {
    // k groups have a largest logit that is at least the k-th largest of these: no token below it is among the top k.
    const uint32_t highest = ordered_bits(law.maximum);
    float floor = law.maximum;
    if (top_k > 1) floor = top_k <= workspace_.groups ? select_group_maximum(summary, top_k, highest) : -kInfinity;
    double count = 0.0;
    for_each_high_piece(row, summary, floor, [&](int32_t, const float (&z)[kPiece]) {
      for (int i = 0; i < kPiece; ++i) count += z[i] >= floor && z[i] > -kInfinity;
    });
    if (sum_of_block(scratch_, count) < top_k) return;
    const Law whole = law;
    Selected selected{highest, 0};
    if (top_k > 1)
      selected = select_key(scratch_, top_k, ordered_bits(floor), highest, [&](const auto& take) {
        for_each_high_piece(row, summary, floor, [&](int32_t, const float (&z)[kPiece]) {
          for (int i = 0; i < kPiece; ++i)
            if (z[i] >= floor && z[i] > -kInfinity) take(ordered_bits(z[i]), 1ull);
        });
      });
    law.cut = float_of_ordered(selected.key);
    law.tie = select_tie(row, summary, whole, law.cut, top_k - selected.before);
  }

  // The k-th largest of the groups' largest logits.
  PASS_EXT_DEVICE float select_group_maximum(const RowSummary& summary, int32_t k, uint32_t highest) {
    float smallest = kInfinity;
    for (int32_t i = first_index(); i < workspace_.groups; i += stride())
      smallest = minimum(summary.maxima[i], smallest);
    smallest = -best_of_block(scratch_, {-smallest, 0}).score;
    return float_of_ordered(select_key(scratch_, k, ordered_bits(smallest), highest, [&](const auto& take) {
                              for (int32_t i = first_index(); i < workspace_.groups; i += stride())
                                take(ordered_bits(summary.maxima[i]), 1ull);
                            }).key);
  }

  PASS_EXT_DEVICE_CALL void cut_top_p(const LogitRow& row, const RowSummary& summary, float top_p, double mass,
                                      Law& law) {
    const unsigned long long wanted = mass_to_reach(top_p, mass) > 0 ? mass_to_reach(top_p, mass) : 1;
    // Tokens so improbable that even the whole vocabulary of them weighs less than what top-p leaves out.
    const float spare = static_cast<float>((1.0 - static_cast<double>(top_p)) * mass / row.vocabulary * 0.99);
    const float floor = minimum(law.maximum + logarithm(maximum(spare, 0x1p-60f)) / law.scale, law.maximum);
    const Law whole = law;
    const uint32_t highest = ordered_bits(law.maximum);
    const Selected selected = select_key(scratch_, wanted, ordered_bits(floor), highest, [&](const auto& take) {
      for_each_high_piece(row, summary, maximum(floor, whole.cut), [&](int32_t first, const float (&z)[kPiece]) {
        for (int i = 0; i < kPiece; ++i)
          if (z[i] >= floor && in_support(whole, z[i], first + i))
            take(ordered_bits(z[i]), integer_mass(exponential(log_weight(whole, z[i]))));
      });
    });
    law.cut = float_of_ordered(selected.key);
    const unsigned long long each = integer_mass(exponential(log_weight(whole, law.cut)));
    const unsigned long long missing = wanted > selected.before ? wanted - selected.before : 1;
    law.tie = select_tie(row, summary, whole, law.cut, each > 0 ? (missing + each - 1) / each : 1);
  }

  PASS_EXT_DEVICE_CALL void collect_removed(const Judge& judge, const AcceptRequest& request) {
    sync_block();
    if (is_leader()) shared_.removed_count = 0;
    sync_block();
    for (int32_t i = judge.node + 1 + first_index(); i < request.nodes; i += stride())
      if (request.parent(i) == judge.node && cuts_[i] != kNotCut) {
        const int32_t place = atomic_add(&shared_.removed_count, 1);
        shared_.removed_ids[place] = static_cast<int32_t>(request.token(i));
        shared_.removed_cuts[place] = cuts_[i];
      }
    sync_block();
  }

  // function(index from `first` on, cut) for the removed ids in [first, first + count).
  template <typename Function>
  PASS_EXT_DEVICE void for_each_removed(int32_t first, int32_t count, const Function& function) const {
    for (int32_t k = 0; k < shared_.removed_count; ++k) {
      const int32_t i = shared_.removed_ids[k] - first;
      if (i >= 0 && i < count) function(i, shared_.removed_cuts[k]);
    }
  }

  // See cpu/rows_kernels.h: what no token of a group can exceed in a race.
  PASS_EXT_DEVICE_CALL void bound_groups(const RowSummary& summary, const Law& law, const Noise* noise, float offset) {
    sync_block();
    for (int32_t group = first_index(); group < workspace_.groups; group += stride()) {
      const float largest = summary.maxima[group];
      float bound = -kInfinity;
      if (largest >= law.cut && largest > -kInfinity) {
        float log_e = 0.0f;
        if (noise != nullptr) {
          const PhiloxBlock drawn =
              philox4x32(counter_of(*noise, NoiseLevel::group, static_cast<uint32_t>(group)), noise->seed);
          log_e = logarithm(exponential_variate(drawn.word[0]) * (1.0f / kGroup));
        }
        bound = race_score(largest, law.maximum, law.scale, log_e) + (offset + 0.001f);
      }
      bounds()[group] = bound;
    }
    sync_block();
  }

  // One warp: the best token of a group behind `last`. score(id, ln E) is -inf for what does not race.
  template <typename Score>
  PASS_EXT_DEVICE Best best_of_group(const LogitRow& row, const Noise* noise, int32_t group, const Best& last,
                                     const Score& score) {
    const int32_t lane = static_cast<int32_t>(lane_index());
    float log_e[2] = {0.0f, 0.0f};
    if (noise != nullptr) {
      const PhiloxBlock drawn =
          philox4x32(counter_of(*noise, NoiseLevel::group, static_cast<uint32_t>(group)), noise->seed);
      const float first = exponential_variate(drawn.word[0]) * (1.0f / kGroup);
      const uint32_t block = static_cast<uint32_t>(group * kBlocksPerGroup + lane % kBlocksPerGroup);
      const PhiloxBlock tokens = philox4x32(counter_of(*noise, NoiseLevel::token, block), noise->seed);
      for (int k = 0; k < 2; ++k) {
        const int32_t place = lane + 32 * k;
        const float e =
            first + exponential_variate(lane < kBlocksPerGroup ? tokens.word[2 * k] : tokens.word[2 * k + 1]);
        log_e[k] = logarithm(static_cast<int32_t>(drawn.word[1] % kGroup) == place ? first : e);
      }
    }
    Best best{-kInfinity, -1};
    for (int k = 0; k < 2; ++k) {
      const int32_t id = group * kGroup + lane + 32 * k;
      if (id >= row.vocabulary) continue;
      const Best token{score(id, log_e[k]), id};
      if (token.score > -kInfinity && is_better(last, token) && (best.id < 0 || is_better(token, best))) best = token;
    }
    for (int step = 16; step > 0; step /= 2) {
      const Best other{shuffle_xor(best.score, step), shuffle_xor(best.id, step)};
      if (other.id >= 0 && (best.id < 0 || is_better(other, best))) best = other;
    }
    return best;
  }

  // The best token of a race behind `last`, id -1 where there is none. Groups that were looked at get their exact
  // bound.
  template <typename Score>
  PASS_EXT_DEVICE Best next_best(const LogitRow& row, const Noise* noise, const Best& last, const Score& score) {
    Best found{-kInfinity, -1};
    for (;;) {  // a first score to reach, from the most promising group
      Best bound{-kInfinity, INT32_MAX};
      for (int32_t group = first_index(); group < workspace_.groups; group += stride()) {
        const Best candidate{bounds()[group], group};
        if (is_better(candidate, bound)) bound = candidate;
      }
      bound = best_of_block(scratch_, bound);
      if (bound.score == -kInfinity) return found;
      if (warp_index() == 0) {
        found = best_of_group(row, noise, bound.id, last, score);
        if (lane_index() == 0) {
          scratch_.best[0] = found;
          bounds()[bound.id] = found.score;
        }
      }
      sync_block();
      found = scratch_.best[0];
      sync_block();
      if (found.id >= 0) break;
    }
    Best best = found;
    const int32_t lane = static_cast<int32_t>(lane_index()), warp = static_cast<int32_t>(warp_index());
    for (int32_t base = warp * 32; base < workspace_.groups; base += stride()) {
      const float bound = base + lane < workspace_.groups ? bounds()[base + lane] : -kInfinity;
      unsigned waiting = ballot(bound >= found.score && base + lane != found.id / kGroup);
      sync_warp();  // the bounds read above are overwritten below
      while (waiting != 0) {
        const int32_t group = base + first_set_bit(waiting);
        waiting &= waiting - 1;
        const Best other = best_of_group(row, noise, group, last, score);
        if (lane == 0) bounds()[group] = other.score;
        if (other.id >= 0 && is_better(other, best)) best = other;
      }
    }
    sync_block();
    return best_of_block(scratch_, best);
  }

  const RowsWorkspace& workspace_;
  BlockShared& shared_;
  BlockScratch& scratch_;
  float* cuts_ = nullptr;
  Judge* judges_ = nullptr;
  int64_t kept_slot_[2] = {-1, -1};
  bool kept_sum_[2] = {false, false};
  int next_kept_ = 0;
};

}  // namespace pass_ext::gpu
