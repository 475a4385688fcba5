// Attention of packed rows on the CPU by tiles (cpu/tiles.h), for queries, keys and values in bf16:
//   scores [key][row] = K [key][d] Q^T [d][row]             values [row][d] += P [row][column] V [column][d]
// A tile adds its even columns and its odd ones, each in their order, and both sums to those of the 32 columns before.
// So a key's place in a tile is its column (attention_tiles.h), and a row has its bits whatever other rows there are.
// Where keys share columns, vectors add the same numbers in the same order. The text follows that of
// attention_kernels-inl.h.

constexpr int32_t kTileSide = 16, kTileWords = kTileSide * kTileSide;  // rows of a tile, and words of a row
constexpr int32_t kTilesTogether = 2;                                  // on either side
constexpr int32_t kLeft = 4, kRight = 6;                               // their first tiles; tiles 0 to 3 are the sums
constexpr int32_t kSpan = 2 * kTileSide;                               // numbers in a row of a tile
constexpr int32_t kSpans = kTileColumns / kSpan;

// Weights in bf16, one to a word.
template <bool factors>
struct Tiled : Singles<bfloat16> {
  static constexpr bool has_factors = factors;

  static void put_weights(float* to, const Floats* weights, Floats& total) {
    const Words word = bits_of(weights[0]);  // halves up: weights are not negative
    const Floats weight = float_of((word + constant(word, 0x8000)) & constant(word, 0xffff0000u));
    store(to, weight);
    total = total + weight;
  }
};

// As long as this exists, denormal numbers are taken and given as 0, as by tiles.
class NoDenormals {
#if defined(__x86_64__)
 public:
  NoDenormals() : before_(__builtin_ia32_stmxcsr()) { set(before_ | 0x8040); }
  ~NoDenormals() { set(before_); }

 private:
  static void set(unsigned value) {
    asm volatile("" ::: "memory");  // what is read and written on one side stays there
    __builtin_ia32_ldmxcsr(value);
    asm volatile("" ::: "memory");
  }
  unsigned before_;
#endif
};

inline TileShapes whole_tiles() {
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) shapes.set(i, kTileSide, kTileSide * 4);
  return shapes;
}

inline int32_t tiles_for(int32_t numbers, int32_t each) { return (numbers + each - 1) / each; }

// sums (l, r) = sum over steps of tile left(l, step) times tile right(r, step). Rows of tiles lie so many bytes apart.
template <int lefts, int rights, typename Tiles, typename Left, typename Right, typename Sum>
void multiply_tiles(Tiles& tiles, int32_t steps, Left&& left, int64_t left_row, Right&& right, int64_t right_row,
                    Sum&& sum, int64_t sum_row) {
  constexpr auto each_left = std::make_integer_sequence<int, lefts>{};
  constexpr auto each_right = std::make_integer_sequence<int, rights>{};
  const auto each = [&](auto&& function) {
    each_of(each_left, [&](auto l) { each_of(each_right, [&](auto r) { function(l, r); }); });
  };
  each([&](auto l, auto r) { tiles.template zero<l * kTilesTogether + r>(); });
  for (int32_t step = 0; step < steps; ++step) {
    each_of(each_right, [&](auto r) { tiles.template load<kRight + r>(right(r, step), right_row); });
    each_of(each_left, [&](auto l) { tiles.template load<kLeft + l>(left(l, step), left_row); });
    each([&](auto l, auto r) { tiles.template add_products<l * kTilesTogether + r, kLeft + l, kRight + r>(); });
  }
  each([&](auto l, auto r) { tiles.template store<l * kTilesTogether + r>(sum(l, r), sum_row); });
}

// function(integral constants, first left tile, first right one) for all of them, two and two together.
template <typename Function>
void for_tiles(int32_t lefts, int32_t rights, Ahead& ahead, Function&& function) {
  for (int32_t l = 0; l < lefts; l += 2)
    for (int32_t r = 0; r < rights; r += 2) {
      ahead.fetch();
      with_tiles(l + 1 < lefts, r + 1 < rights, [&](auto left, auto right) { function(left, right, l, r); });
    }
}

