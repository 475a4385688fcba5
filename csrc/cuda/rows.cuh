// The `Rows` of core/draft.h on the GPU: from the summary of a row of logits (cuda/row_scan.cuh) a block describes the
// row as a distribution and finds the best tokens of a race. The results depend neither on the size of the block nor on
// which blocks scanned the row: every warp adds the chunks' sums in the same order; counts and the masses of top-p are
// integers.
#pragma once

#include <cstdint>

#include "core/accept.h"
#include "core/distribution.h"
#include "core/draft.h"
#include "core/noise.h"
#include "cuda/block.cuh"
#include "cuda/primitives.cuh"
#include "cuda/row_crowned.cuh"
#include "cuda/row_pieces.cuh"
#include "cuda/row_race.cuh"
#include "cuda/row_scan.cuh"
#include "cuda/row_select.cuh"
#include "cuda/row_shortlist.cuh"
#include "cuda/rows_plan.cuh"

namespace pass_ext::gpu {

// A block's way through a step of few rows (accept_step_kernel), in order. The clock is stamped at the end of each in
// builds with PASS_EXT_STAMPS, and nothing happens in others. benchmarks/gpu/stamps.py reads them and has these names.
enum class Phase {
  begun,
  scanned,
  last_of_row,
  described,
  finished,
  described_again,
  finished_again,
  last_of_step,
  divided,
  walked,
  count
};
constexpr unsigned kStampedBlocks = 1024;

PASS_EXT_DEVICE void stamp([[maybe_unused]] const RowsWorkspace& workspace, [[maybe_unused]] Phase phase) {
#ifdef PASS_EXT_STAMPS
  const unsigned block = block_index().y * grid_size().x + block_index().x;
  if (thread_rank() == 0 && block < kStampedBlocks)
    workspace.stamps[block * static_cast<unsigned>(Phase::count) + static_cast<unsigned>(phase)] = read_clocks();
#endif
}

// A build with PASS_EXT_FINISH_TWICE finishes each row of an accept step once more: a second time that is much shorter
// than the first means that the code had to be fetched.
#ifdef PASS_EXT_FINISH_TWICE
constexpr int kFinishes = 2;
#else
constexpr int kFinishes = 1;
#endif

// The beginning of a block's shared memory.
struct RowShared {
  union {
    uint64_t listed[kListed];
    float bounds[kGroupsInShared];
    Shortlist shortlist;
  };
  union {
    SelectScratch select;
    ShortlistScratch shortlist_scratch;
    RaceScratch race;
  };
  BlockScratch block;
};

PASS_EXT_DEVICE RowShared& row_shared() { return *dynamic_shared<RowShared>(); }

// The time at which rows are scanned: all of them in a launch of their own, or each when a block first reads it. It is
// a template parameter, so that a kernel has no code for the other way.
enum class Scan { beforehand, on_the_way };

template <Scan scan>
class BlockRows {
 public:
  // `area`: the block's place among the bounds in global memory, and for rows scanned on the way among the summaries.
  PASS_EXT_DEVICE BlockRows(const RowsWorkspace& workspace, int64_t area) : workspace_(workspace), area_(area) {}

  PASS_EXT_DEVICE bool is_leader() const { return thread_rank() == 0; }

