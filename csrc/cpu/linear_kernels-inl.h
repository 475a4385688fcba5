// A linear layer for few rows on the CPU, at one instruction set (see each_isa.h). Weights and rows are both read along
// `in`, a step of 2 * Floats::width numbers at a time: as one vector of bf16 pairs if the processor multiplies those,
// else as two vectors of fp32. A tile of O outputs times R rows keeps its sums in registers, a vector each. Every sum
// has one order, lane by lane and step by step, whatever tile it is in: neither the other rows nor the threads change a
// bit.

#include "cpu/row_blocks-inl.h"

constexpr int kStep = 2 * Floats::width;
static_assert(kMostStep % kStep == 0 && kPiece % kStep == 0, "");
inline int64_t padded_to_step(int64_t in) { return (in + kStep - 1) / kStep * kStep; }

// The vectors of a step. Arranged: as rows lie in the order of multiplication.
template <typename T>
struct Factors {
  using Vector = Floats;
  using Arranged = float;
  static constexpr int parts = 2, width = Floats::width;
  template <int part>
  static Vector of(const T* from) {
    return load_half<part>(from);
  }
  static Vector arranged(const float* from) { return load(from); }
  static void arrange(float* to, Vector value) { store(to, value); }
  static Floats add_product(Floats sum, Vector a, Vector b) { return fused(a, b, sum); }
};
#if PASS_EXT_LEVEL == 3
template <>
struct Factors<bfloat16> {
  using Vector = Words;
  using Arranged = uint32_t;  // a pair
  static constexpr int parts = 1, width = Floats::width;
  template <int part>
  static Vector of(const bfloat16* from) {
    return {_mm512_loadu_si512(from)};
  }
  static Vector arranged(const uint32_t* from) { return load_words(from); }
  static void arrange(uint32_t* to, Vector value) { store_words(to, value); }
  static Floats add_product(Floats sum, Vector a, Vector b) { return sum_of_products(sum, a, b); }
};
#endif

// The shape of a tile: its sums and a vector of each output's weights fit the registers. Pairs are multiplied so fast
// that more rows at once pay.
#if PASS_EXT_LEVEL == 3
constexpr int tile_outputs(int rows) { return rows <= 6 ? 4 : 3; }
#elif PASS_EXT_LEVEL == 2
constexpr int tile_outputs(int) { return 4; }
#elif PASS_EXT_LEVEL == 1
constexpr int tile_outputs(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 3 : 2; }
#else
constexpr int tile_outputs(int) { return 4; }
#endif
static_assert(tile_outputs(1) <= kMostTileOutputs, "");

// Outputs [begin, end) as tiles of O that lie `count` apart. So each of the O runs through memory of its own, row
// behind row, and the processor's prefetchers, which follow a run to the end of its page, work on O pages at once.
template <int O>
struct Tiles {
  int64_t begin, end, count;

  Tiles(int64_t begin, int64_t end) : begin(begin), end(end), count((end - begin + O - 1) / O) {}
  // Of tiles behind the last: outputs of the next group.
  int64_t output(int64_t tile, int o) const { return (tile < count ? begin : end - count) + tile + o * count; }
};

// How many tiles ahead weights are asked for: two where a tile of several rows is multiplied so fast, as pairs are,
// that one tile ahead comes too late.
constexpr int tiles_ahead(int rows) { return PASS_EXT_LEVEL == 3 && rows > 4 ? 2 : 1; }

// A piece of the weights of O outputs: rows as stored, from a multiple of kPiece on. It has `whole` steps and, at the
// end of the rows, perhaps a padded one.
template <typename T, int O>
struct Piece {
  const T* row[O];
  const char* ahead[O];  // a later piece, to be prefetched
  T last[O][kStep];
  int64_t whole, steps;
  bool is_first, is_last;  // the first piece of its rows, the last one