// Tiles [block of rows][step][pair of numbers][row], missing ones zero.
inline void arrange_queries_for_tiles(const AttentionTask& task, int32_t steps, uint32_t* to) {
  const int32_t dim = task.problem->head_dim;
  const auto* const q = static_cast<const bfloat16*>(task.problem->q);
  memset(to, 0, sizeof(uint32_t) * tiles_for(task.rows, kTileSide) * steps * kTileWords);
  for (int32_t r = 0; r < task.rows; ++r) {
    uint32_t* const column = to + int64_t{r / kTileSide} * steps * kTileWords + r % kTileSide;
    const bfloat16* const row = q + task.packed_row(r) * dim;
    for (int32_t i = 0; i < dim / 2; ++i) memcpy(column + i * kTileSide, row + 2 * i, sizeof(uint32_t));
  }
}

struct KeyTiles {
  const bfloat16* data;
  int64_t row;
};

// Where they lie, if whole tiles lie evenly; else a copy with zeros behind it.
inline KeyTiles key_tiles(const TileRows<bfloat16>& rows, const AttentionScratch& scratch, int32_t dim) {
  const int32_t padded = tiles_for(dim, kSpan) * kSpan, count = tiles_for(rows.count, kTileSide) * kTileSide;
  if (rows.is_even && padded == dim && count == rows.count) return {rows.key[0], rows.key[1] - rows.key[0]};
  auto* const copy = reinterpret_cast<bfloat16*>(scratch.keys);
  memset(copy, 0, sizeof(bfloat16) * count * padded);
  for (int32_t i = 0; i < rows.count; ++i) memcpy(copy + i * padded, rows.key[i], sizeof(bfloat16) * dim);
  return {copy, padded};
}

// Pairs of neighbouring columns side by side, [pair][d], from the tile's column `offset` on; zeros where no key is.
// Values that are not finite become 0 unless all rows see all keys; returns true if there were any.
inline bool fill_value_tiles(const TileRows<bfloat16>& rows, const AttentionScratch& scratch, int32_t offset,
                             int32_t dim, bool all_seen) {
  auto* const spare = static_cast<bfloat16*>(scratch.row);
  bool left_out = false;
  for (int32_t pair = 0; pair < kTileColumns / 2; ++pair) {
    const bfloat16* source[2] = {};
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t key = 2 * pair + i - offset;
      if (key < 0 || key >= rows.count) continue;
      source[i] = all_seen ? rows.value[key] : cleaned(rows.value[key], spare + i * dim, dim);
      left_out |= source[i] != rows.value[key];
    }
    uint32_t* const to = scratch.values + int64_t{pair} * dim;
    for (int32_t d = 0; d < dim; d += Words::width) {
      const Words even = bits_of(source[0] ? load(source[0] + d) : zeros());
      const Words odd = bits_of(source[1] ? load(source[1] + d) : zeros());
      store_words(to + d, (shift_right_signed(even, 16) & constant(even, 0xffff)) ^ odd);
    }
  }
  return left_out;
}

// Weights [key, width], one to a word, as tiles [block of rows][span of columns][row][pair of columns].
inline void arrange_weights(const float* weights, int32_t width, int32_t keys, int32_t offset, uint32_t* to) {
  for (int32_t row = 0; row < width; row += Words::width)
    for (int32_t first = 0; first < kTileColumns / 2; first += Words::width) {
      Words block[Words::width];
#pragma GCC unroll 16
      for (int32_t i = 0; i < Words::width; ++i) {
        const int32_t key = 2 * (first + i) - offset;
        const auto word = [&](int32_t k) {
          return bits_of(k >= 0 && k < keys ? load(weights + k * width + row) : zeros());
        };
        block[i] = shift_right_signed(word(key), 16) ^ word(key + 1);  // weights are not negative
      }
      transpose(block);
      uint32_t* const tile = to + ((row / kTileSide) * kSpans + first / kTileSide) * kTileWords +
                             (row % kTileSide) * kTileSide + first % kTileSide;
      for (int32_t i = 0; i < Words::width; ++i) store_words(tile + i * kTileSide, block[i]);
    }
}

