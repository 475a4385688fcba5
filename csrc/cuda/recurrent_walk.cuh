// A warp's walk over the nodes of a request's tree, for up to eight value columns of a head: what a thread loads of a
// node, and its arithmetic. The formulas and the order of sums: core/recurrent-inl.h, so the bits are the CPU's.
//
// Four lanes share a column: each holds the rows of the state that belong to one of the four parts of a sum, in
// registers. The state is read once, through shared memory.
#pragma once

#include "core/recurrent.h"
#include "cuda/recurrent_rows.cuh"

namespace pass_ext::gpu {

constexpr int kWarpColumns = 32 / kSumParts;  // value columns of a warp
constexpr int kMostWalkWarps = 4;
constexpr size_t kMostWalkBytes = 99 * 1024;  // of shared memory, which every GPU from sm_80 on gives to a block

// Rows of q, k and v, each head contiguous. Distances in elements.
struct RowsOfType {
  const void* data;
  int64_t row_distance, head_distance;
};

// Shared memory of a block, as offsets in bytes. First two nodes' numbers, then the states that are kept for further
// children, which begin as the tile that the request's state arrives in; then the order of the nodes.
struct WalkMemory {
  int32_t kept, plans, steps, levels, parents, bytes;
  int32_t warp_states, warp_state;  // how many states of a warp may be kept, and the floats of one
};

struct RecurrentLaunch {
  Forest forest;
  RowsOfType q, k, v;
  RecurrentDecay decay;
  const float* beta;
  const float* states;
  StateLayout layout;
  void* out;
  float* u;
  int32_t heads, group, dk, dv;  // group: heads to a key head
  float scale;
  RowType type;
  bool is_delta;
  bool by_rows;                   // the state's rows lie side by side in memory, else its columns
  bool wide;                      // they are read in units of 16 bytes
  int32_t tile_row, tile_column;  // distances in the tile
  int32_t column_blocks;
  WalkMemory memory;
};

// A node's numbers for all columns of a head, in shared memory: row i of the state is number i / 4 of part i % 4.
template <int kRows>
struct StagedNode {
  static constexpr int kPart = kRows + 4;  // lanes of different parts read different banks
  float k[kSumParts * kPart], q[kSumParts * kPart], decay[kSumParts * kPart];

  PASS_EXT_DEVICE static int place_of(int i) { return i % kSumParts * kPart + i / kSumParts; }
};

// What a thread loads for the next node while the block computes one.
template <int kOwn>
struct Ahead {
  uint32_t k[kOwn], q[kOwn], value;
  float log[kOwn], element_log;
};

struct FourFloats {
  float value[4];
  PASS_EXT_DEVICE explicit FourFloats(const float* from) {
    const Bytes16 bytes = load16(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = float_of(bytes.word[i]);
  }
};

// A part of a sum becomes the sum, in all four lanes of a column.
PASS_EXT_DEVICE float sum_of_column(float part) {
  part = part + shuffle_xor(part, kWarpColumns);
  return part + shuffle_xor(part, 2 * kWarpColumns);
}

// kRows: rows of the state in a lane. whole: dk is 4 kRows, else smaller.
template <int kRows, bool whole, Decay decay>
struct Walk {
  static constexpr int kOwn = (kSumParts * kRows + 31) / 32;  // rows that a thread loads, in a block of one warp

  const RecurrentLaunch& launch;
  const RequestTree& tree;
  int32_t head;
  int32_t thread, threads, warp, lane, part, column;  // column: of those that are walked at once
  int64_t value_column;                               // of the head
  bool walks, has_column;                             // walks: this warp has columns
  int64_t k, q, v, result;                            // where this thread's numbers begin in row 0
  float state[kRows];
  float rate[decay == Decay::element ? kRows : 1];

