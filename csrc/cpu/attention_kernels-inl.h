// Attention of packed rows on the CPU, at one instruction set (see each_isa.h). Keys and values come in tiles
// (attention_tiles.h), converted once for all rows of a task. Scores lie [key, row]: everything about a row happens in
// its own lane, nothing is summed across lanes, and a row adds its keys one after the other. Both products are the same
// loop,
//   C[m][n] = sum over k of A[m][k] B[k][n],    A read number by number, B and C as vectors along n:
//   scores [key][row]  = K [key][d] Q^T [d][row]            values [row][d] += P [row][key] V [key][d]
// in fp32, or in pairs of bf16 (Pairs) if the processor multiplies those. Few rows have the same sums of other loops
// (attention_few-inl.h), and read values where they lie.

#include "cpu/product-inl.h"
#include "cpu/turn-inl.h"

#include "cpu/attention_codes-inl.h"
#include "cpu/attention_forms-inl.h"

#include "cpu/attention_few-inl.h"

// ---- a tile ----

template <typename Form>
struct Keys {
  const typename Form::Element* data;
  int64_t row;
};

// The scales of a tile's keys and values, where these are factors.
struct TileFactors {
  float key[kTileKeys], value[kTileKeys];
};

// Rows of codes as numbers, in `to`. With factors: without their scales, unless these are not finite; then the numbers
// are that, and the factor 1.
template <typename Form>
void decode_tile(const AttentionTask& task, const TileRows<uint8_t>& codes, float* to,
                 TileRows<typename Form::Storage>& rows, TileFactors& factors) {
  using T = typename Form::Storage;
  const int32_t key_dim = task.problem->head_dim, value_dim = task.problem->value_dim;
  rows.count = codes.count;
  rows.is_even = true;
  T* const keys = reinterpret_cast<T*>(to);
  T* const values = keys + int64_t{kTileKeys} * key_dim;
  const auto put = [&](const uint8_t* row, T* numbers, int32_t dim) {
    const float scale = scale_of_codes(row);
    const bool is_factor = Form::has_factors && scale - scale == 0.0f;
    decode(task.codes, row, is_factor ? 1.0f : scale, numbers, dim);
    return is_factor ? scale : 1.0f;
  };
  for (int32_t i = 0; i < codes.count; ++i) {
    T* const key = keys + int64_t{i} * key_dim;
    factors.key[i] = factors.value[i] = put(codes.key[i], key, key_dim);
    rows.key[i] = rows.value[i] = key;
    if (codes.value[i] == codes.key[i]) continue;  // the first numbers of the key
    T* const value = values + int64_t{i} * value_dim;
    rows.value[i] = value;
    factors.value[i] = put(codes.value[i], value, value_dim);
  }
}

template <typename T>
bool is_finite(const T* row, int32_t dim) {
  Floats sum = zeros();  // 0, unless a number is NaN or infinite
  for (int32_t d = 0; d < dim; d += Floats::width) sum = fused(load(row + d), zeros(), sum);
  return sum_lanes(sum) == 0.0f;
}

// The row with zeros in place of values that are not finite: a hidden key's weight is 0, but 0 times infinity is NaN.
template <typename T>
const T* cleaned(const T* row, T* to, int32_t dim) {
  if (is_finite(row, dim)) return row;
  for (int32_t d = 0; d < dim; ++d) {
    const float value = to_float(row[d]);
    to[d] = value - value == 0.0f ? row[d] : from_float<T>(0.0f);
  }
  return to;
}