// The values of `rows` rows, first multiplied by their scale.
template <typename Tiles>
void add_value_tiles(Tiles& tiles, const uint32_t* weights, const uint32_t* values, int32_t rows, int32_t dim,
                     const float* scale, float* to, Ahead& ahead) {
  for_tiles(
      tiles_for(rows, kTileSide), dim / kTileSide, ahead, [&](auto lefts, auto rights, int32_t block, int32_t column) {
        alignas(64) float sums[kTilesTogether][kTileSide][kTilesTogether * kTileSide];
        multiply_tiles<lefts, rights>(
            tiles, kSpans,
            [&](int32_t l, int32_t span) { return weights + ((block + l) * kSpans + span) * kTileWords; },
            kTileSide * 4,
            [&](int32_t r, int32_t span) {
              return values + int64_t{span} * kTileSide * dim + (column + r) * kTileSide;
            },
            int64_t{dim} * 4, [&](int32_t l, int32_t r) { return &sums[l][0][r * kTileSide]; }, sizeof sums[0][0]);
        for (int32_t r = 0; r < minimum_of(lefts * kTileSide, rows - block * kTileSide); ++r) {
          const Floats times = spread(scale[block * kTileSide + r]);
          float* const row = to + int64_t{block * kTileSide + r} * dim + column * kTileSide;
          for (int32_t d = 0; d < rights * kTileSide; d += Floats::width)
            store(row + d, fused(load(row + d), times, load(&sums[0][r][d])));
        }
      });
}

// The keys of a tile by their span, then even columns before odd ones.
struct ColumnOrder {
  int32_t key[kTileKeys], end[2 * kSpans] = {};

  ColumnOrder(const AttentionTiles& tiles, int32_t first, int32_t count) {
    int32_t found = 0;
    for (int32_t part = 0; part < 2 * kSpans; ++part) {
      for (int32_t i = 0; i < count; ++i) {
        const int32_t column = tiles.column_at(first + i) % kTileColumns;
        if (column / kSpan * 2 + column % 2 == part) key[found++] = i;
      }
      end[part] = found;
    }
  }
};

// As add_value_tiles, for weights [key, width] of keys that share columns. order: of the values that `values` has.
inline void add_value_vectors(const float* weights, int32_t width, const ColumnOrder& order,
                              const bfloat16* const* values, const AttentionScratch& scratch, int32_t rows, int32_t dim,
                              float* to, Ahead& ahead) {
  const int32_t keys = order.end[2 * kSpans - 1];
  float* const ordered = reinterpret_cast<float*>(scratch.weights);
  for (int32_t i = 0; i < keys; ++i) memcpy(ordered + i * width, weights + order.key[i] * width, width * sizeof(float));
  for (int32_t row = 0; row < rows; row += kTileSide) {
    const int32_t count = static_cast<int32_t>(minimum_of(kTileSide, rows - row)), numbers = count * dim;
    float *const sums = scratch.sums, *const even = sums + kTileSide * dim, *const odd = even + kTileSide * dim;
    {
      [[maybe_unused]] const NoDenormals none{};  // empty on ARM
      for (int32_t part = 0, begin = 0; part < 2 * kSpans; begin = order.end[part++]) {
        multiply(Product<float, ValuesInPlace<Singles<bfloat16>>>{ordered + begin * width + row,
                                                                  1,
                                                                  width,
                                                                  {values + begin},
                                                                  order.end[part] - begin,
                                                                  part % 2 ? odd : even,
                                                                  dim,
                                                                  nullptr},
                 count, dim, ahead);
        if (part % 2 == 0) continue;
        for (int32_t i = 0; i < numbers; i += Floats::width)
          store(sums + i, (part == 1 ? zeros() : load(sums + i)) + (load(even + i) + load(odd + i)));
      }
    }
    for (int32_t r = 0; r < count; ++r)
      for (int32_t d = 0; d < dim; d += Floats::width) {
        float* const place = to + int64_t{row + r} * dim + d;
        store(place, fused(load(place), spread(scratch.scale[row + r]), load(sums + r * dim + d)));
      }
  }
}