  Piece(const LinearRows<T>& problem, const Tiles<O>& tiles, int64_t tile, int64_t begin, int ahead_by) {
    const int64_t length = problem.in - begin < kPiece ? problem.in - begin : kPiece;
    whole = length / kStep;
    steps = (length + kStep - 1) / kStep;
    is_first = begin == 0;
    is_last = begin + length == problem.in;
    const bool next_tile = begin + kPiece >= problem.in;
    for (int o = 0; o < O; ++o) {
      row[o] = weights_of(problem, tiles.output(tile, o)) + begin;
      const T* next = next_tile ? weights_of(problem, tiles.output(tile + ahead_by, o)) : row[o] + kPiece;
      ahead[o] = reinterpret_cast<const char*>(next);
      if (steps == whole) continue;
      memset(last[o], 0, sizeof last[o]);
      memcpy(last[o], row[o] + whole * kStep, (length - whole * kStep) * sizeof(T));
    }
  }

  // Behind the last output the last one again; its sums are not used.
  static const T* weights_of(const LinearRows<T>& problem, int64_t output) {
    return problem.weight + (output < problem.outputs ? output : problem.outputs - 1) * problem.weight_row;
  }
};

// Arranges x rows [first, first + rows) in the order of multiplication: [step][part][row][lane].
template <typename T>
void arrange_block(const LinearRows<T>& problem, int64_t first, int rows, typename Factors<T>::Arranged* to) {
  using F = Factors<T>;
  for (int64_t i = 0; i < problem.in; i += kStep) {
    for (int r = 0; r < rows; ++r) {
      const T* from = problem.x + (first + r) * problem.x_row + i;
      T padded[kStep];
      if (problem.in - i < kStep) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, from, (problem.in - i) * sizeof(T));
        from = padded;
      }
      F::arrange(to + r * F::width, F::template of<0>(from));
      if constexpr (F::parts == 2) F::arrange(to + (rows + r) * F::width, F::template of<1>(from));
    }
    to += rows * F::parts * F::width;
  }
}

template <typename T, int R, int O>
inline void add_products(Floats (&sum)[R][O], const typename Factors<T>::Vector (&weight)[O],
                         const typename Factors<T>::Arranged* x) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    auto left = Factors<T>::arranged(x + r * Factors<T>::width);
#if PASS_EXT_LEVEL == 1 && defined(__x86_64__)
    asm("" : "+x"(left.lanes));  // else GCC reads it again for each product, and loads bound this level
#endif
#pragma GCC unroll 16
    for (int o = 0; o < O; ++o) sum[r][o] = Factors<T>::add_product(sum[r][o], left, weight[o]);
  }
}

// Where a tile's weights come from: as stored, with or without a copy for further blocks, or from that copy. The copy
// [step][part][output][lane] is already widened, and lies in the first cache in one run. Pairs need no widening: a few
// further blocks read them again as stored, from the first cache, and ask for no later ones, as the first block does.
enum class Weights { stored, copied, copy, again };
template <typename T>
constexpr bool kAreWidened = Factors<T>::parts == 2;
constexpr int64_t kMostBlocksAgain = 3;  // with more the memory would rest too long behind the first block

template <Weights source, int part, typename T, int O>
inline void load_weights(typename Factors<T>::Vector (&weight)[O], const T* const (&row)[O], int64_t offset,
                         typename Factors<T>::Arranged* copy) {
  using F = Factors<T>;
#pragma GCC unroll 16
  for (int o = 0; o < O; ++o) {
    auto* const place = copy + (part * O + o) * F::width;
    weight[o] = source == Weights::copy ? F::arranged(place) : F::template of<part>(row[o] + offset);
    if (source == Weights::copied) F::arrange(place, weight[o]);
  }
}

template <Weights source, typename T, int R, int O>
inline void add_step(Floats (&sum)[R][O], const T* const (&row)[O], int64_t offset,
                     const typename Factors<T>::Arranged* x, typename Factors<T>::Arranged* copy) {
  using F = Factors<T>;
  typename F::Vector weight[O];
  load_weights<source, 0>(weight, row, offset, copy);
  add_products<T>(sum, weight, x);
  if constexpr (F::parts == 2) {
    load_weights<source, 1>(weight, row, offset, copy);
    add_products<T>(sum, weight, x + R * F::width);
  }
}

// Whole cache lines of an output's weights that a step reads.
template <typename T>
constexpr int kLinesInStep = kStep * sizeof(T) / 64;

