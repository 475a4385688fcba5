// A linear layer for few rows on the CPU, at one instruction set (see each_isa.h). Weights and rows are both read along
// `in`, two vectors a step. A tile of kTileOutputs outputs times up to kTileRows rows keeps its sums in registers, a
// vector each. Every sum has one order, lane by lane and step by step, whatever tile it is in: neither the other rows
// nor the threads change a bit.

#if PASS_EXT_LEVEL >= 2
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 2;
#endif
constexpr int kStep = 2 * Floats::width;
static_assert(kMostStep % kStep == 0 && kPiece % kStep == 0, "");
inline int64_t padded_to_step(int64_t in) { return (in + kStep - 1) / kStep * kStep; }

// A piece of the weights: kTileOutputs rows as stored, from a multiple of kPiece on. It has `whole` steps and, at the
// end of the rows, perhaps a padded one.
template <typename T>
struct Piece {
  const T* row[kTileOutputs];
  const char* ahead[kTileOutputs];  // a later piece, to be prefetched
  T last[kTileOutputs][kStep];
  int64_t whole, steps;
  bool is_first, is_last;  // the first piece of its rows, the last one

  Piece(const LinearRows<T>& problem, int64_t output, int64_t begin) {
    const int64_t length = problem.in - begin < kPiece ? problem.in - begin : kPiece;
    whole = length / kStep;
    steps = (length + kStep - 1) / kStep;
    is_first = begin == 0;
    is_last = begin + length == problem.in;
    const bool next_tile = begin + kPiece >= problem.in;
    for (int o = 0; o < kTileOutputs; ++o) {
      row[o] = weights_of(problem, output + o) + begin;
      const T* next = next_tile ? weights_of(problem, output + kTileOutputs + o) : row[o] + kPiece;
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

// Arranges x rows [first, first + R) in the order of multiplication: [step][half][row][lane].
template <typename T>
void arrange_rows(const LinearRows<T>& problem, int64_t first, int rows, float* to) {
  for (int64_t i = 0; i < problem.in; i += kStep)
    for (int r = 0; r < rows; ++r) {
      const T* from = problem.x + (first + r) * problem.x_row + i;
      T padded[kStep];
      if (problem.in - i < kStep) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, from, (problem.in - i) * sizeof(T));
        from = padded;
      }
      store(to + i * rows + r * Floats::width, load_half<0>(from));
      store(to + i * rows + (rows + r) * Floats::width, load_half<1>(from));
    }
}

template <int R>
inline void add_products(Floats (&sum)[R][kTileOutputs], const Floats (&weight)[kTileOutputs], const float* x) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Floats left = load(x + r * Floats::width);
#pragma GCC unroll 16
    for (int o = 0; o < kTileOutputs; ++o) sum[r][o] = fused(left, weight[o], sum[r][o]);
  }
}

template <int half, bool keeps, typename T>
inline void load_weights(Floats (&weight)[kTileOutputs], const T* const (&row)[kTileOutputs], int64_t offset,
                         float* widened) {
#pragma GCC unroll 16
  for (int o = 0; o < kTileOutputs; ++o) {
    weight[o] = load_half<half>(row[o] + offset);
    if (keeps) store(widened + (half * kTileOutputs + o) * Floats::width, weight[o]);
  }
}

// The sums of a tile stay in registers while a piece is multiplied. `between` holds them from one piece of the rows to
// the next, and `to` gets the result.
template <int R>
inline void start_sums(Floats (&sum)[R][kTileOutputs], bool is_first, const float* between) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int o = 0; o < kTileOutputs; ++o)
      sum[r][o] = is_first ? zeros() : load(between + (r * kTileOutputs + o) * Floats::width);
}
template <int R>
inline void end_sums(const Floats (&sum)[R][kTileOutputs], bool is_last, float* between, float* to) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    if (is_last) {
      store_sums(to + r * kGroupOutputs, sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
    } else {
#pragma GCC unroll 16
      for (int o = 0; o < kTileOutputs; ++o) store(between + (r * kTileOutputs + o) * Floats::width, sum[r][o]);
    }
}

// A block of rows: its part of x for the piece, and the places of its sums.
struct Block {
  const float* x;
  float *between, *to;
  int64_t begin, part;  // the lines of a later piece to prefetch meanwhile, in 64ths
};

template <typename T>
inline void ask_for(const Piece<T>& piece, const Block& block, int64_t step) {
  const int64_t near = (block.begin * piece.steps + block.part * step) * kStep * int64_t{sizeof(T)} / 64;
#pragma GCC unroll 16
  for (int o = 0; o < kTileOutputs; ++o) __builtin_prefetch(piece.ahead[o] + near, 0, 3);
}

// Multiplies a piece by its first rows. Widens the weights and, if `keeps`, stores them widened for further rows.
template <int R, bool keeps, typename T>
void multiply_first(const Piece<T>& piece, const Block& block, float* widened) {
  Floats sum[R][kTileOutputs];
  start_sums<R>(sum, piece.is_first, block.between);
  const float* x = block.x;
  for (int64_t s = 0; s < piece.whole; ++s) {
    ask_for(piece, block, s);
    Floats weight[kTileOutputs];
    load_weights<0, keeps>(weight, piece.row, s * kStep, widened);
    add_products<R>(sum, weight, x);
    load_weights<1, keeps>(weight, piece.row, s * kStep, widened);
    add_products<R>(sum, weight, x + R * Floats::width);
    x += R * kStep;
    widened += keeps ? kTileOutputs * kStep : 0;
  }
  if (piece.steps != piece.whole) {
    const T* last[kTileOutputs];
    for (int o = 0; o < kTileOutputs; ++o) last[o] = piece.last[o];
    Floats weight[kTileOutputs];
    load_weights<0, keeps>(weight, last, 0, widened);
    add_products<R>(sum, weight, x);
    load_weights<1, keeps>(weight, last, 0, widened);
    add_products<R>(sum, weight, x + R * Floats::width);
  }
  end_sums<R>(sum, piece.is_last, block.between, block.to);
}