// The keys as the product reads them: in place if they are stored as elements, else converted.
template <typename Form>
Keys<Form> keys_of(const TileRows<typename Form::Storage>& rows, const AttentionScratch& scratch, int32_t dim) {
  using E = typename Form::Element;
  if constexpr (Form::is_stored_so)
    if (rows.is_even && reinterpret_cast<uintptr_t>(rows.key[0]) % sizeof(E) == 0 &&
        (rows.count == 1 || (rows.key[1] - rows.key[0]) % Form::size == 0))
      return {reinterpret_cast<const E*>(rows.key[0]), rows.count == 1 ? 0 : (rows.key[1] - rows.key[0]) / Form::size};
  E* const tile = reinterpret_cast<E*>(scratch.keys);
  for (int32_t i = 0; i < rows.count; ++i) Form::put_key(tile, i, rows.key[i], dim);
  return {tile, dim / Form::size};
}

// Values as a product's columns, where they lie.
template <typename Form>
struct ValuesInPlace {
  const typename Form::Storage* const* rows;

  auto at(int64_t step, int64_t column) const { return Form::values(rows + step * Form::size, column); }
};

// Fills the tile of values, padded with zeros to a whole element. If some row does not see some key, values that are
// not finite become 0; returns true if there were any.
template <typename Form>
bool fill_values(const TileRows<typename Form::Storage>& rows, const AttentionScratch& scratch, int32_t dim,
                 bool all_seen) {
  using T = typename Form::Storage;
  T* const spare = static_cast<T*>(scratch.row);
  bool left_out = false;
  for (int32_t first = 0; first < rows.count; first += Form::size) {
    const T* sources[Form::size];
    for (int i = 0; i < Form::size; ++i) {
      T* const copy = spare + i * dim;
      if (first + i >= rows.count) {
        memset(copy, 0, dim * sizeof(T));
        sources[i] = copy;
        continue;
      }
      sources[i] = all_seen ? rows.value[first + i] : cleaned(rows.value[first + i], copy, dim);
      left_out |= sources[i] != rows.value[first + i];
    }
    auto* const to = reinterpret_cast<typename Form::Element*>(scratch.values) + int64_t{first} / Form::size * dim;
    for (int32_t d = 0; d < dim; d += Floats::width) put_lanes(to + d, Form::values(sources, d));
  }
  return left_out;
}

// Bit c of word r becomes bit r of word c.
inline void transpose_bits(uint64_t (&word)[64]) {
  uint64_t mask = 0x00000000ffffffffull;
  for (int half = 32; half != 0; half /= 2, mask ^= mask << half)
    for (int r = 0; r < 64; r = ((r | half) + 1) & ~half) {
      const uint64_t swapped = (word[r] >> half ^ word[r | half]) & mask;
      word[r] ^= swapped << half;
      word[r | half] ^= swapped;
    }
}

// Turns raw products into logits in powers of two; -inf where a row does not see a key. factors: of keys, or null.
inline void finish_scores(const AttentionTask& task, float* scores, int64_t row_length, int32_t first_row, int32_t rows,
                          int32_t first, int32_t keys, bool all_seen, const float* factors) {
  const AttentionProblem& problem = *task.problem;
  uint64_t seen[kTileKeys] = {};  // by key: the rows that see it
  for (int32_t key = 0; !all_seen && key < keys; key += 64) {
    uint64_t (&word)[64] = *reinterpret_cast<uint64_t (*)[64]>(seen + key);
    for (int32_t r = 0; r < rows; ++r)
      word[r] = r > 0 && task.node_of(first_row + r) == task.node_of(first_row + r - 1)
                    ? word[r - 1]
                    : task.tiles->visible(problem, task.request, task.node_of(first_row + r), first + key);
    transpose_bits(word);
  }
  const float times = problem.softcap > 0.0f ? problem.scale : problem.scale * kLog2E;
  const Floats cap = spread(problem.softcap), log2e = spread(kLog2E), nothing = spread(-kInfinity);
  for (int32_t key = 0; key < keys; ++key) {
    const Floats scale = spread(factors ? times * factors[key] : times);
    for (int64_t r = 0; r < row_length; r += Floats::width) {
      Floats s = load(scores + key * row_length + r) * scale;
      if (problem.softcap > 0.0f) s = softcapped(s, cap) * log2e;
      if (!all_seen) s = select(mask_of_bits(static_cast<uint32_t>(seen[key] >> r)), s, nothing);
      store(scores + key * row_length + r, s);
    }
  }
}