// Cache lines of a later piece, which the steps of all blocks ask for in equal shares: line i is the one of output
// i % O at i / O lines. They go to the second cache, because the first one tracks too few misses for the memory's
// bandwidth; asked for in a burst they would fill what it tracks, and the loads of this piece would wait for memory.
struct Lines {
  static constexpr int kFraction = 16;  // bits of `due` and `each` behind the point
  uint32_t each, due, asked;            // lines of a step, of all steps so far, asked for

  Lines(int64_t lines, int64_t steps, int64_t first_step)
      : each(steps > 0 ? static_cast<uint32_t>(((lines << kFraction) + steps - 1) / steps) : 0),
        due(each * static_cast<uint32_t>(first_step)),
        asked(due >> kFraction) {}
  template <int O>
  void ask(const char* const (&rows)[O]) {
    for (due += each; asked < due >> kFraction; ++asked) __builtin_prefetch(rows[asked % O] + asked / O * 64, 0, 2);
  }
};

// A block of rows: its part of x for the piece, and the places of its sums.
template <typename T>
struct Block {
  const typename Factors<T>::Arranged* x;
  typename Factors<T>::Arranged* copy;
  float *between, *to;
  int64_t apart;  // numbers between the results of two outputs of the tile
  Lines lines;
};

// The sums of a tile stay in registers while a piece is multiplied. `between` holds them from one piece of the rows to
// the next, and `to` gets the result.
template <int R, int O, Weights source, typename T>
void multiply_block(const Piece<T, O>& piece, const Block<T>& block) {
  constexpr int64_t kVectorsInStep = Factors<T>::parts * Factors<T>::width;
  Floats sum[R][O];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int o = 0; o < O; ++o)
      sum[r][o] = piece.is_first ? zeros() : load(block.between + (r * O + o) * Floats::width);
  const auto* x = block.x;
  auto* copy = block.copy;
  Lines lines = block.lines;
  for (int64_t s = 0; s < piece.whole; ++s) {
    // A block alone asks in each step for as many lines as it reads; nothing needs to be counted.
    if constexpr (source == Weights::stored && kLinesInStep<T> > 0) {
#pragma GCC unroll 16
      for (int i = 0; i < kLinesInStep<T> * O; ++i)
        __builtin_prefetch(piece.ahead[i % O] + (s * kLinesInStep<T> + i / O) * 64, 0, 2);
    } else if constexpr (source != Weights::again) {
      lines.ask(piece.ahead);
    }
    add_step<source>(sum, piece.row, s * kStep, x, copy);
    x += R * kVectorsInStep;
    copy += O * kVectorsInStep;
  }
  if (piece.steps != piece.whole) {
    const T* last[O];
    for (int o = 0; o < O; ++o) last[o] = piece.last[o];
    add_step<source>(sum, last, 0, x, copy);
  }
  if (!piece.is_last) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int o = 0; o < O; ++o) store(block.between + (r * O + o) * Floats::width, sum[r][o]);
    return;
  }
  // Four sums at a time, whatever rows they are of.
#pragma GCC unroll 16
  for (int i = 0; i < R * O; i += 4) {
    const auto at = [&](int j) -> const Floats& { return j < R * O ? sum[j / O][j % O] : sum[i / O][i % O]; };
    float sums[4];
    store_sums(sums, at(i), at(i + 1), at(i + 2), at(i + 3));
    for (int j = i; j < i + 4 && j < R * O; ++j) block.to[j / O * kGroupOutputs + j % O * block.apart] = sums[j - i];
  }
}

// Arranges rows [first, first + rows) of x, block behind block.
template <typename T>
void arrange_rows(const LinearRows<T>& problem, int64_t first, int64_t rows, void* memory) {
  const RowBlocks blocks(rows);
  auto* const to = static_cast<typename Factors<T>::Arranged*>(memory);
  const int64_t width = padded_to_step(problem.in) / kStep * Factors<T>::parts * Factors<T>::width;
  for (int64_t block = 0; block < blocks.count; ++block)
    arrange_block(problem, first + blocks.begin(block), blocks.size(block), to + blocks.begin(block) * width);
}

