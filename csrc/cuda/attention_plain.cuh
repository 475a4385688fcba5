// Attention on the GPU without matrix fragments: in fp32, which has none, at widths for which no kernel with them is
// compiled, to listed keys, and where a row must have the bits that it has alone. Keys and values may be in 8 bits.
//   step of 128 places:   m' = max(m, its scores)    total, sums = 2^(m - m') (total, sums) + those of the step
//   row:                  the same over its shares, in their order        out = sums / total
// A block takes some heads of one row that share a key head, and a step at a time: for the scores a thread has a place,
// for the result some columns. Keys, steps and shares are those of cuda/attention_places.cuh, so the order in which a
// row is added up is its own, whatever else the call has and whatever GPU it is. Where there are few rows, blocks take
// a share each and leave their sums to a second launch; else a block adds up all shares.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "core/attention_lists.h"
#include "core/quantize.h"
#include "cuda/attention_parts.cuh"
#include "cuda/attention_places.cuh"
#include "cuda/attention_shares.cuh"
#include "cuda/attention_tasks.cuh"
#include "cuda/attention_tasks_plan.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/numbers.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kPlainThreads = kPlacesOfStep;
constexpr int kPlainWarps = kPlainThreads / 32;
constexpr int kWidthRead = 16;  // numbers of a key at a time
static_assert(kWidthRead == kWidthStep, "every width is whole");

struct PlainAttention {
  AttentionProblem problem;
  CodeType codes;
  KeyLists lists;
  bool are_keys_wide;  // rows of keys start at multiples of 16 bytes
  AttentionTasks tasks;
  float* parts;  // [most_parts, heads, part_stride]
};

// True if no kernel with matrix fragments computes the problem, or its sums have no one order.
inline bool is_plain(const AttentionProblem& problem, CodeType codes, const KeyLists& lists, bool batch_invariant) {
  const bool is_one_width = problem.head_dim == problem.value_dim, has_chunks = problem.chunk >= 0;
  bool has_size = problem.head_dim == kWideKeyDim && problem.value_dim == kNarrowValueDim;
  for (int32_t dim : kHeadDims) has_size |= dim == problem.head_dim && is_one_width;
  return batch_invariant || lists.keys || problem.type == FloatType::float32 || !has_size ||
         (has_chunks && problem.head_dim != 128) || (codes != CodeType::none && (has_chunks || !is_one_width));
}

// Numbers of a key, of codes before their scale.
template <typename T>
PASS_EXT_DEVICE void load_key(float (&numbers)[kWidthRead], const T* from, CodeType, bool is_wide) {
  static_assert(kWidthRead == 2 * kNumbers, "two units");
  float halves[2][kNumbers];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (is_wide)
      load_numbers<true>(halves[half], from + half * kNumbers, kNumbers);
    else
      load_numbers<false>(halves[half], from + half * kNumbers, kNumbers);
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) numbers[half * kNumbers + i] = halves[half][i];
  }
}
PASS_EXT_DEVICE void load_key(float (&numbers)[kWidthRead], const uint8_t* from, CodeType codes, bool is_wide) {
  Bytes16 bytes{};
  if (is_wide) {
    bytes = load16(from);
  } else {
#pragma unroll
    for (int i = 0; i < kWidthRead; ++i) bytes.word[i / 4] |= uint32_t{from[i]} << (8 * (i % 4));
  }
#pragma unroll
  for (int i = 0; i < kWidthRead; ++i)
    numbers[i] = value_of_code(codes, static_cast<uint8_t>(bytes.word[i / 4] >> (8 * (i % 4))));
}

// The sums of kHeads heads, of which this thread has the columns thread_rank() + kPlainThreads c.
template <int kHeads, int kColumns>
struct PlainSums {
  float highest[kHeads], total[kHeads], sums[kHeads][kColumns];

  PASS_EXT_DEVICE void clear() {
#pragma unroll
    for (int r = 0; r < kHeads; ++r) {
      highest[r] = -kLargest;
      total[r] = 0.0f;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[r][c] = 0.0f;
    }
  }

