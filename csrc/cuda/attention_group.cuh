// Attention on the GPU in bf16 and fp16 by the heads of a group: a tile of matrix fragments holds heads of one row of q
// that share a key head. All of them see the same keys, so there is no mask inside a tile, lists and trees are only
// addresses, and the order in which a row is added up is its own (attention_places.cuh), whatever else the call has.
//   tile of 32 places:   m' = max(m, its scores)    totals, sums = 2^(m - m') (totals, sums) + those of the tile
//   row:                 the same over its shares, in their order        out = sums / total of the weights as rounded
// A key may be 576 numbers wide, and 512 sums of 32 rows fill the registers of four warps. So a warp has a slice of all
// keys and values, a quarter: it copies it, multiplies it with its slice of q, which it keeps, and adds up its columns
// of the result. Only scores and weights cross over, through shared memory: the slices' parts of a score are added
// there. If values are the first numbers of the keys, both products read one copy. Codes of 8 bits are multiplied
// without their scales: that of a key multiplies its scores, that of a value its weights before they are rounded, and
//   out = sum of weight (2^k scale) value of code / (2^k sum of weights)      2^k: weight_unit
// 128 heads do 2 * 128 * (576 + 512) operations with a latent of 1152 bytes, 242 a byte; vector arithmetic keeps up
// with about 20.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "core/attention_lists.h"
#include "cuda/attention_group_tile.cuh"
#include "cuda/attention_parts.cuh"
#include "cuda/attention_places.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// The warp's slice of the rows of q, as the left side of products.
template <typename Shape>
using GroupQueries = uint32_t[Shape::kRowTiles][Shape::kSteps][4];

// `q`: the first of `count` rows; others are zeros.
template <typename Shape>
PASS_EXT_DEVICE void load_queries(GroupQueries<Shape>& queries, const typename Shape::T* q, int count) {
  const int g = static_cast<int>(lane_index() / 4), t = static_cast<int>(lane_index() % 4);
#pragma unroll
  for (int tile = 0; tile < Shape::kRowTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * tile + g + 8 * half;
#pragma unroll
      for (int chunk = 0; chunk < Shape::kKeyChunks; ++chunk)
        queries[tile][chunk / 2][half + 2 * (chunk % 2)] =
            row < count
                ? *reinterpret_cast<const uint32_t*>(q + row * Shape::kKeyDim + column_of_chunk<Shape>(chunk) + 2 * t)
                : 0u;
    }
}

struct alignas(8) FloatPair {  // one store
  float low, high;
};

// Stores what the warp's slice adds to the scores of a tile.
template <typename Shape>
PASS_EXT_DEVICE void multiply_keys(const GroupQueries<Shape>& queries, const typename Shape::T* keys) {
  using T = typename Shape::T;
  const unsigned lane = lane_index(), g = lane / 4, t = lane % 4;
  auto& scores = group_scratch<Shape>().scores[warp_index()];
#pragma unroll
  for (int first = 0; first < kGroupKeys; first += 16) {
    const SharedAddress from =
        shared_address(keys + (first + lane / 16 * 8 + lane % 8) * Shape::kStride + lane / 8 % 2 * 8);
    float sums[Shape::kRowTiles][2][4] = {};
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      uint32_t k[4];
      load_matrices<4>(k, from + step * 32);
#pragma unroll
      for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
        multiply_m16n8k16<T>(sums[tile][0], queries[tile][step], {k[0], k[1]});
        multiply_m16n8k16<T>(sums[tile][1], queries[tile][step], {k[2], k[3]});
      }
    }
#pragma unroll
    for (int tile = 0; tile < Shape::kRowTiles; ++tile)
#pragma unroll
      for (int block = 0; block < 2; ++block)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *reinterpret_cast<FloatPair*>(&scores[16 * tile + g + 8 * half][first + 8 * block + 2 * t]) = {
              sums[tile][block][2 * half], sums[tile][block][2 * half + 1]};
  }
}

// Several threads share a row, and each turns as many scores of a tile into weights.
template <typename Shape>
constexpr int kLanesOfRow = kGroupThreads / Shape::kRows;