// Turns the scores [keys, row_length] of one vector of rows, times `factor`, into weights 2^(s - maximum), in place.
// Updates totals and maximum. Returns the factor for the rows' values so far. With factors, those of values multiply
// the weights, whose rounding then has no total of its own.
template <typename Form>
Floats weigh(float* scores, int64_t row_length, int32_t keys, float factor, float* row_maximum, float* total,
             float* exact_total, const TileFactors& factors) {
  const Floats times = spread(factor), before = load(row_maximum);
  Floats highest[2] = {before, before};
  int32_t key = 0;
  for (; key + 2 <= keys; key += 2)
    for (int i = 0; i < 2; ++i) highest[i] = maximum(highest[i], load(scores + (key + i) * row_length) * times);
  if (key < keys) highest[0] = maximum(highest[0], load(scores + key * row_length) * times);
  const Floats now = maximum(highest[0], highest[1]);
  const Floats minus = zeros() - now, scale = power_of_two(before - now);
  Floats sum = zeros(), exact = zeros();
  auto* to = reinterpret_cast<typename Form::Element*>(scores);
  for (key = 0; key < keys; key += Form::size) {
    Floats weights[Form::size];
    for (int i = 0; i < Form::size; ++i) {
      // Rounded before it is subtracted, as in the maximum: an unrounded product may be far from that when logits are
      // billions.
      weights[i] = key + i < keys ? power_of_two(load(scores + (key + i) * row_length) * times + minus) : zeros();
      exact = exact + weights[i];
      if constexpr (Form::has_factors)
        if (key + i < keys) weights[i] = weights[i] * spread(factors.value[key + i]);
    }
    Form::put_weights(to + key / Form::size * row_length, weights, sum);
  }
  store(row_maximum, now);
  store(total, fused(load(total), scale, Form::has_factors ? exact : sum));
  store(exact_total, fused(load(exact_total), scale, exact));
  return scale;
}

// ---- a task ----

// The distance of the columns in the block of rows that begins at `row`: its rows, rounded up to whole vectors.
inline int32_t width_of_block(const AttentionTask& task, int32_t row) {
  const int32_t rows = static_cast<int32_t>(minimum_of(kBlockRows, task.rows - row));
  return (rows + Floats::width - 1) / Floats::width * Floats::width;
}

// [block of rows][step][row in block], missing rows zero. Few rows: [row][step].
template <typename Form>
void arrange_queries(const AttentionTask& task, typename Form::Element* to) {
  using T = typename Form::Query;
  const int32_t dim = task.problem->head_dim, steps = dim / Form::size;
  const T* q = static_cast<const T*>(task.problem->q);
  if (is_of_few<Form>(task)) {
    for (int32_t r = 0; r < task.rows; ++r)
      for (int32_t i = 0; i < steps; ++i) to[r * steps + i] = Form::query(q + task.packed_row(r) * dim, i);
    return;
  }
  for (int32_t first = 0; first < task.rows; first += kBlockRows) {
    const int32_t width = width_of_block(task, first);
    for (int32_t r = 0; r < width; ++r) {
      typename Form::Element* column = to + int64_t{first} * steps + r;
      const T* row = first + r < task.rows ? q + task.packed_row(first + r) * dim : nullptr;
      for (int32_t i = 0; i < steps; ++i) column[i * width] = row ? Form::query(row, i) : 0;
    }
  }
}