  // Adds those of a share that comes behind them.
  PASS_EXT_DEVICE void add(const PlainSums& share) {
#pragma unroll
    for (int r = 0; r < kHeads; ++r) {
      const ShareWeights weights =
          weights_of_share({highest[r], total[r], total[r]}, {share.highest[r], share.total[r], share.total[r]});
      highest[r] = weights.totals.maximum;
      total[r] = weights.totals.exact;
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        sums[r][c] = fused(sums[r][c], weights.before, share.sums[r][c] * weights.share);
    }
  }

  template <typename T>
  PASS_EXT_DEVICE void write(const AttentionProblem& problem, int64_t index, int r) const {
    const float factor = factor_of_row(problem, index, {highest[r], total[r], total[r]});
    const int32_t thread = static_cast<int32_t>(thread_rank());
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int32_t column = thread + kPlainThreads * c;
      if (column < problem.value_dim)
        static_cast<T*>(problem.out)[index * problem.value_dim + column] = from_float<T>(sums[r][c] * factor);
    }
    if (thread == 0) problem.lse[index] = log_of_total(highest[r], total[r]);
  }
};

// Shared memory of a block beside its queries.
template <int kHeads>
struct PlainScratch {
  alignas(16) float weights[kPlacesOfStep][kHeads];
  const void* values[kPlacesOfStep];  // null: nothing to add
  float highest[kPlainWarps][kHeads], totals[kPlainWarps][kHeads];
};

// Adds the step of places from `first` on. T: of numbers, or uint8_t of codes. queries: [kHeads, head_dim], shared
// memory.
template <typename T, int kHeads, int kColumns>
PASS_EXT_DEVICE void add_step(const PlainAttention& plain, const PlacedRow& row, const float* queries,
                              PlainScratch<kHeads>& scratch, int32_t first, PlainSums<kHeads, kColumns>& sums) {
  constexpr bool kHasCodes = sizeof(T) == 1;
  const AttentionProblem& problem = plain.problem;
  const int32_t thread = static_cast<int32_t>(thread_rank());
  const int32_t place = first + thread;
  const int32_t key = place < row.seen.end ? key_at(problem, row.request, plain.lists, row.node, place) : -1;
  float scores[kHeads];
#pragma unroll
  for (float& score : scores) score = float_of(0xff800000u);
  const T* value = nullptr;
  if (key >= 0) {
    const T* const k = key_row<T>(problem, row.request, problem.k_cache, problem.k_new, key, row.head);
    value = key_row<T>(problem, row.request, problem.v_cache, problem.v_new, key, row.head);
    float dots[kHeads] = {};
    if (k != nullptr) {
#pragma unroll(kHeads > 4 ? 1 : 2)
      for (int32_t i = 0; i < problem.head_dim; i += kWidthRead) {
        float numbers[kWidthRead];
        load_key(numbers, k + (kHasCodes ? kCodeHeader : 0) + i, plain.codes, plain.are_keys_wide);
#pragma unroll
        for (int r = 0; r < kHeads; ++r)
#pragma unroll
          for (int j = 0; j < kWidthRead; ++j)
            dots[r] = fused(queries[r * problem.head_dim + i + j], numbers[j], dots[r]);
      }
      if constexpr (kHasCodes) {
        const float scale = scale_of_codes(k);
#pragma unroll
        for (float& dot : dots) dot *= scale;
      }
    }
#pragma unroll
    for (int r = 0; r < kHeads; ++r) {
      scores[r] = dots[r] * problem.scale;
      if (problem.softcap > 0.0f) scores[r] = softcapped(scores[r], problem.softcap);
      scores[r] *= kLog2E;
    }
  }
#pragma unroll
  for (int r = 0; r < kHeads; ++r) {
    float highest = scores[r];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float other = shuffle_xor(highest, step);
      if (other > highest || highest != highest) highest = other;  // NaN is no maximum, but makes the row's sums NaN
    }
    if (lane_index() == 0) scratch.highest[warp_index()][r] = highest;
  }
  sync_block();  // the maxima are there, and the weights of the step before are read
  float value_scale = 1.0f, shrink[kHeads];
  if constexpr (kHasCodes)
    if (value != nullptr) value_scale = scale_of_codes(value);
