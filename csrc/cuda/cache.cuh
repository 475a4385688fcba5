// Committing accepted rows to the caches on the GPU: one launch for all tensors of the same layout. A thread owns a
// column of one tensor, up to 16 bytes of a row, and moves it for every row: loads of up to eight rows before their
// stores. Sources and targets: core/cache.h.
//
// A row that does not fit is left out, because an error message would need a synchronisation. The Python op has a
// switch that checks first.
#pragma once

#include "core/cache.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kMostTensors = 240;  // per launch: they fit a kernel's parameter on every driver
constexpr int kMostColumnThreads = 128;
constexpr int kRowsAtOnce = 8;
constexpr int64_t kStageBytes = 32 * 1024;

struct CommitLaunch {
  CommitStep step;
  CacheShape shape;
  int64_t columns, column_blocks;
  int32_t stage_pieces;  // columns times rows that fit in shared memory; 0: no path is long enough to need it
  void* caches[kMostTensors];
  const void* fresh[kMostTensors];
};
static_assert(sizeof(CommitLaunch) <= 4096, "drivers before R530 take no larger parameters");

template <int bytes>
struct PieceType;
template <>
struct PieceType<16> {
  using type = Bytes16;
};
template <>
struct PieceType<8> {
  using type = uint64_t;
};
template <>
struct PieceType<4> {
  using type = uint32_t;
};
template <>
struct PieceType<2> {
  using type = uint16_t;
};
template <>
struct PieceType<1> {
  using type = uint8_t;
};
template <int bytes>
using Piece = typename PieceType<bytes>::type;

template <int bytes>
PASS_EXT_DEVICE Piece<bytes> load_piece(const char* from) {
  if constexpr (bytes == 16)
    return load16(from);
  else
    return *reinterpret_cast<const Piece<bytes>*>(from);
}

template <int bytes>
PASS_EXT_DEVICE void store_piece(char* to, Piece<bytes> piece) {
  if constexpr (bytes == 16)
    store16(to, piece);
  else
    *reinterpret_cast<Piece<bytes>*>(to) = piece;
}

// A column of this block's tensor; the offset of a row is added to its addresses.
template <int bytes, bool in_place>
struct Column {
  char* to;
  const char* from;

  PASS_EXT_DEVICE Column(const CommitLaunch& launch, int64_t column) {
    const int64_t pieces = launch.shape.head_bytes / bytes;
    const int64_t head = column / pieces, byte = column % pieces * bytes;
    to = static_cast<char*>(launch.caches[block_index().y]) + head * launch.shape.head + byte;
    if constexpr (in_place)
      from = to;
    else
      from = static_cast<const char*>(launch.fresh[block_index().y]) + head * launch.shape.fresh_head + byte;
  }
};

// True if some node lies before its target. The same in every warp.
PASS_EXT_DEVICE bool goes_back(const CommitStep& step, const RequestCommit& request) {
  for (int32_t base = 0; base < request.rows; base += 32) {
    const int32_t j = base + static_cast<int32_t>(lane_index());
    const int64_t node = j < request.rows ? node_of(step, request, j) : -1;
    if (any(node >= 0 && node < j)) return true;
  }
  return false;
}

// Any path: as many of the block's columns at once as fit in shared memory; reads all rows, then writes all.
template <int bytes>
PASS_EXT_DEVICE void commit_staged(const CommitLaunch& launch, const RequestCommit& request, int64_t begin,
                                   int64_t end) {
  Piece<bytes>* const stage = dynamic_shared<Piece<bytes>>();
  const int32_t at_once = launch.stage_pieces / request.rows;
  for (int64_t first = begin; first < end; first += at_once) {
    const int32_t count = static_cast<int32_t>(end - first < at_once ? end - first : at_once);
    const auto for_each_piece = [&](auto function) {
      for (int32_t i = static_cast<int32_t>(thread_index().x); i < request.rows * count;
           i += static_cast<int32_t>(block_size().x)) {
        const RowMove move = move_of(launch.step, launch.shape, request, i / count);
        if (move.from >= 0) function(move, Column<bytes, true>(launch, first + i % count), stage[i]);
      }
    };
    for_each_piece([](const RowMove& move, const Column<bytes, true>& column, Piece<bytes>& staged) {
      staged = load_piece<bytes>(column.from + move.from);
    });
    sync_block();  // for the caches; in `stage` a thread writes only what it read itself
    for_each_piece([](const RowMove& move, const Column<bytes, true>& column, Piece<bytes>& staged) {
      store_piece<bytes>(column.to + move.to, staged);
    });
  }
}