// Adds values that are not finite to the rows that see their keys: those sums become NaN or infinite, no other changes.
template <typename T>
void add_left_out(const AttentionTask& task, int32_t first, const TileRows<T>& tile, const PartialRows& result) {
  const AttentionProblem& problem = *task.problem;
  const int32_t dim = problem.value_dim;
  for (int32_t key = 0; key < tile.count; ++key) {
    const int32_t place = first + key;
    const T* row = tile.value[key];
    if (is_finite(row, dim)) continue;
    for (int32_t r = 0; r < task.rows; ++r) {
      if (!(task.tiles->visible(problem, task.request, task.node_of(r), place) & 1)) continue;
      for (int32_t d = 0; d < dim; ++d) {
        const float value = to_float(row[d]);
        if (value - value != 0.0f) result.values[int64_t{r} * dim + d] += value;
      }
    }
  }
}

// Of no keys yet.
inline void begin_rows(const AttentionTask& task, const PartialRows& result) {
  const int32_t padded = (task.rows + kMostBlockRows - 1) / kMostBlockRows * kMostBlockRows;
  memset(result.values, 0, sizeof(float) * task.rows * task.problem->value_dim);
  for (int32_t r = 0; r < padded; ++r) {
    result.maximum[r] = -kLargest;
    result.total[r] = result.exact_total[r] = 0.0f;
  }
}

// function(rows, their factors, place of the first key, lines of the next ones) for the tiles of a task, or so much of
// one as there is room for. T: of rows in memory.
template <typename Form, typename T, typename Function>
void for_each_tile(const AttentionTask& task, const AttentionScratch& scratch, Function&& function) {
  constexpr bool has_codes = !std::is_same_v<T, typename Form::Storage>;
  constexpr int32_t header = has_codes ? kCodeHeader : 0;
  const int32_t key_bytes = header + task.problem->head_dim * static_cast<int32_t>(sizeof(T));
  const int32_t value_bytes = header + task.problem->value_dim * static_cast<int32_t>(sizeof(T));
  TileRows<T> tiles[2];
  std::conditional_t<has_codes, TileRows<typename Form::Storage>, char> decoded;
  TileFactors factors;
  int32_t first = task.tiles->first_place(task.first_tile);
  const int32_t end = task.tiles->first_place(task.end_tile);
  if (first == end) return;  // levels may leave out a whole chunk
  int32_t tile_index = task.first_tile;
  const auto end_of_tile = [&](int32_t from) {
    while (task.tiles->first_place(tile_index + 1) <= from) ++tile_index;
    return static_cast<int32_t>(minimum_of(from + kTileKeys, task.tiles->first_place(tile_index + 1)));
  };
  tiles[0].find(task, first, end_of_tile(first));
  tiles[0].prefetch(key_bytes, value_bytes);
  for (int32_t turn = 0; first < end; turn = 1 - turn) {
    const int32_t keys = tiles[turn].count;
    Ahead ahead;
    if (first + keys < end) {
      tiles[1 - turn].find(task, first + keys, end_of_tile(first + keys));
      ahead.keys = reinterpret_cast<const void* const*>(tiles[1 - turn].key);
      ahead.values = reinterpret_cast<const void* const*>(tiles[1 - turn].value);
      ahead.count = tiles[1 - turn].count;
      ahead.key_bytes = key_bytes;
      ahead.value_bytes = value_bytes;
    }
    if constexpr (has_codes) {
      decode_tile<Form>(task, tiles[turn], scratch.decoded, decoded, factors);
      function(decoded, factors, first, ahead);
    } else {
      function(tiles[turn], factors, first, ahead);
    }
    first += keys;
  }
}