#pragma unroll
  for (int r = 0; r < kHeads; ++r) {
    float highest = sums.highest[r];
#pragma unroll
    for (int warp = 0; warp < kPlainWarps; ++warp)
      if (scratch.highest[warp][r] > highest) highest = scratch.highest[warp][r];
    shrink[r] = exp2_approximate(sums.highest[r] - highest);
    sums.highest[r] = highest;
    float weight = exp2_approximate(scores[r] - highest);
    scratch.weights[thread][r] = kHasCodes ? weight * value_scale : weight;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) weight += shuffle_xor(weight, step);
    if (lane_index() == 0) scratch.totals[warp_index()][r] = weight;
  }
  scratch.values[thread] = value;
  sync_block();
  float added[kHeads][kColumns] = {};  // added once: thousands of equal terms would all round the same way
#pragma unroll(16 / kColumns)          // so many loads are under way at once
  for (int i = 0; i < kPlacesOfStep; ++i) {
    const T* const from = static_cast<const T*>(scratch.values[i]);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int32_t column = thread + kPlainThreads * c;
      float number = 0.0f;
      if (from != nullptr && column < problem.value_dim) {
        if constexpr (kHasCodes)
          number = value_of_code(plain.codes, from[kCodeHeader + column]);
        else
          number = to_float(from[column]);
      }
#pragma unroll
      for (int r = 0; r < kHeads; ++r) added[r][c] = fused(scratch.weights[i][r], number, added[r][c]);
    }
  }
#pragma unroll
  for (int r = 0; r < kHeads; ++r) {
    float total = scratch.totals[0][r];
#pragma unroll
    for (int warp = 1; warp < kPlainWarps; ++warp) total += scratch.totals[warp][r];
    sums.total[r] = fused(sums.total[r], shrink[r], total);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums.sums[r][c] = fused(sums.sums[r][c], shrink[r], added[r][c]);
  }
}

// Blocks that run at once on one multiprocessor, as registers allow.
constexpr int resident_plain_blocks(int heads) { return heads > 4 ? 2 : heads > 1 ? 3 : 4; }

// T: of queries and the result; Stored: of keys and values, uint8_t for codes. kHeads: the most heads of a block.
template <typename T, typename Stored, int kHeads, int kColumns>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kPlainThreads, resident_plain_blocks(kHeads))
    plain_attention_kernel(PASS_EXT_PARAMETER PlainAttention plain) {
  begin_kernel(plain);
  PASS_EXT_SHARED(PlainScratch<kHeads>, scratches, 1);
  PASS_EXT_SHARED(Task, own_task, 1);
  const AttentionProblem& problem = plain.problem;
  float* const queries = dynamic_shared<float>();
  const int32_t thread = static_cast<int32_t>(thread_rank());
  const int32_t tiles_of_head = (problem.group + kHeads - 1) / kHeads;
  for_each_task(plain.tasks, own_task[0], [&](const Task& task) {
    const int32_t head = task.tile / tiles_of_head, first = task.tile % tiles_of_head * kHeads;  // of the key head's
    const int32_t count = problem.group - first < kHeads ? problem.group - first : kHeads;
    const RowTasks own = plain.tasks.rows[task.row];
    const PlacedRow row = placed_row(problem, own.owner, own.node, own.seen, head);
    const int32_t first_head = head * problem.group + first;
    const int64_t index = int64_t{task.row} * problem.heads + first_head;
    const T* const q = static_cast<const T*>(problem.q) + index * problem.head_dim;
    for (int32_t i = thread; i < kHeads * problem.head_dim; i += kPlainThreads)
      queries[i] = i < count * problem.head_dim ? to_float(q[i]) : 0.0f;
    sync_block();  // the queries are there
    PlainSums<kHeads, kColumns> sums;
    sums.clear();
#pragma unroll 1
    for (int32_t share = task.first; share < task.last; ++share) {
      const PlaceRange places = plain.tasks.places_of_share(own.seen, share);
      PlainSums<kHeads, kColumns> part;
      part.clear();
#pragma unroll 1
      for (int32_t step = places.begin; step < places.end; step += kPlacesOfStep)
        add_step<Stored>(plain, row, queries, scratches[0], step, part);
      if (share == task.first)
        sums = part;
      else
        sums.add(part);
    }
#pragma unroll
    for (int r = 0; r < kHeads; ++r) {
      if (r >= count) continue;
      if (task.part < 0) {
        sums.template write<T>(problem, index + r, r);
        continue;
      }
      float* const part =
          plain.parts + (int64_t{task.part} * problem.heads + first_head + r) * part_stride(problem.value_dim);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (thread + kPlainThreads * c < problem.value_dim) part[thread + kPlainThreads * c] = sums.sums[r][c];
      if (thread == 0) store_totals(part, problem.value_dim, {sums.highest[r], sums.total[r], sums.total[r]});
    }
  });
}