template <int O, typename T>
void multiply_tiles(const LinearRows<T>& problem, const RowBlocks& blocks, const void* memory,
                    const LinearScratch& scratch, float* sums, int64_t begin, int64_t end) {
  using F = Factors<T>;
  const auto* const arranged = static_cast<const typename F::Arranged*>(memory);
  const int64_t in_step = F::parts * F::width, width = padded_to_step(problem.in) / kStep * in_step;
  const Tiles<O> tiles(begin, end);
  for (int64_t tile = 0; tile < tiles.count; ++tile)
    for (int64_t i = 0; i == 0 || i < problem.in; i += kPiece) {
      const Piece<T, O> piece(problem, tiles, tile, i, tiles_ahead(blocks.size(0)));
      const int64_t lines = (piece.whole * kStep * int64_t{sizeof(T)} + 63) / 64 * O;
      const bool reads_again = !kAreWidened<T> && blocks.count <= kMostBlocksAgain;
      const bool are_counted = kLinesInStep<T> == 0 || (blocks.count > 1 && !reads_again);
      for (int64_t b = 0; b < blocks.count; ++b) {
        const int64_t row = blocks.begin(b);
        const Block<T> block{arranged + row * width + i / kStep * in_step * blocks.size(b),
                             reinterpret_cast<typename F::Arranged*>(scratch.copy),
                             scratch.between + row * O * Floats::width,
                             sums + row * kGroupOutputs + tile,
                             tiles.count,
                             are_counted ? Lines(lines, piece.whole * blocks.count, piece.whole * b) : Lines(0, 0, 0)};
        with_rows(blocks.size(b), [&](auto count) {
          constexpr int R = decltype(count)::value;
          // The first block, the largest, has chosen O; the others have one row less at most, and half a tile or more.
          constexpr bool is_largest = tile_outputs(R) == O, is_less = R < kTileRows && tile_outputs(R + 1) == O;
          constexpr bool is_of_several = 2 * R >= kTileRows;
          if (b == 0) {
            if constexpr (is_largest) {
              if (blocks.count == 1 || reads_again)
                multiply_block<R, O, Weights::stored>(piece, block);
              else if constexpr (is_of_several)
                multiply_block<R, O, Weights::copied>(piece, block);
            }
          } else if constexpr (is_of_several && (is_largest || is_less)) {
            if (!reads_again)
              multiply_block<R, O, Weights::copy>(piece, block);
            else if constexpr (!kAreWidened<T>)
              multiply_block<R, O, Weights::again>(piece, block);
          }
        });
      }
    }
}

// Computes the sums [rows, kGroupOutputs] of arranged rows for outputs [begin, end), at most kGroupOutputs of them.
template <typename T>
void multiply_group(const LinearRows<T>& problem, int64_t rows, const void* arranged, const LinearScratch& scratch,
                    float* sums, int64_t begin, int64_t end) {
  const RowBlocks blocks(rows);
  switch (tile_outputs(blocks.size(0))) {
    case 2: return multiply_tiles<2>(problem, blocks, arranged, scratch, sums, begin, end);
    case 3: return multiply_tiles<3>(problem, blocks, arranged, scratch, sums, begin, end);
    default: return multiply_tiles<4>(problem, blocks, arranged, scratch, sums, begin, end);
  }
}

// A product of some neighbouring outputs, rounded: sums [count] and their biases, or null.
template <typename T>
inline Floats finished(const float* sums, const T* bias, int64_t count) {
  const Floats sum = load_first(sums, count);
  return rounded<T>(bias ? sum + load_first(bias, count) : sum);
}

// sums[n][o - begin] = sum over j of hidden[n][j] up[j][o] for R rows with one adapter, outputs [begin, end).
template <int R, typename T>
void up_sums(const float* const* hidden, const T* up, int64_t rank, int64_t outputs, float* const* sums, int64_t begin,
             int64_t end) {
  for (int64_t o = begin; o < end; o += Floats::width) {
    Floats sum[R];
#pragma GCC unroll 16
    for (int n = 0; n < R; ++n) sum[n] = zeros();
    for (int64_t j = 0; j < rank; ++j) {
      const Floats weight = load_first(up + j * outputs + o, outputs - o);
#pragma GCC unroll 16
      for (int n = 0; n < R; ++n) sum[n] = fused(constant(Floats{}, hidden[n][j]), weight, sum[n]);
    }
#pragma GCC unroll 16
    for (int n = 0; n < R; ++n) store(sums[n] + o - begin, sum[n]);
  }
}