// T: of rows in memory.
template <typename Form, typename T = typename Form::Storage>
void attend_in(const AttentionTask& task, const AttentionScratch& scratch, const PartialRows& result) {
  using E = typename Form::Element;
  const AttentionProblem& problem = *task.problem;
  const int32_t key_dim = problem.head_dim, value_dim = problem.value_dim, steps = key_dim / Form::size;
  E* const queries = reinterpret_cast<E*>(scratch.queries);
  float* const scores = reinterpret_cast<float*>(scratch.scores);
  const bool is_few = is_of_few<Form>(task);
  if (!task.has_queries) arrange_queries<Form>(task, queries);
  begin_rows(task, result);
  for_each_tile<Form, T>(task, scratch, [&](const auto& tile, const TileFactors& factors, int32_t first, Ahead& ahead) {
    const int32_t keys = tile.count;
    const bool all_seen = task.tiles->all_see(problem, task.request, first, keys);
    const bool are_in_place = task.rows <= kMostRows && all_seen && keys % Form::size == 0;
    const Keys<Form> key_rows = is_few ? Keys<Form>{} : keys_of<Form>(tile, scratch, key_dim);
    const bool left_out = !are_in_place && fill_values<Form>(tile, scratch, value_dim, all_seen);
    const int32_t of_keys = is_few ? (keys + kBlockRows - 1) / kBlockRows * ((task.rows + kMostRows - 1) / kMostRows)
                                   : (task.rows + kBlockRows - 1) / kBlockRows * (keys / kMostRows);
    ahead.share(of_keys + (task.rows + kMostRows - 1) / kMostRows * ((value_dim + kBlockRows - 1) / kBlockRows));
    const bool is_raw = all_seen && problem.softcap == 0.0f && !Form::has_factors;
    for (int32_t row = 0; row < task.rows; row += kBlockRows) {
      const int32_t rows = static_cast<int32_t>(minimum_of(kBlockRows, task.rows - row));
      const int32_t width = width_of_block(task, row);
      if (is_few)
        score_few<Form>(tile, scratch, key_dim, rows, ahead);
      else
        multiply(
            Product<E>{
                key_rows.data, key_rows.row, 1, {queries + int64_t{row} * steps, width}, steps, scores, width, nullptr},
            keys, width, ahead);
      if (!is_raw)
        finish_scores(task, scores, width, row, rows, first, keys, all_seen, Form::has_factors ? factors.key : nullptr);
      const float factor = is_raw ? problem.scale * kLog2E : 1.0f;
      for (int32_t r = 0; r < width; r += Floats::width)
        store(scratch.scale + r, weigh<Form>(scores + r, width, keys, factor, result.maximum + row + r,
                                             result.total + row + r, result.exact_total + row + r, factors));
      const auto add_values = [&](auto values) {
        multiply(Product<E, decltype(values)>{reinterpret_cast<const E*>(scores), 1, width, values,
                                              (keys + Form::size - 1) / Form::size,
                                              result.values + int64_t{row} * value_dim, value_dim, scratch.scale},
                 rows, value_dim, ahead);
      };
      if (are_in_place)
        add_values(ValuesInPlace<Form>{tile.value});
      else
        add_values(Stored<E>{reinterpret_cast<const E*>(scratch.values), value_dim});
    }
    if (left_out) add_left_out(task, first, tile, result);
  });
}

inline void attend(const AttentionTask& task, const AttentionScratch& scratch, const PartialRows& result) {
  if (task.codes != CodeType::none) {
    switch (task.problem->type) {
#if PASS_EXT_LEVEL == 3
      case FloatType::bfloat16: return attend_in<CodedPairs, uint8_t>(task, scratch, result);
#else
      case FloatType::bfloat16: return attend_in<Decoded<bfloat16>, uint8_t>(task, scratch, result);
#endif
      case FloatType::float16: return attend_in<Decoded<float16>, uint8_t>(task, scratch, result);
      case FloatType::float32: return attend_in<Decoded<float>, uint8_t>(task, scratch, result);
    }
  }
  switch (task.problem->type) {
#if PASS_EXT_LEVEL == 3
    case FloatType::bfloat16: return attend_in<Pairs>(task, scratch, result);
#else
    case FloatType::bfloat16: return attend_in<Singles<bfloat16>>(task, scratch, result);
#endif
    case FloatType::float16: return attend_in<Singles<float16>>(task, scratch, result);
    case FloatType::float32: return attend_in<Singles<float>>(task, scratch, result);
  }
}

#include "cpu/attention_by_tiles-inl.h"

// ---- merging and writing ----