  PASS_EXT_DEVICE_CALL Distribution describe(const LogitRow& row, const SamplingParameters& parameters,
                                             bool needs_mass) {
    const bool filtered = has_filter(parameters), needs_sum = is_sum_needed(parameters, needs_mass);
    const RowSummary summary = summary_of_row(row, parameters.scale, needs_sum);
    Distribution distribution{-kInfinity, parameters.scale, -kInfinity, -1, 0.0f, 0.0f, 0};
    bool bad = false;
#pragma unroll 4
    for (int32_t i = lane(); i < workspace_.chunks_per_row; i += 32) {  // four loads at once
      const ChunkSum chunk = summary.chunks[i];
      distribution.maximum = larger(chunk.maximum, distribution.maximum);
      bad = bad || !(chunk.sum == chunk.sum);
    }
    distribution.maximum = largest_of_warp(distribution.maximum);
    if (any(bad))
      distribution.status = kBadLogits;
    else if (distribution.maximum == -kInfinity)
      distribution.status = kEmptySupport;
    if (distribution.status != 0) return distribution;
    double mass = needs_sum ? total_mass(summary, distribution) : 0.0;
    listed_ = -1;
    if (filtered && !cut_on_shortlist(row, summary, parameters, mass, distribution)) {
      if (parameters.top_k > 0) cut_top_k(row, summary, parameters.top_k, distribution);
      if (parameters.top_p < 1.0f) {
        if (!needs_sum) mass = mass_of(row, summary, distribution);
        cut_top_p(row, summary, parameters.top_p, mass, distribution);
      }
      if (parameters.min_p > 0.0f) cut_at_floor(distribution, parameters.min_p);
      if (needs_mass) mass = mass_of(row, summary, distribution);
    }
    if (needs_mass) set_mass(distribution, mass);
    return distribution;
  }

  PASS_EXT_DEVICE float logit(const LogitRow& row, int32_t id) const { return logit_at(row, id); }

  // Writes the `count` best tokens of a race and their log-probabilities; -1 and -inf if there are fewer.
  PASS_EXT_DEVICE_CALL void best(const LogitRow& row, const Distribution& distribution, const Noise* noise,
                                 int32_t count, int64_t* tokens, float* logprobs) {
    const int32_t listed = listed_ < 0 && noise == nullptr ? list_best(row, distribution, count) : listed_;
    if (listed >= 0) return best_of_shortlist(distribution, noise, listed, count, tokens, logprobs);
    const bool is_drawn =
        scan == Scan::beforehand && workspace_.log_firsts != nullptr && noise != nullptr && noise->draw == 0;
    const float* maxima = is_drawn ? nullptr : bound_race(row, distribution, noise, false, 0.0f);
    const RaceScratch& race = row_shared().race;
    Best last{kInfinity, -1};
    for (int32_t place = 0; place < count; place += kMostAtOnce) {
      const int32_t wanted = count - place < kMostAtOnce ? count - place : kMostAtOnce;
      int32_t found = -1;
      if (is_drawn && place == 0)
        found = best_of_champions(row, distribution, *noise, wanted, PlainScore{distribution}, 0.0f);
      if (found < 0) {
        if (is_drawn && maxima == nullptr) maxima = bound_race(row, distribution, noise, true, 0.0f);
        found = best_few_of_race(row_shared().race, row, maxima, bounds(), workspace_.groups, distribution.scale, noise,
                                 wanted, last, PlainScore{distribution});
      }
      for (int32_t i = first_index(); i < found; i += stride()) {
        const int32_t id = id_of_key(race.best[i]);
        tokens[place + i] = id;
        logprobs[place + i] = log_weight(distribution, logit_at(row, id)) - distribution.log_mass;
      }
      if (found < wanted) return fill(tokens, logprobs, place + found, count);
      last = {logit_of_key(race.best[wanted - 1]), id_of_key(race.best[wanted - 1])};
      sync_block();  // the lists are used again
    }
  }

  // The winner of the race whose noise the scan knew, drawn there or here, among the tokens of the distribution's
  // support; -1 if none.
  PASS_EXT_DEVICE_CALL int32_t winner(const LogitRow& row, const Distribution& distribution, const Noise& noise) {
    static_assert(scan == Scan::beforehand, "a scan on the way draws no ln first_g");
    if (listed_ >= 0) return best_of_keys(row_shared().shortlist.keys, listed_, noise, PlainScore{distribution}).id;
    return race(row, distribution, noise, workspace_.log_firsts != nullptr, PlainScore{distribution}, 0.0f);
  }