// T: of rows in memory.
template <typename Tiles, typename T>
void attend_in_tiles(const AttentionTask& task, const AttentionScratch& scratch, const PartialRows& result) {
  using Form = Tiled<!std::is_same_v<T, bfloat16>>;
  const AttentionProblem& problem = *task.problem;
  const int32_t value_dim = problem.value_dim, steps = tiles_for(problem.head_dim, kSpan);
  if (!task.has_queries) arrange_queries_for_tiles(task, steps, scratch.queries);
  float* const scores = reinterpret_cast<float*>(scratch.scores);
  Tiles tiles(whole_tiles());
  begin_rows(task, result);
  for_each_tile<Form, T>(
      task, scratch, [&](const TileRows<bfloat16>& tile, const TileFactors& factors, int32_t first, Ahead& ahead) {
        const int32_t keys = tile.count, key_groups = tiles_for(keys, kTileSide);
        const bool all_seen = task.tiles->all_see(problem, task.request, first, keys);
        const bool are_columns = task.tiles->are_columns(first, keys);
        const KeyTiles key_rows = key_tiles(tile, scratch, problem.head_dim);
        const ColumnOrder order(*task.tiles, first, are_columns ? 0 : keys);
        const int32_t offset = task.tiles->column_at(first) % kTileColumns;
        const bfloat16* values[kTileKeys];
        bool left_out = false;
        if (are_columns) left_out = fill_value_tiles(tile, scratch, offset, value_dim, all_seen);
        for (int32_t i = 0; !are_columns && i < keys; ++i) {
          const bfloat16* const row = tile.value[order.key[i]];
          values[i] = cleaned(row, reinterpret_cast<bfloat16*>(scratch.values) + int64_t{i} * value_dim, value_dim);
          left_out |= values[i] != row;
        }
        const int32_t row_pairs = tiles_for(task.rows, 2 * kTileSide);
        ahead.share(row_pairs * (tiles_for(key_groups, 2) + tiles_for(value_dim, 2 * kTileSide)));
        const bool is_raw = all_seen && problem.softcap == 0.0f && !Form::has_factors;
        for (int32_t row = 0; row < task.rows; row += kMostBlockRows) {
          const int32_t rows = static_cast<int32_t>(minimum_of(kMostBlockRows, task.rows - row));
          const int32_t blocks = tiles_for(rows, kTileSide), width = blocks * kTileSide;
          for_tiles(key_groups, blocks, ahead, [&](auto lefts, auto rights, int32_t group, int32_t block) {
            multiply_tiles<lefts, rights>(
                tiles, steps,
                [&](int32_t l, int32_t step) {
                  return key_rows.data + (group + l) * kTileSide * key_rows.row + step * kSpan;
                },
                key_rows.row * int64_t{sizeof(bfloat16)},
                [&](int32_t r, int32_t step) {
                  return scratch.queries + ((row / kTileSide + block + r) * int64_t{steps} + step) * kTileWords;
                },
                kTileSide * 4,
                [&](int32_t l, int32_t r) {
                  return scores + (group + l) * kTileSide * width + (block + r) * kTileSide;
                },
                width * int64_t{sizeof(float)});
          });
          if (!is_raw)
            finish_scores(task, scores, width, row, rows, first, keys, all_seen,
                          Form::has_factors ? factors.key : nullptr);
          const float factor = is_raw ? problem.scale * kLog2E : 1.0f;
          for (int32_t r = 0; r < width; r += Floats::width)
            store(scratch.scale + r, weigh<Form>(scores + r, width, keys, factor, result.maximum + row + r,
                                                 result.total + row + r, result.exact_total + row + r, factors));
          float* const to = result.values + int64_t{row} * value_dim;
          if (are_columns) {
            arrange_weights(scores, width, keys, offset, scratch.weights);
            add_value_tiles(tiles, scratch.weights, scratch.values, rows, value_dim, scratch.scale, to, ahead);
          } else {
            add_value_vectors(scores, width, order, values, scratch, rows, value_dim, to, ahead);
          }
        }
        if (left_out) add_left_out(task, first, tile, result);
      });
}

template <typename Tiles>
void attend_by_tiles(const AttentionTask& task, const AttentionScratch& scratch, const PartialRows& result) {
  if (task.codes == CodeType::none)
    attend_in_tiles<Tiles, bfloat16>(task, scratch, result);
  else
    attend_in_tiles<Tiles, uint8_t>(task, scratch, result);
}