// to += from for one row of `dim` numbers, each side in powers of two of its own maximum.
inline void merge_row(PartialRows& to, const PartialRows& from, int32_t row, int32_t dim) {
  const float highest = maximum(to.maximum[row], from.maximum[row]);
  const float keep = power_of_two(to.maximum[row] - highest), add = power_of_two(from.maximum[row] - highest);
  to.maximum[row] = highest;
  to.total[row] = fused(from.total[row], add, to.total[row] * keep);
  to.exact_total[row] = fused(from.exact_total[row], add, to.exact_total[row] * keep);
  float* values = to.values + int64_t{row} * dim;
  const float* others = from.values + int64_t{row} * dim;
  for (int32_t d = 0; d < dim; d += Floats::width)
    store(values + d, fused(load(others + d), spread(add), load(values + d) * spread(keep)));
}

template <typename T>
void write_row(T* to, const float* values, float factor, int32_t dim) {
  for (int32_t d = 0; d < dim; d += Floats::width) store(to + d, load(values + d) * spread(factor));
}

// out and lse of a task's rows from their parts, one per chunk of keys, added in order into the first.
inline void finish_rows(const AttentionTask& task, PartialRows* parts, int32_t count) {
  const AttentionProblem& problem = *task.problem;
  const int32_t dim = problem.value_dim;
  for (int32_t r = 0; r < task.rows; ++r) {
    for (int32_t part = 1; part < count; ++part) merge_row(parts[0], parts[part], r, dim);
    const int64_t row = task.packed_row(r);
    const float* values = parts[0].values + int64_t{r} * dim;
    const float total = parts[0].total[r];
    float factor = total == 0.0f ? 0.0f : 1.0f / total;
    if (problem.sinks)
      factor *= share_beside_sink(parts[0].exact_total[r],
                                  sink_of_row(problem.sinks, problem.heads, row, parts[0].maximum[r]));
    switch (problem.type) {
      case FloatType::bfloat16: write_row(static_cast<bfloat16*>(problem.out) + row * dim, values, factor, dim); break;
      case FloatType::float16: write_row(static_cast<float16*>(problem.out) + row * dim, values, factor, dim); break;
      case FloatType::float32: write_row(static_cast<float*>(problem.out) + row * dim, values, factor, dim); break;
    }
    problem.lse[row] = log_of_total(parts[0].maximum[r], parts[0].exact_total[r]);
  }
}

// ---- attention_merge ----

// out = weight_a a + weight_b b. A side of weight 0 may hold anything.
template <typename T>
void add_weighted(T* out, const T* a, float weight_a, const T* b, float weight_b, int32_t dim) {
  int32_t d = 0;
  const auto part = [](float weight, float value) { return weight == 0.0f ? 0.0f : weight * value; };
  if (weight_a != 0.0f && weight_b != 0.0f)
    for (; d + Floats::width <= dim; d += Floats::width)
      store(out + d, fused(load(a + d), spread(weight_a), load(b + d) * spread(weight_b)));
  for (; d < dim; ++d) out[d] = from_float<T>(part(weight_a, to_float(a[d])) + part(weight_b, to_float(b[d])));
}

inline void merge_results(const MergeProblem& problem, int64_t begin, int64_t end) {
  const int32_t dim = problem.head_dim;
  for (int64_t row = begin; row < end; ++row) {
    const MergeWeights weights = weights_of(problem, row);
    problem.lse[row] = weights.lse;
    const auto add = [&](auto tag) {
      using T = decltype(tag);
      add_weighted(static_cast<T*>(problem.out) + row * dim, static_cast<const T*>(problem.out_a) + row * dim,
                   weights.a, static_cast<const T*>(problem.out_b) + row * dim, weights.b, dim);
    };
    switch (problem.type) {
      case FloatType::bfloat16: add(bfloat16{}); break;
      case FloatType::float16: add(float16{}); break;
      case FloatType::float32: add(0.0f); break;
    }
  }
}