template <int count>
PASS_EXT_DEVICE void load_scales(float (&scales)[count], const float* from) {
#pragma unroll
  for (int i = 0; i < count; i += 4) {
    const Bytes16 four = load16(from + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) scales[i + j] = float_of(four.word[j]);
  }
}

// Turns scores into weights. Bit i of `seen`: the row sees key i. `totals`: the thread's own, but for the maximum.
template <typename Shape>
PASS_EXT_DEVICE void weigh(const GroupAttention& group, uint32_t seen, int turn, RowTotals& totals) {
  using T = typename Shape::T;
  const AttentionProblem& problem = group.problem;
  constexpr int kLanes = kLanesOfRow<Shape>, kScores = kGroupKeys / kLanes;
  typename Shape::Scratch& scratch = group_scratch<Shape>();
  const int thread = static_cast<int>(thread_rank()), row = thread / kLanes, first = thread % kLanes * kScores;
  float scores[kScores];
#pragma unroll
  for (int i = 0; i < kScores; i += 4) {
    Bytes16 parts[kGroupWarps];
#pragma unroll
    for (int warp = 0; warp < kGroupWarps; ++warp) parts[warp] = load16(&scratch.scores[warp][row][first + i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      scores[i + j] = float_of(parts[0].word[j]);
#pragma unroll
      for (int warp = 1; warp < kGroupWarps; ++warp) scores[i + j] += float_of(parts[warp].word[j]);
    }
  }
  const float scale = problem.softcap > 0.0f ? problem.scale : problem.scale * kLog2E;
#pragma unroll
  for (float& score : scores) score *= scale;
  if constexpr (Shape::kHasCodes) {
    float scales[kScores];
    load_scales(scales, scales_of_tile<Shape>(turn, false) + first);
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] *= scales[i];
  }
  if (problem.softcap > 0.0f) {
#pragma unroll
    for (float& score : scores) score = softcapped(score, problem.softcap) * kLog2E;
  }
  const uint32_t own_seen = seen >> first;  // shifted once: masks of all scores would stay in registers
  float highest = totals.maximum;           // `larger` ignores NaN; a score that is NaN still makes its row's sums NaN
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    if (!(own_seen >> i & 1)) scores[i] = float_of(0xff800000u);
    highest = larger(highest, scores[i]);
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) highest = larger(highest, shuffle_xor(highest, step));
  const float shrink = exp2_approximate(totals.maximum - highest);
  float rounded = 0.0f, exact = 0.0f, factors[kScores];
  if constexpr (Shape::kHasCodes) load_scales(factors, scales_of_tile<Shape>(turn, !group.has_latents) + first);
  const float unit = Shape::kHasCodes ? weight_unit(group.codes) : 1.0f;
  uint32_t pairs[kScores / 2];
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    const float low = exp2_approximate(scores[2 * i] - highest), high = exp2_approximate(scores[2 * i + 1] - highest);
    exact += low + high;
    if constexpr (Shape::kHasCodes) {
      pairs[i] = pack2<T>(low * (unit * factors[2 * i]), high * (unit * factors[2 * i + 1]));
    } else {
      pairs[i] = pack2<T>(low, high);
      rounded += unpack_low<T>(pairs[i]) + unpack_high<T>(pairs[i]);
    }
  }
  if constexpr (Shape::kHasCodes) rounded = unit * exact;
  totals = {highest, fused(totals.rounded, shrink, rounded), fused(totals.exact, shrink, exact)};
  if constexpr (kScores == 8)
    store16(&scratch.weights[row][first], {{pairs[0], pairs[1], pairs[2], pairs[3]}});
  else
    *reinterpret_cast<uint64_t*>(&scratch.weights[row][first]) = pairs[0] | uint64_t{pairs[1]} << 32;
  if (first == 0) scratch.shrink[row] = shrink;
}

// The warp's columns of the sums of all rows.
template <typename Shape>
using GroupSums = float[Shape::kRowTiles][Shape::kValueChunks][4];

