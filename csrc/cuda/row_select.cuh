// Selection, for top-k and top-p: orders the elements of a row by logit descending, id ascending, and finds the element
// at which their measures, added from the first on, reach a needed sum. An element's key is
// ordered_bits(logit) << 32 | ~id. No two keys are equal, so one selection gives both the cut and the last id among
// ties. Measures are integers (a count, or integer_mass): their sum has the same bits in any order of additions. A
// range of keys is divided into 256 bins and narrowed to the bin with the answer, until its elements fit into shared
// memory, then until at most 32 remain, one for each lane of a warp.
#pragma once

#include <cstdint>

#include "core/distribution.h"
#include "cuda/bins.cuh"
#include "cuda/block.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kBins = 256;
constexpr int kListed = 2048;
constexpr int kFewListed = 32;

struct SelectScratch {
  Bins<kBins> bins;
  unsigned long long before;
  int32_t bin, count;
  uint64_t few[kFewListed];
};

PASS_EXT_DEVICE uint64_t key_of(float logit, int32_t id) {
  return static_cast<uint64_t>(ordered_bits(logit)) << 32 | ~static_cast<uint32_t>(id);
}
PASS_EXT_DEVICE float logit_of_key(uint64_t key) { return float_of_ordered(static_cast<uint32_t>(key >> 32)); }
PASS_EXT_DEVICE int32_t id_of_key(uint64_t key) { return static_cast<int32_t>(~static_cast<uint32_t>(key)); }

// The lowest key above -inf.
constexpr uint64_t kLowestKey = static_cast<uint64_t>(0x00800000u) << 32;
constexpr uint64_t kLastId = 0xffffffffu;  // a key's low half for id 0: the highest

struct KeyRange {
  uint64_t low, high;         // both belong to the range
  unsigned long long before;  // sum of measures of the keys above
};

struct Selected {
  uint64_t key;
  bool reached;  // false: the sum of all measures is too small
};

// One warp, whose lanes keep their bins in registers: finds the first bin at which `before` plus the measures of the
// bins up to it reaches `needed`; if there is none, the last bin that is not empty.
PASS_EXT_DEVICE void find_bin_in_scratch(SelectScratch& scratch, unsigned long long needed, unsigned long long before) {
  constexpr int kBinsPerLane = kBins / 32;
  const int first = static_cast<int>(lane_index()) * kBinsPerLane;
  unsigned long long measures[kBinsPerLane], lane_sum = 0;
  int last = -1;
#pragma unroll
  for (int i = 0; i < kBinsPerLane; ++i) {
    measures[i] = scratch.bins.sum(first + i);
    lane_sum += measures[i];
    if (measures[i] > 0) last = first + i;
  }
  unsigned long long up_to = lane_sum;  // sum over this lane's bins and all before
  for (unsigned step = 1; step < 32; step *= 2) {
    const unsigned long long other = shuffle_up(up_to, step);
    if (lane_index() >= step) up_to += other;
  }
  const unsigned filled = ballot(last >= 0), reaching = ballot(before + up_to >= needed);
  const int owner = reaching != 0 ? first_set_bit(reaching) : filled == 0 ? 0 : last_set_bit(filled);
  if (static_cast<int>(lane_index()) != owner) return;
  before += up_to - lane_sum;
  int bin = first;
#pragma unroll
  for (int i = 0; i < kBinsPerLane - 1; ++i)
    if (bin == first + i && bin < last && before + measures[i] < needed) {
      before += measures[i];
      ++bin;
    }
  scratch.bin = bin;
  scratch.before = before;
}

// One pass over the elements: adds their measures by bin or, if `room` > 0, lists those in the range.
// for_each(take) calls take(key) for this thread's elements; keys outside the range are ignored.
struct Pass {
  int shift;
  uint64_t* list;
  int32_t room;
};

