// Committing accepted paths to states on the GPU: one launch for all states of one shape. The problem: core/state.h;
// the arithmetic: core/recurrent-inl.h. Each element is read once, updated by every node of the path in order, and
// written once, 16 bytes at a time where the state's strides allow it.
//
// Malformed input raises nothing, because an error message would need a synchronisation. A node, a request's bounds or
// a state that does not exist is left out.
#pragma once

#include <tuple>
#include <vector>

#include "core/state.h"
#include "cuda/recurrent_rows.cuh"

namespace pass_ext::gpu {

constexpr int kMostRecurrentStates = 88, kMostConvolutionStates = 240;  // per launch: they fit a kernel's parameter
constexpr int kCommitThreads = 128;

// The rows of a request's path, in order. The same in every lane of a warp.
struct PathRows {
  const StateStep& step;
  int64_t request;
  AcceptedPath accepted;

  PASS_EXT_DEVICE PathRows(const StateStep& given, int64_t b)
      : step(given), request(b), accepted(accepted_path(given, b)) {}

  // begin(own) for 32 columns of the path, own: the row of this lane's column, or -1; then next(row, lane) for the rows
  // among them.
  template <typename Begin, typename Next>
  PASS_EXT_DEVICE void for_each(Begin begin, Next next) const {
    for (int32_t base = 0; base < accepted.length; base += 32) {
      const int32_t j = base + static_cast<int32_t>(lane_index());
      const int64_t own = j < accepted.length ? accepted_row(step, accepted, request, j) : -1;
      begin(own);
      for (unsigned rows = ballot(own >= 0); rows != 0; rows &= rows - 1) {
        const int lane = first_set_bit(rows);
        next(shuffle(own, lane), lane);
      }
    }
  }
};

// ---- recurrent states: a warp owns a tile, which its lanes hold in registers ----
//
// A tile is `lanes` times `width` neighbours in memory long (along), and 8 rows or columns of the state for each group
// of so many lanes wide (across). A node's numbers along are loaded by each lane, those across by one lane each and
// then passed around.

constexpr int kAcross = 8;

struct RecurrentPointers {
  float* data;
  const void* k;
  const float *u, *log, *rates;
};

// States of one shape; the pointers of `shape` are not read.
struct RecurrentCommit {
  StateStep step;
  RecurrentState shape;
  int32_t lanes;  // 8, 16 or 32
  int32_t tiles_along, tiles_across;
  RecurrentPointers states[kMostRecurrentStates];
};
static_assert(sizeof(RecurrentCommit) <= 4096, "drivers before R530 take no larger parameters");

template <int width>
PASS_EXT_DEVICE void load_neighbours(float (&value)[width], const float* from) {
  if constexpr (width == 4) {
    const Bytes16 bytes = load16(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = float_of(bytes.word[i]);
  } else {
    value[0] = from[0];
  }
}
template <int width>
PASS_EXT_DEVICE void store_neighbours(float* to, const float (&value)[width]) {
  if constexpr (width == 4) {
    Bytes16 bytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) bytes.word[i] = bits_of(value[i]);
    store16(to, bytes);
  } else {
    to[0] = value[0];
  }
}

// by_rows: rows of the state are neighbours in memory, else value columns.
template <bool by_rows, int width, Decay decay>
struct CommitTile {
  const RecurrentState& shape;
  const RecurrentPointers& state;
  int64_t head, first_key;
  int32_t length, across;                    // of the state, as it lies in memory
  int32_t along, first_across, tile_across;  // where this lane's and the tile's numbers begin; the tile's width
  int32_t group, count;                      // this lane's across: `count` from first_across + group on
  float value[kAcross][width];
  float rate[decay == Decay::element ? kAcross : 1][width];

  PASS_EXT_DEVICE CommitTile(const RecurrentCommit& commit, const RecurrentPointers& pointers, int64_t of_head,
                             int32_t tile)
      : shape(commit.shape), state(pointers), head(of_head) {
    const int32_t lane = static_cast<int32_t>(lane_index());
    across = static_cast<int32_t>(by_rows ? shape.dv : shape.dk);
    length = static_cast<int32_t>(by_rows ? shape.dk : shape.dv);
    along = (tile % commit.tiles_along * commit.lanes + lane % commit.lanes) * width;
    tile_across = 32 / commit.lanes * kAcross;
    first_across = tile / commit.tiles_along * tile_across;
    const uint32_t heads_of_key = static_cast<uint32_t>(shape.heads) / static_cast<uint32_t>(shape.key_heads);
    first_key = static_cast<uint32_t>(head) / heads_of_key * shape.key_head;
    group = lane / commit.lanes * kAcross;
    count = along < length ? across - first_across - group : 0;
  }