  // Lists the support of the row described last for draws in a later launch.
  PASS_EXT_DEVICE void keep_support(int64_t slot) {
    const bool is_short = listed_ >= 0 && listed_ <= kSupport;
    if (is_leader()) workspace_.support_sizes[slot] = is_short ? listed_ : 0;
    if (is_short)
      for (int32_t i = first_index(); i < listed_; i += stride())
        workspace_.supports[slot * kSupport + i] = row_shared().shortlist.keys[i];
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

 protected:
  PASS_EXT_DEVICE int32_t lane() const { return static_cast<int32_t>(lane_index()); }
  PASS_EXT_DEVICE int32_t first_index() const { return static_cast<int32_t>(thread_rank()); }
  PASS_EXT_DEVICE int32_t stride() const { return static_cast<int32_t>(block_size().x); }
  PASS_EXT_DEVICE float* bounds() {
    return workspace_.groups <= kGroupsInShared ? row_shared().bounds : workspace_.bounds + area_ * workspace_.groups;
  }

  // A row's summary: scanned beforehand, one of the block's last two, or scanned now.
  PASS_EXT_DEVICE_CALL RowSummary summary_of_row(const LogitRow& row, float scale, bool needs_sum) {
    if constexpr (scan == Scan::beforehand) return summary_of(workspace_, row.slot);
    const int64_t first = area_ * 2;
    for (int i = 0; i < 2; ++i)
      if (summary_slot_[i] == row.slot && (summary_has_sum_[i] || !needs_sum)) return summary_of(workspace_, first + i);
    const int place = next_summary_;
    next_summary_ ^= 1;
    summary_slot_[place] = row.slot;
    summary_has_sum_[place] = needs_sum;
    const RowSummary summary = summary_of(workspace_, first + place);
    sync_block();
    for (int32_t chunk = static_cast<int32_t>(warp_index()); chunk < workspace_.chunks_per_row;
         chunk += static_cast<int32_t>(warps_in_block()))
      scan_chunk_of_any_type(row, chunk, summary, {}, [&] { return ScanSettings{scale, needs_sum, false, false, {}}; });
    sync_block();
    return summary;
  }

  // take(first id, eight logits) for the pieces of all groups whose largest logit is at least `floor`.
  template <typename Take>
  PASS_EXT_DEVICE void for_each_high_piece(const LogitRow& row, const RowSummary& summary, float floor,
                                           const Take& take) {
    constexpr int kAtOnce = 4, kGroupsAtOnce = 32 / kLanesPerGroup;
    for (int32_t base = static_cast<int32_t>(warp_index()) * 32; base < workspace_.groups; base += stride()) {
      unsigned high = ballot(base + lane() < workspace_.groups && summary.maxima[base + lane()] >= floor);
      while (high != 0) {
        RawPiece raw[kAtOnce];
        int32_t first[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          first[k] = -1;
#pragma unroll
          for (int i = 0; i < kGroupsAtOnce; ++i)
            if (high != 0) {
              if (lane() / kLanesPerGroup == i)
                first[k] = (base + first_set_bit(high)) * kGroup + lane() % kLanesPerGroup * kPiece;
              high &= high - 1;
            }
          if (first[k] >= 0 && is_aligned(row, first[k])) raw[k] = load_aligned(row, first[k]);
        }
#pragma unroll 1
        for (int k = 0; k < kAtOnce; ++k) {  // each piece moves to the front in turn: one copy of the code below
          if (first[0] >= 0) {
            float z[kPiece];
            if (!is_aligned(row, first[0])) raw[0] = load_any(row, first[0]);
            convert(row.type, raw[0], z);
            if (row.allowed != nullptr) forbid(load_allowed(row, first[0]), z);
            take(first[0], z);
          }
#pragma unroll
          for (int i = 1; i < kAtOnce; ++i) {
            first[i - 1] = first[i];
            raw[i - 1] = raw[i];
          }
          first[kAtOnce - 1] = -1;
        }
      }
    }
  }

  // The softmax sum over the whole row. Every warp computes the same.
  PASS_EXT_DEVICE double total_mass(const RowSummary& summary, const Distribution& distribution) const {
    double mass = 0.0;
#pragma unroll 4
    for (int32_t i = lane(); i < workspace_.chunks_per_row; i += 32) {
      const ChunkSum chunk = summary.chunks[i];
      if (chunk.maximum > -kInfinity) mass += chunk.sum * exponential(log_weight(distribution, chunk.maximum));
    }
    return sum_of_warp(mass);
  }

  // The softmax sum over the support. Overwrites the chunks' sums with their sums over the support.
  PASS_EXT_DEVICE_CALL double mass_of(const LogitRow& row, const RowSummary& summary,
                                      const Distribution& distribution) {
    sync_block();  // all warps have read the chunks' old sums
    if constexpr (scan == Scan::on_the_way)
      for (int i = 0; i < 2; ++i)
        if (summary_slot_[i] == row.slot) summary_has_sum_[i] = false;
    for (int32_t base = 0; base < workspace_.chunks_per_row; base += 32) {
      unsigned high = ballot(base + lane() < workspace_.chunks_per_row &&
                             summary.chunks[base + lane()].maximum >= distribution.cut);
      for (unsigned turn = 0; high != 0; ++turn) {
        const int32_t chunk = base + first_set_bit(high);
        high &= high - 1;
        if (turn % warps_in_block() == warp_index()) sum_chunk(row, summary, distribution, chunk);
      }
    }
    sync_block();
    double mass = 0.0;
    for (int32_t i = lane(); i < workspace_.chunks_per_row; i += 32)
      if (summary.chunks[i].maximum >= distribution.cut) mass += summary.chunks[i].sum;
    return sum_of_warp(mass);
  }

  // One warp: a chunk's sum over the support.
  PASS_EXT_DEVICE void sum_chunk(const LogitRow& row, const RowSummary& summary, const Distribution& distribution,
                                 int32_t chunk) {
    float sum = 0.0f;
    RawPiece raw[kPieces];
    bool reaches_cut[kPieces];
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const int32_t first = chunk * kChunk + (k * 32 + lane()) * kPiece;
      reaches_cut[k] = first < row.vocabulary && summary.maxima[first / kGroup] >= distribution.cut;
      if (reaches_cut[k] && is_aligned(row, first)) raw[k] = load_aligned(row, first);
    }
#pragma unroll 1
    for (int k = 0; k < kPieces; ++k) {  // as in for_each_high_piece
      const int32_t first = chunk * kChunk + (k * 32 + lane()) * kPiece;
      if (reaches_cut[0]) {
        float z[kPiece];
        if (!is_aligned(row, first)) raw[0] = load_any(row, first);
        convert(row.type, raw[0], z);
        if (row.allowed != nullptr) forbid(load_allowed(row, first), z);
        for_each_element(
            z, [&](float logit) { return logit >= distribution.cut; },
            [&](int i, float logit) {
              if (in_support(distribution, logit, first + i)) sum += exponential(log_weight(distribution, logit));
            });
      }
#pragma unroll
      for (int i = 1; i < kPieces; ++i) {
        reaches_cut[i - 1] = reaches_cut[i];
        raw[i - 1] = raw[i];
      }
    }
    for (int step = 16; step > 0; step /= 2) sum += shuffle_xor(sum, step);
    if (lane() == 0) summary.chunks[chunk].sum = sum;
  }