// Adds a tile's values.
template <typename Shape>
PASS_EXT_DEVICE void add_values(GroupSums<Shape>& sums, const typename Shape::T* values) {
  using T = typename Shape::T;
  const typename Shape::Scratch& scratch = group_scratch<Shape>();
  const unsigned lane = lane_index();
  float shrink[Shape::kRowTiles][2];
  bool shrinks = false;
#pragma unroll
  for (int tile = 0; tile < Shape::kRowTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shrink[tile][half] = scratch.shrink[16 * tile + lane / 4 + 8 * half];
      shrinks |= shrink[tile][half] != 1.0f;
    }
  if (any(shrinks)) {
#pragma unroll
    for (int tile = 0; tile < Shape::kRowTiles; ++tile)
#pragma unroll
      for (auto& block : sums[tile])
#pragma unroll
        for (int i = 0; i < 4; ++i) block[i] *= shrink[tile][i / 2];
  }
#pragma unroll
  for (int first = 0; first < kGroupKeys; first += 16) {
    uint32_t p[Shape::kRowTiles][4];
#pragma unroll
    for (int tile = 0; tile < Shape::kRowTiles; ++tile)
      load_matrices<4>(p[tile], &scratch.weights[16 * tile + lane % 16][first + lane / 16 * 8]);
    const SharedAddress from = shared_address(values + (first + lane % 16) * Shape::kStride + lane / 16 * 8);
#pragma unroll
    for (int chunk = 0; chunk < Shape::kValueChunks; chunk += 2) {
      uint32_t v[4];
      load_matrices<4, true>(v, from + chunk * 16);
#pragma unroll
      for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
        multiply_m16n8k16<T>(sums[tile][chunk], p[tile], {v[0], v[1]});
        multiply_m16n8k16<T>(sums[tile][chunk + 1], p[tile], {v[2], v[3]});
      }
    }
  }
}

// Adds up some places. One tile is on its way while another is multiplied: of latents the
// next one; else, with one tile for keys and one for values, the values and then the next keys.
template <typename Shape>
PASS_EXT_DEVICE void add_places(const GroupAttention& group, const PlacedRow& row, const GroupQueries<Shape>& queries,
                                const PlaceRange& places, GroupSums<Shape>& sums, RowTotals& totals) {
  const int32_t from = places.begin, end = places.end;
  const int32_t lane = static_cast<int32_t>(lane_index());
  PlacedKey placed;
  uint32_t seen = 0;
  int turn = 0;   // of the tile
#pragma unroll 1  // the key of a place takes much code
  for (int32_t ahead = 0; ahead < 2; ++ahead) {
    placed = placed_key(group, row, from + ahead * kGroupKeys + lane, end);
    if (ahead > 0) break;
    seen = ballot(placed.key >= 0);
    copy_keys<Shape>(group, row, placed, 0, turn);
    copy_async_commit();
    if (!group.has_latents) {
      copy_values<Shape>(group, row, placed, 1, turn);
      copy_async_commit();
    }
  }
#pragma unroll 1
  for (int32_t place = from; place < end; place += kGroupKeys) {
    const bool has_next = place + kGroupKeys < end;
    const uint32_t seen_now = seen;
    const int which = group.has_latents ? turn : 0;  // the tile with the keys
    if (group.has_latents) {
      if (has_next) copy_keys<Shape>(group, row, placed, which ^ 1, turn ^ 1);
      copy_async_commit();
      seen = ballot(placed.key >= 0);
      placed = placed_key(group, row, place + 2 * kGroupKeys + lane, end);
    }
    copy_async_wait<1>();
    sync_warp();  // the keys are there
    const typename Shape::T* numbers = arrived_numbers<Shape>(group, which, true);
    multiply_keys<Shape>(queries, numbers);
    if (!group.has_latents) {
      sync_warp();  // the keys are read
      if (has_next) copy_keys<Shape>(group, row, placed, 0, turn ^ 1);
      copy_async_commit();
      if (Shape::kHasCodes) copy_async_wait<1>();  // the scales of the values are there
    }
    sync_block();  // all slices' scores are there, and the weights of the tile before are read
    weigh<Shape>(group, seen_now, turn, totals);
    sync_block();  // the weights are there, and the scores are read
    if (!group.has_latents) {
      copy_async_wait<1>();
      sync_warp();  // the values are there
      numbers = arrived_numbers<Shape>(group, 1, false);
    }
    add_values<Shape>(sums, numbers);
    sync_warp();  // the values are read
    turn ^= 1;
    if (!group.has_latents) {
      if (has_next) copy_values<Shape>(group, row, placed, 1, turn);
      copy_async_commit();
      seen = ballot(placed.key >= 0);
      placed = placed_key(group, row, place + 2 * kGroupKeys + lane, end);
    }
  }
}