// Multiplies a piece that is stored widened by further rows.
template <int R, typename T>
void multiply_widened(const Piece<T>& piece, const Block& block, const float* widened) {
  Floats sum[R][kTileOutputs];
  start_sums<R>(sum, piece.is_first, block.between);
  const float* x = block.x;
  for (int64_t s = 0; s < piece.steps; ++s) {
    ask_for(piece, block, s);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Floats weight[kTileOutputs];
#pragma GCC unroll 16
      for (int o = 0; o < kTileOutputs; ++o) weight[o] = load(widened + (half * kTileOutputs + o) * Floats::width);
      add_products<R>(sum, weight, x + half * R * Floats::width);
    }
    x += R * kStep;
    widened += kTileOutputs * kStep;
  }
  end_sums<R>(sum, piece.is_last, block.between, block.to);
}

// Calls function(integral constant R).
template <int R>
struct RowCount {
  static constexpr int value = R;
};
template <typename Function>
inline void with_rows(int rows, Function&& function) {
  switch (rows) {
    case 1: return function(RowCount<1>{});
    case 2: return function(RowCount<2>{});
#if PASS_EXT_LEVEL >= 2
    case 3: return function(RowCount<3>{});
    case 4: return function(RowCount<4>{});
    case 5: return function(RowCount<5>{});
    case 6: return function(RowCount<6>{});
#endif
  }
}

// Cuts `rows` rows into blocks of nearly equal size, the larger ones first.
struct RowBlocks {
  int64_t rows, count;

  explicit RowBlocks(int64_t rows) : rows(rows), count((rows + kTileRows - 1) / kTileRows) {}
  int64_t begin(int64_t block) const {
    const int64_t larger = rows % count;
    return block * (rows / count) + (block < larger ? block : larger);
  }
  int size(int64_t block) const { return static_cast<int>(begin(block + 1) - begin(block)); }
};

// Computes the sums [rows, kGroupOutputs] of the rows in the scratch, for outputs [begin, end).
template <typename T>
void multiply_group(const LinearRows<T>& problem, const LinearScratch& scratch, const RowBlocks& blocks, int64_t begin,
                    int64_t end) {
  const int64_t width = padded_to_step(problem.in), part = 64 / blocks.count;
  for (int64_t output = begin; output < end; output += kTileOutputs)
    for (int64_t i = 0; i == 0 || i < problem.in; i += kPiece) {
      const Piece<T> piece(problem, output, i);
      for (int64_t b = 0; b < blocks.count; ++b) {
        const int64_t row = blocks.begin(b);
        const Block block{scratch.x + row * width + i * blocks.size(b),
                          scratch.between + row * kTileOutputs * Floats::width,
                          scratch.sums + row * kGroupOutputs + output - begin, b * part, part};
        with_rows(blocks.size(b), [&](auto count) {
          constexpr int R = decltype(count)::value;
          if (b > 0)
            multiply_widened<R>(piece, block, scratch.weights);
          else if (blocks.count > 1)
            multiply_first<R, true>(piece, block, scratch.weights);
          else
            multiply_first<R, false>(piece, block, scratch.weights);
        });
      }
    }
}

// Adds the bias to sums and rounds them to the rows' results.
template <typename T>
void finish_group(const LinearRows<T>& problem, const float* sums, int64_t first, int64_t rows, int64_t begin,
                  int64_t end) {
  for (int64_t r = 0; r < rows; ++r) {
    T* const to = problem.out + (first + r) * problem.outputs;
    const float* from = sums + r * kGroupOutputs - begin;
    int64_t o = begin;
    for (; o + Floats::width <= end; o += Floats::width)
      store(to + o, problem.bias ? load(from + o) + load(problem.bias + o) : load(from + o));
    for (; o < end; ++o) to[o] = from_float<T>(problem.bias ? from[o] + to_float(problem.bias[o]) : from[o]);
  }
}

// Computes outputs [begin, end) of all rows. If the scratch does not hold all rows at once, it takes a group of outputs
// at a time, whose weights stay in the cache from one set of rows to the next.
template <typename T>
void multiply_rows(const LinearRows<T>& problem, const LinearScratch& scratch, int64_t begin, int64_t end) {
  const int64_t width = padded_to_step(problem.in);
  const bool fits = problem.rows <= scratch.rows;
  for (int64_t group = begin; group < end; group += kGroupOutputs) {
    const int64_t group_end = group + kGroupOutputs < end ? group + kGroupOutputs : end;
    for (int64_t first = 0; first < problem.rows; first += scratch.rows) {
      const int64_t rows = problem.rows - first < scratch.rows ? problem.rows - first : scratch.rows;
      const RowBlocks blocks(rows);
      if (!fits || group == begin)
        for (int64_t block = 0; block < blocks.count; ++block)
          arrange_rows(problem, first + blocks.begin(block), blocks.size(block),
                       scratch.x + blocks.begin(block) * width);
      multiply_group(problem, scratch, blocks, group, group_end);
      finish_group(problem, scratch.sums, first, rows, group, group_end);
    }
  }
}