  PASS_EXT_DEVICE static uint64_t lowest_key(const Distribution& distribution) {
    return distribution.cut == -kInfinity ? kLowestKey : key_of(distribution.cut, distribution.tie);
  }

  // The elements of a selection: the tokens whose logit is at least `floor`, or the groups, by their largest logits.
  // Their measure is 1; with a distribution, their integer mass. `crowded`: see select_key.
  struct Selection {
    bool of_groups, crowded;
    float floor;
    const Distribution* distribution;
  };

  PASS_EXT_DEVICE_CALL Selected select(const LogitRow& row, const RowSummary& summary, const Selection& selection,
                                       unsigned long long needed, const KeyRange& range) {
    const auto measure = [&](uint64_t key) -> unsigned long long {
      if (selection.distribution == nullptr) return 1;
      return integer_mass(exponential(log_weight(*selection.distribution, logit_of_key(key))));
    };
    const auto for_each = [&](const auto& take) {
      if (selection.of_groups) {
        for (int32_t i = first_index(); i < workspace_.groups; i += stride()) take(key_of(summary.maxima[i], i));
        return;
      }
      for_each_high_piece(row, summary, selection.floor, [&](int32_t first, const float (&z)[kPiece]) {
        for_each_element(
            z, [&](float logit) { return logit >= selection.floor; },
            [&](int i, float logit) { take(key_of(logit, first + i)); });
      });
    };
    return select_key(row_shared().select, row_shared().listed, needed, range, selection.crowded, measure, for_each);
  }