// The sums of all rows of slots among rows [first, first + rows), [rows, kGroupOutputs]; an adapter is read once for
// every four of its rows.
template <typename T>
void up_sums_of_rows(const AddedRows<T>& added, int64_t first, int64_t rows, float* sums, int64_t begin, int64_t end) {
  constexpr int kAtOnce = 4;
  const float* hidden[kAtOnce];
  float* to[kAtOnce];
  for (int64_t place = 0; added.hidden && place < added.places;) {
    const int64_t adapter = added.adapter[place];
    int count = 0;
    for (; count < kAtOnce && place < added.places && added.adapter[place] == adapter; ++place) {
      const int64_t row = added.row[place] - first;
      if (row < 0 || row >= rows) continue;
      hidden[count] = added.hidden + place * added.rank;
      to[count++] = sums + row * kGroupOutputs;
    }
    const T* const up = added.up + adapter * added.rank * added.outputs;
    switch (count) {
      case 1: up_sums<1>(hidden, up, added.rank, added.outputs, to, begin, end); break;
      case 2: up_sums<2>(hidden, up, added.rank, added.outputs, to, begin, end); break;
      case 3: up_sums<3>(hidden, up, added.rank, added.outputs, to, begin, end); break;
      case 4: up_sums<4>(hidden, up, added.rank, added.outputs, to, begin, end); break;
    }
  }
}

// A product of neighbouring outputs, rounded, with what its row adds, rounded again.
template <typename T>
inline Floats with_adapter(const AddedRows<T>& added, int64_t row, const float* sums, Floats value) {
  if (!added.hidden || added.place[row] < 0) return value;
  return rounded<T>(fused(constant(Floats{}, added.scale), load(sums), value));
}

// Rows [first, first + rows) of the result, for outputs [begin, end).
template <typename T>
void finish_group(const LinearRows<T>& problem, const AddedRows<T>& added, int64_t first, int64_t rows,
                  const LinearScratch& scratch, int64_t begin, int64_t end) {
  up_sums_of_rows(added, first, rows, scratch.added, begin, end);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t o = begin; o < end; o += Floats::width) {
      const int64_t place = (first + r) * problem.outputs + o, sum = r * kGroupOutputs + o - begin, count = end - o;
      Floats value = finished(scratch.sums + sum, problem.bias ? problem.bias + o : nullptr, count);
      value = with_adapter(added, first + r, scratch.added + sum, value);
      value = scaled<T>(value, problem.scale);
      if (problem.residual) value = load_first(problem.residual + place, count) + value;
      store_first(problem.out + place, value, count);
    }
}

template <Activation activation, typename T>
void finish_gated(const GatedRows<T>& problem, const AddedRows<T>* added, int64_t first, int64_t rows,
                  const LinearScratch& scratch, int64_t begin, int64_t end) {
  const T *gate_bias = problem.gate.bias, *up_bias = problem.up.bias;
  const int64_t second = scratch.rows * kGroupOutputs;  // where the numbers of `up` begin
  for (int i = 0; i < 2; ++i) up_sums_of_rows(added[i], first, rows, scratch.added + i * second, begin, end);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t o = begin; o < end; o += Floats::width) {
      const int64_t place = r * kGroupOutputs + o - begin, count = end - o;
      Floats gate = finished(scratch.sums + place, gate_bias ? gate_bias + o : nullptr, count);
      Floats up = finished(scratch.sums + second + place, up_bias ? up_bias + o : nullptr, count);
      gate = with_adapter(added[0], first + r, scratch.added + place, gate);
      up = with_adapter(added[1], first + r, scratch.added + second + place, up);
      store_first(problem.out + (first + r) * problem.gate.outputs + o, gated<T, activation>(gate, up), count);
    }
}

template <typename T>
void finish_group(const GatedRows<T>& problem, const AddedRows<T>* added, int64_t first, int64_t rows,
                  const LinearScratch& scratch, int64_t begin, int64_t end) {
  switch (problem.activation) {
    case Activation::silu: return finish_gated<Activation::silu>(problem, added, first, rows, scratch, begin, end);
    case Activation::gelu_tanh:
      return finish_gated<Activation::gelu_tanh>(problem, added, first, rows, scratch, begin, end);
  }
}