  PASS_EXT_DEVICE int64_t distance_along() const { return by_rows ? shape.layout.row : shape.layout.column; }
  PASS_EXT_DEVICE int64_t distance_across() const { return by_rows ? shape.layout.column : shape.layout.row; }

  PASS_EXT_DEVICE float* address(int64_t slot) const {
    return state.data + shape.layout.offset(slot, head) + along * distance_along() +
           (first_across + group) * distance_across();
  }

  PASS_EXT_DEVICE void load(int64_t slot) {
    const float* const from = address(slot);
#pragma unroll
    for (int a = 0; a < kAcross; ++a) {
#pragma unroll
      for (int w = 0; w < width; ++w) value[a][w] = 0.0f;
      if (a < count) load_neighbours(value[a], from + a * distance_across());
    }
    if constexpr (decay == Decay::element) {
      const int64_t first = first_across + group;
      const float* const rates =
          state.rates + head * shape.dk * shape.dv + (by_rows ? along * shape.dv + first : first * shape.dv + along);
#pragma unroll
      for (int a = 0; a < kAcross; ++a)
#pragma unroll
        for (int w = 0; w < width; ++w)
          rate[a][w] = a < count ? rates[by_rows ? w * shape.dv + a : a * shape.dv + w] : 0.0f;
    }
  }

  PASS_EXT_DEVICE void store(int64_t slot) const {
    float* const to = address(slot);
#pragma unroll
    for (int a = 0; a < kAcross; ++a)
      if (a < count) store_neighbours(to + a * distance_across(), value[a]);
  }

  PASS_EXT_DEVICE float key(int64_t row, int32_t i) const {
    return float_of_bits(load_bits(state.k, row * shape.key_row + first_key + i, shape.key_type), shape.key_type);
  }

  // The update of one node. head_decay: e^g where it belongs to a head.
  PASS_EXT_DEVICE void update(int64_t row, float head_decay) {
    const float* const u = state.u + (row * shape.heads + head) * shape.dv;
    const float* const log = state.log + (row * shape.heads + head) * (decay == Decay::channel ? shape.dk : shape.dv);
    float near[width], near_decay[width];  // along: u, or k where rows are neighbours; and their decays
    float far = 0.0f, far_decay = 0.0f;    // across, of one lane each
#pragma unroll
    for (int w = 0; w < width; ++w) near[w] = near_decay[w] = 0.0f;
    if (along < length) {
      if constexpr (by_rows) {
#pragma unroll
        for (int w = 0; w < width; ++w) {
          near[w] = key(row, along + w);
          if constexpr (decay == Decay::channel) near_decay[w] = decay_of(log[along + w]);
        }
      } else {
        load_neighbours(near, u + along);
        if constexpr (decay == Decay::element) load_neighbours(near_decay, log + along);
      }
    }
    const int32_t own = first_across + static_cast<int32_t>(lane_index());
    if (own < across && static_cast<int32_t>(lane_index()) < tile_across) {
      far = by_rows ? u[own] : key(row, own);
      if constexpr (decay == Decay::channel && !by_rows) far_decay = decay_of(log[own]);
      if constexpr (decay == Decay::element && by_rows) far_decay = log[own];
    }
#pragma unroll
    for (int a = 0; a < kAcross; ++a) {
      const float other = shuffle(far, group + a), other_decay = shuffle(far_decay, group + a);
#pragma unroll
      for (int w = 0; w < width; ++w) {
        float factor = head_decay;
        if constexpr (decay == Decay::channel) factor = by_rows ? near_decay[w] : other_decay;
        if constexpr (decay == Decay::element) factor = decay_of((by_rows ? other_decay : near_decay[w]) * rate[a][w]);
        value[a][w] = updated_state(factor * value[a][w], by_rows ? near[w] : other, by_rows ? other : near[w]);
      }
    }
  }
};

template <bool by_rows, int width, Decay decay>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kCommitThreads) replay_kernel(PASS_EXT_PARAMETER RecurrentCommit commit) {
  begin_kernel(commit);
  const uint32_t heads = static_cast<uint32_t>(commit.shape.heads);
  const uint32_t tiles = static_cast<uint32_t>(commit.tiles_along * commit.tiles_across);
  const uint32_t tile_of_request = block_index().x * (kCommitThreads / 32) + warp_index();
  const int64_t request = tile_of_request / tiles / heads;
  if (request >= commit.step.requests) return;
  const PathRows path(commit.step, request);
  const int64_t slot = slot_of(commit.step.state_index, request, commit.shape.layout.slots);
  if (path.accepted.length == 0 || slot < 0) return;
  const RecurrentPointers& state = commit.states[block_index().y];
  const uint32_t head = tile_of_request / tiles % heads;
  CommitTile<by_rows, width, decay> tile(commit, state, head, static_cast<int32_t>(tile_of_request % tiles));
  tile.load(slot);
  float own_decay = 0.0f;
  bool changes = false;
  path.for_each(
      [&](int64_t own) {
        if (decay == Decay::head && own >= 0) own_decay = decay_of(state.log[own * heads + head]);
      },
      [&](int64_t row, int lane) {
        tile.update(row, decay == Decay::head ? shuffle(own_decay, lane) : 0.0f);
        changes = true;
      });
  if (changes) tile.store(slot);
}