  // The columns from first_column on, by the first `active` warps; all warps load what nodes need.
  PASS_EXT_DEVICE Walk(const RecurrentLaunch& given, const RequestTree& request, int32_t of_head, int64_t first_column,
                       int32_t active)
      : launch(given),
        tree(request),
        head(of_head),
        thread(static_cast<int32_t>(thread_rank())),
        threads(static_cast<int32_t>(block_size().x)),
        warp(static_cast<int32_t>(warp_index())),
        lane(static_cast<int32_t>(lane_index())),
        part(lane / kWarpColumns),
        column(warp * kWarpColumns + lane % kWarpColumns),
        value_column(first_column + column),
        walks(warp < active && first_column + warp * kWarpColumns < given.dv),
        has_column(walks && value_column < given.dv),
        k(head / given.group * given.k.head_distance + thread),
        q(head / given.group * given.q.head_distance + thread),
        v(head * given.v.head_distance + value_column),
        result(int64_t{head} * given.dv + value_column) {}

  // function(j, row, checked) for fours of this lane's rows: registers j to j + 3 hold its rows `row` to row + 3. Only
  // the last four may reach beyond dk: they lie in the last registers, and have `checked`.
  template <typename Function>
  PASS_EXT_DEVICE void for_each_four(Function function) const {
    constexpr int kFull = whole ? kRows : kRows - 4;
#pragma unroll
    for (int j = 0; j < kFull; j += 4) {
      if (!whole && kSumParts * (j + 4) > launch.dk) break;
      function(j, j, std::false_type{});
    }
    if (!whole && launch.dk % (4 * kSumParts) != 0)
      function(kRows - 4, launch.dk / (4 * kSumParts) * 4, std::true_type{});
  }

  template <typename Checked>
  PASS_EXT_DEVICE bool is_row(int row, Checked) const {
    return !Checked::value || kSumParts * row + part < launch.dk;
  }

  // function(j, row): register j holds this lane's row `row`, which is row 4 row + part of the state.
  template <typename Function>
  PASS_EXT_DEVICE void for_each_row(Function function) const {
    for_each_four([&](int first, int row, auto checked) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (is_row(row + i, checked)) function(first + i, row + i);
    });
  }

  // Starts the copies of the block's columns of the state into shared memory.
  PASS_EXT_DEVICE void begin_state(float* tile, int64_t first_column, int32_t most_columns) const {
    const StateLayout& layout = launch.layout;
    const float* const from = launch.states + layout.offset(tree.slot, head) + first_column * layout.column;
    const int32_t columns =
        static_cast<int32_t>(launch.dv - first_column < most_columns ? launch.dv - first_column : most_columns);
    const int32_t inner = launch.by_rows ? launch.dk : columns, outer = launch.by_rows ? columns : launch.dk;
    const int64_t inner_distance = launch.by_rows ? layout.row : layout.column;
    const int64_t outer_distance = launch.by_rows ? layout.column : layout.row;
    const int32_t tile_outer = launch.by_rows ? launch.tile_column : launch.tile_row;
    const int32_t unit = launch.wide ? 4 : 1, units = inner / unit;
#pragma unroll 1
    for (int32_t i = thread; i < units * outer; i += threads) {
      const int32_t a = i % units * unit, b = i / units;
      float* const to = tile + b * tile_outer + a;
      if (launch.wide)
        copy_async16(to, from + b * outer_distance + a);
      else
        copy_async4(to, from + b * outer_distance + a * inner_distance);
    }
    copy_async_commit();
  }