// Writes what a block computes. All threads call it together.
template <typename Shape>
PASS_EXT_DEVICE void set_item(const GroupAttention& group, const Task& task, GroupItem& item) {
  if (thread_rank() == 0) {
    const AttentionProblem& problem = group.problem;
    const int32_t tiles_of_head = (problem.group + Shape::kRows - 1) / Shape::kRows;
    const int32_t head = task.tile / tiles_of_head, first = task.tile % tiles_of_head * Shape::kRows;
    const RowTasks tasks = group.tasks.rows[task.row];
    item.row = placed_row(problem, tasks.owner, tasks.node, tasks.seen, head);
    item.head = head * problem.group + first;
    item.count = problem.group - first < Shape::kRows ? problem.group - first : Shape::kRows;
  }
  sync_block();  // the item is there
}

// Adds up one share. Totals are those of the thread's row.
template <typename Shape>
PASS_EXT_DEVICE RowTotals add_share(const GroupAttention& group, const GroupItem& item,
                                    const GroupQueries<Shape>& queries, int32_t share, GroupSums<Shape>& sums) {
#pragma unroll
  for (auto& tile : sums)
#pragma unroll
    for (auto& block : tile)
#pragma unroll
      for (float& sum : block) sum = 0.0f;
  RowTotals totals;
  add_places<Shape>(group, item.row, queries, group.tasks.places_of_share(item.row.seen, share), sums, totals);
#pragma unroll
  for (int step = 1; step < kLanesOfRow<Shape>; step *= 2) {
    totals.rounded += shuffle_xor(totals.rounded, step);
    totals.exact += shuffle_xor(totals.exact, step);
  }
  return totals;
}

// The row whose totals a thread has, and whether it writes them.
template <typename Shape>
PASS_EXT_DEVICE int row_of_thread() {
  return static_cast<int>(thread_rank()) / kLanesOfRow<Shape>;
}
template <typename Shape>
PASS_EXT_DEVICE bool writes_totals() {
  return thread_rank() % kLanesOfRow<Shape> == 0;
}

// use(row of the tile, tile of fragments, half of it) for the rows of which this thread has sums.
template <typename Shape, typename Use>
PASS_EXT_DEVICE void for_rows(int count, const Use& use) {
#pragma unroll
  for (int tile = 0; tile < Shape::kRowTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * tile + static_cast<int>(lane_index()) / 4 + 8 * half;
      if (row < count) use(row, tile, half);
    }
}

// Leaves the sums of some shares, whose totals are in shared memory, to add_parts_kernel.
template <typename Shape>
PASS_EXT_DEVICE void store_part(const GroupAttention& group, const GroupItem& item, int64_t index,
                                const GroupSums<Shape>& sums) {
  float* const part = group.parts + (index * group.problem.heads + item.head) * int64_t{Shape::kPartStride};
  for_rows<Shape>(item.count, [&](int row, int tile, int half) {
    float* const line = part + row * Shape::kPartStride + 2 * (lane_index() % 4);
#pragma unroll
    for (int chunk = 0; chunk < Shape::kValueChunks; ++chunk)
      *reinterpret_cast<FloatPair*>(line + column_of_chunk<Shape>(chunk)) = {sums[tile][chunk][2 * half],
                                                                             sums[tile][chunk][2 * half + 1]};
  });
  const int row = row_of_thread<Shape>();
  if (writes_totals<Shape>() && row < item.count)
    store_totals(part + row * Shape::kPartStride, Shape::kValueDim, group_scratch<Shape>().sums[row]);
}