template <bool by_rows, int width>
void launch_replay(const RecurrentCommit& commit, int64_t states, Stream stream) {
  const int64_t warps = commit.step.requests * commit.shape.heads * commit.tiles_along * commit.tiles_across;
  const auto kernel = commit.shape.decay.kind == Decay::head      ? replay_kernel<by_rows, width, Decay::head>
                      : commit.shape.decay.kind == Decay::channel ? replay_kernel<by_rows, width, Decay::channel>
                                                                  : replay_kernel<by_rows, width, Decay::element>;
  constexpr int kWarps = kCommitThreads / 32;
  launch("state_commit_", kernel, LaunchShape{{(warps + kWarps - 1) / kWarps, states}, {kCommitThreads}}, stream,
         commit);
}

// True if all that a lane reads along is a multiple of 16 bytes.
inline bool is_wide(const RecurrentCommit& commit, int64_t states, bool by_rows) {
  const StateLayout& layout = commit.shape.layout;
  const int64_t next = by_rows ? layout.row : layout.column, other = by_rows ? layout.column : layout.row;
  const int64_t length = by_rows ? commit.shape.dk : commit.shape.dv;
  uint64_t bits = sizeof(float) * (length | layout.slot | layout.head | other);
  for (int64_t i = 0; i < states; ++i) {
    bits |= reinterpret_cast<uintptr_t>(commit.states[i].data) | reinterpret_cast<uintptr_t>(commit.states[i].u);
    if (commit.shape.decay.kind == Decay::element) bits |= reinterpret_cast<uintptr_t>(commit.states[i].log);
  }
  return next == 1 && bits % 16 == 0;
}

inline void launch_recurrent_commit(RecurrentCommit& commit, int64_t states, Stream stream) {
  const RecurrentState& shape = commit.shape;
  const bool by_rows = shape.layout.row == 1 && shape.layout.column != 1;
  const int64_t length = by_rows ? shape.dk : shape.dv, across = by_rows ? shape.dv : shape.dk;
  const bool wide = is_wide(commit, states, by_rows);
  const int64_t units = wide ? length / 4 : length;
  commit.lanes = units <= 8 ? 8 : units <= 16 ? 16 : 32;
  const int64_t tile_across = 32 / commit.lanes * kAcross;
  commit.tiles_along = static_cast<int32_t>((units + commit.lanes - 1) / commit.lanes);
  commit.tiles_across = static_cast<int32_t>((across + tile_across - 1) / tile_across);
  if (by_rows)
    wide ? launch_replay<true, 4>(commit, states, stream) : launch_replay<true, 1>(commit, states, stream);
  else
    wide ? launch_replay<false, 4>(commit, states, stream) : launch_replay<false, 1>(commit, states, stream);
}

// ---- convolutions: a thread owns a channel ----

struct ConvolutionPointers {
  char* data;
  const char* x;
};

struct ConvolutionCommit {
  StateStep step;
  ConvolutionState shape;
  int32_t channel_blocks;
  ConvolutionPointers states[kMostConvolutionStates];
};
static_assert(sizeof(ConvolutionCommit) <= 4096, "drivers before R530 take no larger parameters");

constexpr int kInputsAtOnce = 8;