  // Cuts the distribution behind its first `top_k` tokens, if it has so many.
  PASS_EXT_DEVICE void cut_top_k(const LogitRow& row, const RowSummary& summary, int32_t top_k,
                                 Distribution& distribution) {
    const uint64_t highest = key_of(distribution.maximum, 0);
    float floor = distribution.maximum;
    if (top_k > 1) {
      // k groups have a token at or above the k-th largest group maximum: no token below it is among the top k.
      const Selected group = select(row, summary, {true, false, -kInfinity, nullptr}, top_k, {kLowestKey, highest, 0});
      floor = group.reached ? logit_of_key(group.key) : -kInfinity;
    }
    const Selected selected = select(row, summary, {false, false, floor, nullptr}, top_k,
                                     {floor == -kInfinity ? kLowestKey : key_of(floor, -1), highest, 0});
    if (!selected.reached) return;
    distribution.cut = logit_of_key(selected.key);
    distribution.tie = id_of_key(selected.key);
  }

  // Cuts the distribution behind the token at which the mass reaches `top_p` of the whole.
  PASS_EXT_DEVICE void cut_top_p(const LogitRow& row, const RowSummary& summary, float top_p, double mass,
                                 Distribution& distribution) {
    const unsigned long long needed = mass_to_reach(top_p, mass) > 0 ? mass_to_reach(top_p, mass) : 1;
    // Below `floor` tokens are so improbable that a whole vocabulary of them weighs less than what top-p leaves out.
    const float spare = static_cast<float>((1.0 - static_cast<double>(top_p)) * mass / row.vocabulary * 0.99);
    const float floor =
        minimum(distribution.maximum + logarithm(maximum(spare, 0x1p-60f)) / distribution.scale, distribution.maximum);
    KeyRange range{lowest_key(distribution), key_of(distribution.maximum, 0), 0};
    if (key_of(floor, -1) > range.low) range.low = key_of(floor, -1);
    const Distribution whole = distribution;
    const Selected selected =
        select(row, summary, {false, true, maximum(floor, distribution.cut), &whole}, needed, range);
    distribution.cut = logit_of_key(selected.key);
    distribution.tie = id_of_key(selected.key);
  }

  // Bounds the groups of a row for a race, or without noise for a ranking; returns their largest logits. `is_drawn`:
  // the scan has drawn the noise.
  PASS_EXT_DEVICE const float* bound_race(const LogitRow& row, const Distribution& distribution, const Noise* noise,
                                          bool is_drawn, float offset) {
    const float* const maxima = summary_of_row(row, distribution.scale, false).maxima;
    if constexpr (scan == Scan::beforehand)
      if (is_drawn) {
        bound_drawn_groups(maxima, race_of(workspace_, row.slot).log_firsts, workspace_.groups, bounds(), distribution,
                           offset);
        return maxima;
      }
    bound_groups(maxima, workspace_.groups, bounds(), distribution, noise, offset);
    return maxima;
  }

  // best_of_champions of a row whose race the scan has drawn; -1 also if the scan was on the way.
  template <typename Score>
  PASS_EXT_DEVICE int32_t best_of_champions(const LogitRow& row, const Distribution& distribution, const Noise& noise,
                                            int32_t count, const Score& score, float offset) {
    if constexpr (scan == Scan::on_the_way) return -1;
    return gpu::best_of_champions(row_shared().race, row, workspace_, bounds(), distribution, noise, count, score,
                                  offset);
  }