// Adds a share to those before, whose totals are in shared memory and whose sums, because registers are full, in
// global memory. If more come, the sums go there.
template <typename Shape>
PASS_EXT_DEVICE void add_to_shares_before(const GroupAttention& group, GroupSums<Shape>& sums, const RowTotals& totals,
                                          bool has_before, bool has_next) {
  typename Shape::Scratch& scratch = group_scratch<Shape>();
  if (writes_totals<Shape>()) {
    const int row = row_of_thread<Shape>();
    const ShareWeights weights = weights_of_share(scratch.sums[row], totals);
    scratch.sums[row] = has_before ? weights.totals : totals;
    scratch.weight_before[row] = weights.before;
    scratch.weight_of_share[row] = weights.share;
  }
  sync_block();  // the totals and the weights are there
  if (!has_before && !has_next) return;
  uint32_t own = block_index().x * (Shape::kRows * Shape::kValueDim) + 4 * thread_rank();
#pragma unroll
  for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
    const int row = 16 * tile + static_cast<int>(lane_index()) / 4;
    const float before[2] = {scratch.weight_before[row], scratch.weight_before[row + 8]};
    const float share[2] = {scratch.weight_of_share[row], scratch.weight_of_share[row + 8]};
#pragma unroll
    for (auto& block : sums[tile]) {
      if (has_before) {
        const Bytes16 bytes = load16(group.sums_before + own);
#pragma unroll
        for (int i = 0; i < 4; ++i) block[i] = fused(float_of(bytes.word[i]), before[i / 2], block[i] * share[i / 2]);
      }
      if (has_next)
        store16(group.sums_before + own,
                {{bits_of(block[0]), bits_of(block[1]), bits_of(block[2]), bits_of(block[3])}});
      own += 4 * kGroupThreads;
    }
  }
}

// Writes the results of an item, whose totals are in shared memory. `index`: of its first head, in [rows, heads].
template <typename Shape>
PASS_EXT_DEVICE void write_item(const AttentionProblem& problem, int64_t index, int count,
                                const GroupSums<Shape>& sums) {
  using T = typename Shape::T;
  typename Shape::Scratch& scratch = group_scratch<Shape>();
  float* const factors = scratch.shrink;  // [kRows]: nobody reads what was there
  const int own = row_of_thread<Shape>();
  if (writes_totals<Shape>() && own < count) {
    const RowTotals& totals = scratch.sums[own];
    factors[own] = factor_of_row(problem, index + own, totals);
    problem.lse[index + own] = log_of_total(totals.maximum, totals.exact);
  }
  sync_block();  // the factors are there
  for_rows<Shape>(count, [&](int row, int tile, int half) {
    T* const line = static_cast<T*>(problem.out) + (index + row) * Shape::kValueDim + 2 * (lane_index() % 4);
#pragma unroll
    for (int chunk = 0; chunk < Shape::kValueChunks; ++chunk)
      *reinterpret_cast<uint32_t*>(line + column_of_chunk<Shape>(chunk)) =
          pack2<T>(sums[tile][chunk][2 * half] * factors[row], sums[tile][chunk][2 * half + 1] * factors[row]);
  });
}

template <typename Shape>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kGroupThreads, Shape::kResidentBlocks)
    group_attention_kernel(PASS_EXT_PARAMETER GroupAttention group) {
  begin_kernel(group);
  using T = typename Shape::T;
  for_each_task(group.tasks, group_scratch<Shape>().task, [&](const Task& task) {
    GroupItem& item = group_scratch<Shape>().item;
    set_item<Shape>(group, task, item);
    const int64_t index = int64_t{task.row} * group.problem.heads + item.head;
    GroupQueries<Shape> queries;
    load_queries<Shape>(queries, static_cast<const T*>(group.problem.q) + index * Shape::kKeyDim, item.count);
    if (writes_totals<Shape>()) group_scratch<Shape>().sums[row_of_thread<Shape>()] = {};
    GroupSums<Shape> sums = {};
#pragma unroll 1
    for (int32_t share = task.first; share < task.last; ++share) {
      const RowTotals totals = add_share<Shape>(group, item, queries, share, sums);
      add_to_shares_before<Shape>(group, sums, totals, share > task.first, share + 1 < task.last);
    }
    if (task.first >= task.last) sync_block();  // the totals are there
    if (task.part >= 0)
      store_part<Shape>(group, item, task.part, sums);
    else
      write_item<Shape>(group.problem, index, item.count, sums);
  });
}

template <typename Shape>
GroupKernel* group_kernel_of() {
  return group_attention_kernel<Shape>;
}

}  // namespace pass_ext::gpu