template <typename Number>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kCommitThreads) shift_kernel(PASS_EXT_PARAMETER ConvolutionCommit commit) {
  begin_kernel(commit);
  PASS_EXT_SHARED(int32_t, rows, kMaxTreeNodes);
  const ConvolutionState& shape = commit.shape;
  const int64_t request = block_index().x / commit.channel_blocks;
  const PathRows path(commit.step, request);
  const int64_t slot = slot_of(commit.step.state_index, request, shape.slots);
  if (path.accepted.length == 0 || slot < 0) return;
  int64_t count = 0;
  path.for_each([](int64_t) {},
                [&](int64_t row, int) {
                  if (thread_rank() == 0) rows[count] = static_cast<int32_t>(row);
                  ++count;
                });
  sync_block();
  const int64_t channel = int64_t{block_index().x % commit.channel_blocks} * kCommitThreads + thread_rank();
  if (count == 0 || channel >= shape.channels) return;
  const ConvolutionPointers& state = commit.states[block_index().y];
  char* const window = state.data + slot * shape.slot + channel * shape.channel;
  const char* const x = state.x + channel * static_cast<int64_t>(sizeof(Number));
  // Input j becomes that `count` places later among the old inputs and the path's, so none is overwritten unread.
  for (int64_t first = 0; first < shape.inputs; first += kInputsAtOnce) {
    Number value[kInputsAtOnce] = {};
#pragma unroll
    for (int j = 0; j < kInputsAtOnce; ++j) {
      const int64_t from = first + j + count;
      if (first + j < shape.inputs)
        value[j] = *reinterpret_cast<const Number*>(from < shape.inputs ? window + from * shape.tap
                                                                        : x + rows[from - shape.inputs] * shape.row);
    }
#pragma unroll
    for (int j = 0; j < kInputsAtOnce; ++j)
      if (first + j < shape.inputs) *reinterpret_cast<Number*>(window + (first + j) * shape.tap) = value[j];
  }
}

inline void launch_convolution_commit(ConvolutionCommit& commit, int64_t states, Stream stream) {
  commit.channel_blocks = static_cast<int32_t>((commit.shape.channels + kCommitThreads - 1) / kCommitThreads);
  launch("state_commit_", commit.shape.bytes == 2 ? shift_kernel<uint16_t> : shift_kernel<uint32_t>,
         LaunchShape{{commit.step.requests * commit.channel_blocks, states}, {kCommitThreads}}, stream, commit);
}

// ---- all states: those of one shape in one launch ----

inline bool is_same_shape(const RecurrentState& a, const RecurrentState& b) {
  const auto numbers = [](const RecurrentState& s) {
    return std::make_tuple(s.layout.slots, s.layout.slot, s.layout.head, s.layout.row, s.layout.column, s.heads,
                           s.key_heads, s.dk, s.dv, s.key_row, s.key_head, s.key_type, s.decay.kind);
  };
  return numbers(a) == numbers(b);
}
inline bool is_same_shape(const ConvolutionState& a, const ConvolutionState& b) {
  const auto numbers = [](const ConvolutionState& s) {
    return std::make_tuple(s.slots, s.slot, s.channel, s.tap, s.channels, s.inputs, s.row, s.bytes);
  };
  return numbers(a) == numbers(b);
}

// True if there is nothing of it to write.
inline bool is_empty(const RecurrentState& state) {
  return state.layout.slots * state.heads * state.dk * state.dv == 0;
}
inline bool is_empty(const ConvolutionState& state) { return state.slots * state.channels * state.inputs == 0; }

// launch_some(the first of some states of one shape, all of these) until every state was among them.
template <typename State, typename Launch>
void launch_by_shape(const std::vector<State>& states, size_t most, Launch launch_some) {
  std::vector<char> is_done(states.size(), 0);
  for (size_t i = 0; i < states.size(); ++i) {
    if (is_done[i] || is_empty(states[i])) continue;
    std::vector<const State*> same;
    for (size_t j = i; j < states.size() && same.size() < most; ++j)
      if (!is_done[j] && is_same_shape(states[i], states[j])) {
        same.push_back(&states[j]);
        is_done[j] = 1;
      }
    launch_some(states[i], same);
  }
}

inline void launch_state_commit(const StateStep& step, const std::vector<RecurrentState>& recurrent,
                                const std::vector<ConvolutionState>& convolutions, Stream stream) {
  if (step.requests == 0 || step.width == 0) return;
  launch_by_shape(recurrent, kMostRecurrentStates,
                  [&](const RecurrentState& first, const std::vector<const RecurrentState*>& same) {
                    RecurrentCommit commit{step, first, 0, 0, 0, {}};
                    for (size_t i = 0; i < same.size(); ++i)
                      commit.states[i] = {same[i]->data, same[i]->k, same[i]->u, same[i]->decay.log,
                                          same[i]->decay.rates};
                    launch_recurrent_commit(commit, static_cast<int64_t>(same.size()), stream);
                  });
  launch_by_shape(convolutions, kMostConvolutionStates,
                  [&](const ConvolutionState& first, const std::vector<const ConvolutionState*>& same) {
                    ConvolutionCommit commit{step, first, 0, {}};
                    for (size_t i = 0; i < same.size(); ++i) commit.states[i] = {same[i]->data, same[i]->x};
                    launch_convolution_commit(commit, static_cast<int64_t>(same.size()), stream);
                  });
}

}  // namespace pass_ext::gpu