  // The best token of a whole race, `is_drawn` by the scan or not; -1 if there is none. score and offset: see
  // best_of_champions.
  template <typename Score>
  PASS_EXT_DEVICE int32_t race(const LogitRow& row, const Distribution& distribution, const Noise& noise, bool is_drawn,
                               const Score& score, float offset) {
    if (is_drawn && best_of_champions(row, distribution, noise, 1, score, offset) > 0)
      return id_of_key(row_shared().race.best[0]);
    const float* const maxima = bound_race(row, distribution, &noise, is_drawn, offset);
    return best_of_race(row_shared().race, row_shared().block, row, maxima, bounds(), workspace_.groups,
                        distribution.scale, &noise, {kInfinity, -1}, score)
        .id;
  }

  // The best token of a list of keys in a race. score: see best_of_group.
  template <typename Score>
  PASS_EXT_DEVICE Best best_of_keys(const uint64_t* keys, int32_t count, const Noise& noise, const Score& score) {
    Best best{-kInfinity, -1};
    for (int32_t i = first_index(); i < count; i += stride()) {
      const uint64_t key = keys[i];
      const int32_t id = id_of_key(key);
      const Best token{score(id, logit_of_key(key), log_noise(noise, id)), id};
      if (token.score > -kInfinity && (best.id < 0 || is_better(token, best))) best = token;
    }
    return best_of_block(row_shared().block, best);
  }

  // Lists the best tokens of a ranking; returns their number, or -1 if a token that is not listed may be among the best
  // `count`: one whose score is rounded to theirs.
  PASS_EXT_DEVICE int32_t list_best(const LogitRow& row, const Distribution& distribution, int32_t count) {
    if (count >= kMostWanted) return -1;
    const RowSummary summary = summary_of_row(row, distribution.scale, false);
    const ShortlistSize size = make_shortlist(row_shared().shortlist, row_shared().shortlist_scratch, row,
                                              summary.maxima, distribution, count + 1);
    if (size.tokens < 0 || size.is_whole) return size.tokens;
    const PlainScore score{distribution};
    const uint64_t* const keys = row_shared().shortlist.keys;
    const uint64_t among = keys[count - 1], lowest = keys[size.tokens - 1];
    const float worst = score(id_of_key(lowest), logit_of_key(lowest), 0.0f);
    return score(id_of_key(among), logit_of_key(among), 0.0f) > worst ? size.tokens : -1;
  }

  // `best` among the first `listed` tokens of the shortlist.
  PASS_EXT_DEVICE_CALL void best_of_shortlist(const Distribution& distribution, const Noise* noise, int32_t listed,
                                              int32_t count, int64_t* tokens, float* logprobs) {
    Shortlist& list = row_shared().shortlist;
    sync_block();
    for (int32_t i = first_index(); i < listed; i += stride()) {
      const int32_t id = id_of_key(list.keys[i]);
      const float log_e = noise == nullptr ? 0.0f : log_noise(*noise, id);
      list.found[i] = key_of(PlainScore{distribution}(id, logit_of_key(list.keys[i]), log_e), id);
    }
    sync_block();
    for (int32_t i = first_index(); i < listed; i += stride()) {
      const int32_t place = place_of(list, listed, list.found[i]);
      if (place >= count) continue;
      const bool races = list.found[i] >= kLowestKey;  // its score is above -inf
      tokens[place] = races ? id_of_key(list.keys[i]) : -1;
      logprobs[place] =
          races ? log_weight(distribution, logit_of_key(list.keys[i])) - distribution.log_mass : -kInfinity;
    }
    fill(tokens, logprobs, listed, count);
  }