// The heads of a block: the more, the fewer times a key is read, as far as registers hold the sums of their columns.
constexpr int kPlainHeads = 4, kPlainWideHeads = 8;
inline int32_t plain_heads_of(const AttentionProblem& problem) {
  if (problem.value_dim > 2 * kPlainThreads) return kPlainWideHeads;  // most often latents, which all heads share
  return problem.group == 1 && problem.value_dim <= kPlainThreads ? 1 : kPlainHeads;
}

struct PlainPlan {
  TaskGrid grid;
  int64_t workspace;  // floats
};

inline PlainPlan plan_plain_attention(const AttentionProblem& problem, const KeyLists& lists, int32_t multiprocessors) {
  const int32_t heads = plain_heads_of(problem);
  PlainPlan plan{};
  plan.grid = plan_tasks(problem, lists, problem.kv_heads * ((problem.group + heads - 1) / heads), 1,
                         int64_t{resident_plain_blocks(heads)} * multiprocessors);
  plan.workspace =
      plan.grid.floats(problem.rows) + plan.grid.most_parts * problem.heads * part_stride(problem.value_dim);
  return plan;
}

template <typename T, typename Stored>
void launch_plain_attention_of(const PlainAttention& plain, const PlainPlan& plan, Stream stream) {
  const AttentionProblem& problem = plain.problem;
  const int64_t heads = plain_heads_of(problem);
  LaunchShape shape{{plan.grid.blocks}, {kPlainThreads}};
  shape.dynamic_shared_bytes = heads * problem.head_dim * sizeof(float);
  auto* const kernel = heads == kPlainWideHeads            ? plain_attention_kernel<T, Stored, kPlainWideHeads, 4>
                       : problem.value_dim > kPlainThreads ? plain_attention_kernel<T, Stored, kPlainHeads, 2>
                       : heads == 1                        ? plain_attention_kernel<T, Stored, 1, 1>
                                                           : plain_attention_kernel<T, Stored, kPlainHeads, 1>;
  launch("attention_tree", kernel, shape, stream, plain);
}

inline bool are_rows_wide(const KeyRows& rows, int64_t bytes) {
  return is_aligned16(rows.data) && rows.outer * bytes % 16 == 0 && rows.slot * bytes % 16 == 0 &&
         rows.head * bytes % 16 == 0;
}

// `counter`: zero before and after.
inline void launch_plain_attention(const AttentionProblem& problem, CodeType codes, const KeyLists& lists,
                                   const PlainPlan& plan, float* workspace, int32_t* counter, Stream stream) {
  const int64_t bytes = codes != CodeType::none ? 1 : problem.type == FloatType::float32 ? 4 : 2;
  const PlainAttention plain{problem,
                             codes,
                             lists,
                             are_rows_wide(problem.k_cache, bytes) && are_rows_wide(problem.k_new, bytes),
                             plan.grid.tasks_in(workspace, problem.rows, counter),
                             workspace + plan.grid.floats(problem.rows)};
  launch_plan(problem, lists, plan.grid, plain.tasks, stream);
  const auto run = [&](auto number) {
    using T = decltype(number);
    codes == CodeType::none ? launch_plain_attention_of<T, T>(plain, plan, stream)
                            : launch_plain_attention_of<T, uint8_t>(plain, plan, stream);
  };
  switch (problem.type) {
    case FloatType::bfloat16: run(bfloat16{}); break;
    case FloatType::float16: run(float16{}); break;
    case FloatType::float32: run(0.0f); break;
  }
  if (plan.grid.is_split) launch_add_parts(problem, plain.tasks, plain.parts, stream);
}

}  // namespace pass_ext::gpu