  PASS_EXT_DEVICE void take_state(const float* tile) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) state[j] = 0.0f;
    if (has_column)
      for_each_row([&](int j, int row) {
        state[j] = tile[(kSumParts * row + part) * launch.tile_row + column * launch.tile_column];
      });
  }

  PASS_EXT_DEVICE void take_rates() {
    if constexpr (decay == Decay::element) {
      const float* const from = launch.decay.rates + int64_t{head} * launch.dk * launch.dv + value_column;
#pragma unroll
      for (int j = 0; j < kRows; ++j) rate[j] = 0.0f;
      if (has_column)
        for_each_row([&](int j, int row) { rate[j] = from[(kSumParts * row + part) * int64_t{launch.dv}]; });
    }
  }

  PASS_EXT_DEVICE void keep(float* kept) const {
    for_each_row([&](int j, int row) { kept[row * 32 + lane] = state[j]; });
  }
  PASS_EXT_DEVICE void restore(const float* kept) {
    for_each_row([&](int j, int row) { state[j] = kept[row * 32 + lane]; });
  }

  PASS_EXT_DEVICE int64_t row_of(int32_t node) const { return tree.first + node; }

  // function(s, i): the s-th of this thread's rows, among `count`, is row i.
  template <typename Function>
  PASS_EXT_DEVICE void for_each_own_row(int32_t count, Function function) const {
    int32_t i = thread;
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
      if (i >= count) break;
      function(s, i);
      i += threads;
    }
  }

  PASS_EXT_DEVICE void load(Ahead<kOwn>& ahead, int32_t node) const {
    const int64_t row = row_of(node);
    const int64_t k_row = row * launch.k.row_distance + k, q_row = row * launch.q.row_distance + q;
    const float* const log = launch.decay.log + (row * launch.heads + head) * launch.dk + thread;  // of a key channel
    for_each_own_row(launch.dk, [&](int s, int32_t i) {
      ahead.k[s] = load_bits(launch.k.data, k_row + (i - thread), launch.type);
      ahead.q[s] = load_bits(launch.q.data, q_row + (i - thread), launch.type);
      if constexpr (decay == Decay::channel) ahead.log[s] = log[i - thread];
    });
    if (!has_column) return;
    ahead.value = load_bits(launch.v.data, row * launch.v.row_distance + v, launch.type);
    if constexpr (decay == Decay::element)
      ahead.element_log = launch.decay.log[row * launch.heads * launch.dv + result];
  }

  // Rows from dk to the next multiple of 16 are read with those before them: 0.
  PASS_EXT_DEVICE void stage(const Ahead<kOwn>& ahead, StagedNode<kRows>& staged) const {
    const int32_t padded = whole ? kSumParts * kRows : (launch.dk + 15) / 16 * 16;
    for_each_own_row(padded, [&](int s, int32_t i) {
      const int at = StagedNode<kRows>::place_of(i);
      const bool is_row = whole || i < launch.dk;
      staged.k[at] = is_row ? float_of_bits(ahead.k[s], launch.type) : 0.0f;
      staged.q[at] = is_row ? float_of_bits(ahead.q[s], launch.type) * launch.scale : 0.0f;
      if constexpr (decay == Decay::channel) staged.decay[at] = is_row ? decay_of(ahead.log[s]) : 0.0f;
    });
  }

  // The arithmetic of a step of one token.
  PASS_EXT_DEVICE void compute(const StagedNode<kRows>& staged, const NodeScalars& scalars, float value,
                               float element_log, int64_t packed_row) {
    const int at = part * StagedNode<kRows>::kPart;
    const auto decay_rows = [&](int first, int row, auto) {
      if constexpr (decay == Decay::channel) {
        const FourFloats factor(staged.decay + at + row);
#pragma unroll
        for (int i = 0; i < 4; ++i) state[first + i] = factor.value[i] * state[first + i];
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = first + i;
          float factor = scalars.decay;
          if constexpr (decay == Decay::element) factor = decay_of(element_log * rate[j]);
          state[j] = factor * state[j];
        }
      }
    };
    constexpr bool kDecaysFirst = decay == Decay::element;  // long code: once for both forms
    if constexpr (kDecaysFirst) for_each_four(decay_rows);
    float u;
    if (launch.is_delta) {
      float recalled = 0.0f;
      for_each_four([&](int first, int row, auto checked) {
        if constexpr (!kDecaysFirst) decay_rows(first, row, checked);
        const FourFloats k(staged.k + at + row);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (is_row(row + i, checked)) recalled = fused(state[first + i], k.value[i], recalled);
      });
      u = update_of<true>(scalars.beta, value, sum_of_column(recalled));
    } else {
      if constexpr (!kDecaysFirst) for_each_four(decay_rows);
      u = update_of<false>(scalars.beta, value, 0.0f);
    }
    float sum = 0.0f;
    for_each_four([&](int first, int row, auto checked) {
      const FourFloats k(staged.k + at + row), q(staged.q + at + row);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = first + i;
        state[j] = updated_state(state[j], k.value[i], u);
        if (is_row(row + i, checked)) sum = fused(state[j], q.value[i], sum);
      }
    });
    sum = sum_of_column(sum);
    if (part != 0 || !has_column) return;
    const int64_t at_row = packed_row * launch.heads * launch.dv + result;
    launch.u[at_row] = u;
    store_float(launch.out, at_row, sum, launch.type);
  }
};

}  // namespace pass_ext::gpu