  // Applies the filters on a shortlist and computes the mass of what they leave. Returns false, and the distribution is
  // as it was, if they need more tokens than the list has.
  PASS_EXT_DEVICE bool cut_on_shortlist(const LogitRow& row, const RowSummary& summary,
                                        const SamplingParameters& parameters, double& mass,
                                        Distribution& distribution) {
    const bool is_counted = parameters.top_k > 0, is_weighed = parameters.top_p < 1.0f;
    if (!is_shortlisted(parameters) || parameters.top_k > kMostWanted) return false;
    const Shortlist& list = row_shared().shortlist;
    const int32_t wanted = is_counted ? parameters.top_k : kWantedOfTopP;
    const ShortlistSize size = make_shortlist(row_shared().shortlist, row_shared().shortlist_scratch, row,
                                              summary.maxima, distribution, wanted);
    if (size.tokens < 0) return false;
    int32_t count = is_counted && size.tokens > wanted ? wanted : size.tokens;
    bool is_cut = count < size.tokens || (is_counted && count == wanted);
    if (is_weighed) {
      const double whole = is_counted ? list.up_to[count - 1] * (1.0 / kMassUnit) : mass;
      unsigned long long needed = mass_to_reach(parameters.top_p, whole);
      if (needed < 1) needed = 1;
      if (needed > list.up_to[count - 1]) {
        if (!is_counted && !size.is_whole) return false;
        needed = list.up_to[count - 1];
      }
      count = 1 + first_index_with(count, [&](int32_t i) { return list.up_to[i] >= needed; });
      is_cut = true;
    }
    if (is_cut) {
      distribution.cut = logit_of_key(list.keys[count - 1]);
      distribution.tie = id_of_key(list.keys[count - 1]);
    }
    if (parameters.min_p > 0.0f && cut_at_floor(distribution, parameters.min_p))
      count = first_index_with(count, [&](int32_t i) { return logit_of_key(list.keys[i]) < distribution.cut; });
    mass = list.up_to[count - 1] * (1.0 / kMassUnit);
    listed_ = count;
    return true;
  }

  const RowsWorkspace& workspace_;
  int64_t area_;
  int32_t listed_ = -1;  // the length of the support of the row described last, if the shortlist begins with it
  int64_t summary_slot_[2] = {-1, -1};
  bool summary_has_sum_[2] = {false, false};
  int next_summary_ = 0;
};

// A block's part of the scan of rows, one warp for a chunk; the last block to finish the scan of a row then finishes
// the row. True for that block, and for the first block of a row that is not to be read. `slot` is a row's index in the
// workspace.
//   source.find(slot, row)                 sets `row`; false if the row is not to be read
//   source.scan_settings(slot)             ScanSettings
//   source.finish(rows, row, workspace)    the work on the scanned row
template <typename Source>
PASS_EXT_DEVICE bool scan_row(const Source& source, const RowsWorkspace& workspace) {
  const int64_t slot = block_index().y;
  stamp(workspace, Phase::begun);
  LogitRow row;
  // All blocks of a row return here or none: else its counter would not return to 0.
  if (!source.find(slot, row)) return block_index().x == 0;
  const RowSummary summary = summary_of(workspace, slot);
  ScanSettings settings{};
  bool is_first = true;
#pragma unroll 1
  for (int32_t chunk = static_cast<int32_t>(block_index().x * kScanWarps + warp_index());
       chunk < workspace.chunks_per_row; chunk += static_cast<int32_t>(grid_size().x * kScanWarps))
    scan_chunk_of_any_type(row, chunk, summary, race_of(workspace, slot), [&] {
      if (is_first) settings = source.scan_settings(slot);
      is_first = false;
      return settings;
    });
  stamp(workspace, Phase::scanned);
  if (!block_comes_last(workspace.counters + slot, static_cast<int32_t>(grid_size().x), &row_shared().block.is_last))
    return false;
  stamp(workspace, Phase::last_of_row);
  BlockRows<Scan::beforehand> rows(workspace, slot);
  const LogitRow finished = row;  // a copy that calls may point to: `row` stays in registers
  source.finish(rows, finished, workspace);
  return true;
}

template <typename Source>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(32 * kScanWarps, kScansPerMultiprocessor)
    scan_rows_kernel(PASS_EXT_PARAMETER Source source, PASS_EXT_PARAMETER RowsWorkspace workspace) {
  begin_kernel(source, workspace);
  scan_row(source, workspace);
}

template <typename Source>
void launch_scan_rows(const char* name, const Source& source, const RowsWorkspace& workspace, Stream stream) {
  launch(name, scan_rows_kernel<Source>,
         LaunchShape{{workspace.scan_blocks, workspace.rows}, {32 * kScanWarps}, sizeof(RowShared)}, stream, source,
         workspace);
}

}  // namespace pass_ext::gpu