template <int bytes, bool in_place>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kMostColumnThreads) commit_kernel(PASS_EXT_PARAMETER CommitLaunch launch) {
  begin_kernel(launch);
  const RequestCommit request = commit_of(launch.step, block_index().x / launch.column_blocks);
  if (request.rows == 0) return;
  const int64_t begin = block_index().x % launch.column_blocks * block_size().x;
  if constexpr (in_place) {
    // Up to kRowsAtOnce rows are read before the first is written in any case.
    if (request.rows > kRowsAtOnce && goes_back(launch.step, request)) {
      const int64_t end = begin + block_size().x < launch.columns ? begin + block_size().x : launch.columns;
      commit_staged<bytes>(launch, request, begin, end);
      return;
    }
  }
  const bool has_column = begin + thread_index().x < launch.columns;
  const Column<bytes, in_place> column(launch, has_column ? begin + thread_index().x : 0);
  for (int32_t base = 0; base < request.rows; base += 32) {
    const int32_t j = base + static_cast<int32_t>(lane_index());
    const RowMove move = j < request.rows ? move_of(launch.step, launch.shape, request, j) : RowMove{-1, -1};
    unsigned moves = ballot(move.from >= 0);
    while (moves != 0) {
      Piece<bytes> piece[kRowsAtOnce] = {};
      int64_t to[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        to[i] = -1;
        if (moves == 0) continue;
        const int lane = first_set_bit(moves);
        moves &= moves - 1;
        const int64_t from = shuffle(move.from, lane);
        to[i] = shuffle(move.to, lane);
        if (has_column) piece[i] = load_piece<bytes>(column.from + from);
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i)
        if (has_column && to[i] >= 0) store_piece<bytes>(column.to + to[i], piece[i]);
    }
  }
}

template <int bytes>
void launch_commit(CommitLaunch& launch, int64_t tensors, Stream stream) {
  launch.columns = launch.shape.heads * (launch.shape.head_bytes / bytes);
  const int64_t warps = (launch.columns + 31) / 32;
  const int64_t threads = warps * 32 < kMostColumnThreads ? warps * 32 : kMostColumnThreads;
  launch.column_blocks = (launch.columns + threads - 1) / threads;
  const CommitStep& step = launch.step;
  const int64_t most = kStageBytes / bytes, needed = threads * step.width;
  launch.stage_pieces =
      !step.in_place || step.width <= kRowsAtOnce ? 0 : static_cast<int32_t>(needed < most ? needed : most);
  const LaunchShape shape{{step.requests * launch.column_blocks, tensors},
                          {static_cast<unsigned>(threads)},
                          static_cast<size_t>(launch.stage_pieces) * bytes};
  if (step.in_place)
    gpu::launch("cache_commit_", commit_kernel<bytes, true>, shape, stream, launch);
  else
    gpu::launch("cache_commit_", commit_kernel<bytes, false>, shape, stream, launch);
}

// The widest piece into which all rows of these tensors divide.
inline int widest_piece(const CommitLaunch& launch, int64_t tensors) {
  const CacheShape& shape = launch.shape;
  uint64_t bits = 16 | shape.outer | shape.slot | shape.head | shape.fresh_row | shape.fresh_head | shape.head_bytes;
  for (int64_t i = 0; i < tensors; ++i)
    bits |= reinterpret_cast<uintptr_t>(launch.caches[i]) | reinterpret_cast<uintptr_t>(launch.fresh[i]);
  return static_cast<int>(bits & (~bits + 1));
}

// `fresh` is null in place. More than kMostTensors tensors take several launches.
inline void launch_cache_commit(const CommitStep& step, const CacheShape& shape, void* const* caches,
                                const void* const* fresh, int64_t count, Stream stream) {
  if (step.requests == 0 || step.width == 0 || shape.heads == 0 || shape.head_bytes == 0) return;
  for (int64_t first = 0; first < count; first += kMostTensors) {
    const int64_t tensors = count - first < kMostTensors ? count - first : kMostTensors;
    CommitLaunch launch{step, shape, 0, 0, 0, {}, {}};
    for (int64_t i = 0; i < tensors; ++i) {
      launch.caches[i] = caches[first + i];
      if (fresh) launch.fresh[i] = fresh[first + i];
    }
    switch (widest_piece(launch, tensors)) {
      case 16: launch_commit<16>(launch, tensors, stream); break;
      case 8: launch_commit<8>(launch, tensors, stream); break;
      case 4: launch_commit<4>(launch, tensors, stream); break;
      case 2: launch_commit<2>(launch, tensors, stream); break;
      default: launch_commit<1>(launch, tensors, stream);
    }
  }
}

}  // namespace pass_ext::gpu
