// A linear layer for few rows on the CPU, at one instruction set (see each_isa.h). Weights and rows are both read along
// `in`, two vectors a step; a tile of kTileOutputs outputs times up to kTileRows rows keeps its sums in registers, a
// vector each. Every sum has one order, lane by lane and step by step, whatever tile it is in: neither the other rows nor
// the threads change a bit. Called by cpu/linear.cpp with ranges of outputs.

#if PASS_EXT_LEVEL >= 2
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 2;
#endif
constexpr int kStep = 2 * Floats::width;

// The weights of a tile on their way through: as they are stored, `whole` steps and a last one that is padded.
template <typename T>
struct TileWeights {
  const T* row[kTileOutputs];
  const char* ahead[kTileOutputs];  // rows of the next tile
  T last[kTileOutputs][kStep];
  int64_t whole, steps;

  TileWeights(const LinearRows<T>& problem, int64_t first, int64_t next) {
    whole = problem.in / kStep;
    steps = (problem.in + kStep - 1) / kStep;
    for (int o = 0; o < kTileOutputs; ++o) {
      row[o] = weights_of(problem, first + o);
      ahead[o] = reinterpret_cast<const char*>(weights_of(problem, next + o));
      if (steps == whole) continue;
      const int64_t rest = problem.in - whole * kStep;
      memset(last[o], 0, sizeof last[o]);
      memcpy(last[o], row[o] + whole * kStep, rest * sizeof(T));
    }
  }

  // Behind the last output: that one again, for nobody.
  static const T* weights_of(const LinearRows<T>& problem, int64_t output) {
    return problem.weight + (output < problem.outputs ? output : problem.outputs - 1) * problem.weight_row;
  }
};

// x rows [first, first + R), as they are multiplied: [step][half][row][lane].
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
                         float* kept) {
#pragma GCC unroll 16
  for (int o = 0; o < kTileOutputs; ++o) {
    weight[o] = load_half<half>(row[o] + offset);
    if (keeps) store(kept + (half * kTileOutputs + o) * Floats::width, weight[o]);
  }
}

template <int R>
inline void store_tile(const Floats (&sum)[R][kTileOutputs], float* to) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) store_sums(to + r * kGroupOutputs, sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
}

#define PASS_EXT_CLEAR(sum)                                   \
  _Pragma("GCC unroll 16") for (int r = 0; r < R; ++r)        \
      _Pragma("GCC unroll 16") for (int o = 0; o < kTileOutputs; ++o) sum[r][o] = zeros()

// The tile for its first rows: widens the weights, and keeps them so for further rows. `part` of 64: how much of the
// next tile's lines is asked for meanwhile.
template <int R, bool keeps, typename T>
void multiply_first(const TileWeights<T>& weights, const float* x, float* kept, int64_t part, float* to) {
  Floats sum[R][kTileOutputs];
  PASS_EXT_CLEAR(sum);
  for (int64_t s = 0; s < weights.whole; ++s) {
    const int64_t near = s * kStep * int64_t{sizeof(T)} * part / 64;
#pragma GCC unroll 16
    for (int o = 0; o < kTileOutputs; ++o) __builtin_prefetch(weights.ahead[o] + near, 0, 3);
    Floats weight[kTileOutputs];
    load_weights<0, keeps>(weight, weights.row, s * kStep, kept);
    add_products<R>(sum, weight, x);
    load_weights<1, keeps>(weight, weights.row, s * kStep, kept);
    add_products<R>(sum, weight, x + R * Floats::width);
    x += R * kStep;
    kept += keeps ? kTileOutputs * kStep : 0;
  }
  if (weights.steps != weights.whole) {
    const T* last[kTileOutputs];
    for (int o = 0; o < kTileOutputs; ++o) last[o] = weights.last[o];
    Floats weight[kTileOutputs];
    load_weights<0, keeps>(weight, last, 0, kept);
    add_products<R>(sum, weight, x);
    load_weights<1, keeps>(weight, last, 0, kept);
    add_products<R>(sum, weight, x + R * Floats::width);
  }
  store_tile<R>(sum, to);
}

// The tile for further rows. `begin`, in 64ths, and `part`: of the next tile's rows, as above.
template <int R, typename T>
void multiply_kept(const TileWeights<T>& weights, const float* x, const float* kept, int64_t begin, int64_t part,
                   float* to) {
  Floats sum[R][kTileOutputs];
  PASS_EXT_CLEAR(sum);
  const int64_t skipped = begin * weights.whole * kStep * int64_t{sizeof(T)} / 64;
  for (int64_t s = 0; s < weights.steps; ++s) {
    const int64_t near = skipped + s * kStep * int64_t{sizeof(T)} * part / 64;
#pragma GCC unroll 16
    for (int o = 0; o < kTileOutputs; ++o) __builtin_prefetch(weights.ahead[o] + near, 0, 3);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Floats weight[kTileOutputs];
#pragma GCC unroll 16
      for (int o = 0; o < kTileOutputs; ++o) weight[o] = load(kept + (half * kTileOutputs + o) * Floats::width);
      add_products<R>(sum, weight, x + half * R * Floats::width);
    }
    x += R * kStep;
    kept += kTileOutputs * kStep;
  }
  store_tile<R>(sum, to);
}
#undef PASS_EXT_CLEAR

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

// How `rows` rows are cut: blocks of nearly equal size, the larger ones first.
struct RowBlocks {
  int64_t rows, count;

  explicit RowBlocks(int64_t rows) : rows(rows), count((rows + kTileRows - 1) / kTileRows) {}
  int64_t begin(int64_t block) const {
    const int64_t larger = rows % count;
    return block * (rows / count) + (block < larger ? block : larger);
  }
  int size(int64_t block) const { return static_cast<int>(begin(block + 1) - begin(block)); }
};

// Sums of the rows from `first` on, [rows, kGroupOutputs], for outputs [begin, end); the scratch holds those rows.
template <typename T>
void multiply_group(const LinearRows<T>& problem, const LinearScratch& scratch, const RowBlocks& blocks, int64_t begin,
                    int64_t end) {
  const int64_t width = (problem.in + kStep - 1) / kStep * kStep;
  const int64_t part = 64 / blocks.count;
  for (int64_t output = begin; output < end; output += kTileOutputs) {
    const TileWeights<T> weights(problem, output, output + kTileOutputs);
    float* const to = scratch.sums + (output - begin);
    with_rows(blocks.size(0), [&](auto count) {
      constexpr int R = decltype(count)::value;
      if (blocks.count == 1)
        multiply_first<R, false>(weights, scratch.x, scratch.weights, part, to);
      else
        multiply_first<R, true>(weights, scratch.x, scratch.weights, part, to);
    });
    for (int64_t block = 1; block < blocks.count; ++block) {
      const int64_t row = blocks.begin(block);
      with_rows(blocks.size(block), [&](auto count) {
        multiply_kept<decltype(count)::value>(weights, scratch.x + row * width, scratch.weights, block * part, part,
                                              to + row * kGroupOutputs);
      });
    }
  }
}

// Rounds sums to the rows' results, bias added before.
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

// Outputs [begin, end) of all rows. Where the scratch does not hold all rows at once, a group of outputs at a time, whose
// weights stay in the cache from one set of rows to the next.
template <typename T>
void multiply_rows(const LinearRows<T>& problem, const LinearScratch& scratch, int64_t begin, int64_t end) {
  const int64_t width = (problem.in + kStep - 1) / kStep * kStep;
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