template <typename Measure, typename ForEach>
PASS_EXT_DEVICE void run_pass(SelectScratch& scratch, const Pass& pass, const KeyRange& range, const Measure& measure,
                              const ForEach& for_each) {
  sync_block();
  for (unsigned i = thread_rank(); i < kBins; i += block_size().x) scratch.bins.clear(i);
  if (thread_rank() == 0) scratch.count = 0;
  sync_block();
  for_each([&](uint64_t key) {
    if (key < range.low || key > range.high) return;
    const unsigned long long key_measure = measure(key);
    if (key_measure == 0) return;
    if (pass.room == 0) return scratch.bins.add(static_cast<int>((range.high - key) >> pass.shift), key_measure);
    const int32_t place = atomic_add(&scratch.count, 1);
    if (place < pass.room) pass.list[place] = key;
  });
  sync_block();
}

// Narrows the range to the bin that holds the answer.
PASS_EXT_DEVICE void narrow(SelectScratch& scratch, unsigned long long needed, int shift, KeyRange& range) {
  if (warp_index() == 0) find_bin_in_scratch(scratch, needed, range.before);
  sync_block();
  range.high -= static_cast<uint64_t>(scratch.bin) << shift;
  const uint64_t width = (uint64_t{1} << shift) - 1;
  if (range.high - range.low > width) range.low = range.high - width;
  range.before = scratch.before;
}

// Narrows the range until its elements fit into `list`, and lists them; returns their number. `crowded`: the first pass
// narrows before it lists.
template <typename Measure, typename ForEach>
PASS_EXT_DEVICE int32_t list_few(SelectScratch& scratch, uint64_t* list, int32_t room, bool crowded,
                                 unsigned long long needed, KeyRange& range, const Measure& measure,
                                 const ForEach& for_each) {
  for (bool listing = !crowded;; listing = !listing) {
    const int bits = 64 - leading_zeros(range.high - range.low);
    const Pass pass{bits > 8 ? bits - 8 : 0, list, listing ? room : 0};
    run_pass(scratch, pass, range, measure, for_each);
    if (listing && scratch.count <= room) return scratch.count;
    if (!listing) narrow(scratch, needed, pass.shift, range);
  }
}

// Every warp finds the answer among the same elements, at most 32.
template <typename Measure>
PASS_EXT_DEVICE Selected select_of_few(const SelectScratch& scratch, int32_t count, unsigned long long needed,
                                       const KeyRange& range, const Measure& measure) {
  const int lane = static_cast<int>(lane_index());
  const uint64_t key = lane < count ? scratch.few[lane] : 0;
  const unsigned long long key_measure = lane < count ? measure(key) : 0;
  unsigned long long up_to = range.before;  // sum over this element and all above it
  bool is_lowest = lane < count;
  for (int i = 0; i < count; ++i) {
    const uint64_t other = shuffle(key, i);
    const unsigned long long other_measure = shuffle(key_measure, i);
    if (other >= key) up_to += other_measure;
    if (other < key) is_lowest = false;
  }
  const unsigned crossing = ballot(lane < count && up_to >= needed && up_to - key_measure < needed);
  const unsigned lowest = ballot(is_lowest);
  const int chosen = crossing != 0 ? first_set_bit(crossing) : lowest != 0 ? first_set_bit(lowest) : 0;
  return {shuffle(key, chosen), crossing != 0};
}

// The largest key K of the range with measure(keys >= K) >= needed; if the sum of all measures is too small, the lowest
// key with a measure above 0. `list` is shared memory for kListed keys; `crowded`: there are probably more elements
// than that.
template <typename Measure, typename ForEach>
PASS_EXT_DEVICE Selected select_key(SelectScratch& scratch, uint64_t* list, unsigned long long needed, KeyRange range,
                                    bool crowded, const Measure& measure, const ForEach& for_each) {
  const int32_t count = list_few(scratch, list, kListed, crowded, needed, range, measure, for_each);
  const bool many = count > kFewListed;
  const int32_t few = list_few(scratch, scratch.few, kFewListed, many, needed, range, measure, [&](const auto& take) {
    for (int32_t i = static_cast<int32_t>(thread_rank()); i < count; i += static_cast<int32_t>(block_size().x))
      take(list[i]);
  });
  const Selected selected = select_of_few(scratch, few, needed, range, measure);
  sync_block();  // the scratch may be used again
  return selected;
}

}  // namespace pass_ext::gpu
