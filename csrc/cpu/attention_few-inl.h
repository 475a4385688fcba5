// The scores of few rows on the CPU. A lane for each row would leave most lanes of a vector idle, so that one row costs
// as much as a vector of them; here a lane is a key:
//   scores [row][key] = Q [row][d] K^T [d][key]
// K^T is made of a tile's keys by transposing squares of them in registers, and the scores are turned to [key][row].
// Each adds the same products in the same order as those of many rows: a row's bits do not depend on how many there
// are. The text follows that of attention_forms-inl.h and transpose-inl.h.

// Most rows whose scores are computed with a lane for each key. More fill a vector so well that transposing does not
// pay; pairs, which keys in memory are already, sooner.
template <typename Form>
constexpr int32_t kFewRows = Floats::width / Form::size;
constexpr int32_t kColumnBytes = 32768;  // of keys at once, which the innermost cache holds

// Words of bf16 hold two numbers, where unaligned ones can be loaded.
template <typename T>
constexpr int32_t kInWord = PASS_EXT_LEVEL > 0 && std::is_same_v<T, bfloat16> ? 2 : 1;

template <typename Form>
bool is_of_few(const AttentionTask& task) {
  const int32_t dim = task.problem->head_dim;
  return task.rows <= kFewRows<Form> && dim % (kInWord<typename Form::Storage> * Words::width) == 0 &&
         dim / Form::size * Words::width * 4 <= kColumnBytes;
}

// Keys from `first` on as columns, [step][key], `columns` of them; those behind the last are the last.
template <typename Form>
void arrange_keys(const TileRows<typename Form::Storage>& rows, int32_t first, int32_t dim, int32_t columns,
                  typename Form::Element* to) {
  using T = typename Form::Storage;
  for (int32_t key = 0; key < columns; key += Words::width)
    for (int32_t word = 0; word < dim / kInWord<T>; word += Words::width) {
      Words block[Words::width];
#pragma GCC unroll 16
      for (int32_t k = 0; k < Words::width; ++k) {
        const T* const row = rows.key[minimum_of(first + key + k, rows.count - 1)];
        if constexpr (kInWord<T> == 2)
          block[k] = load_words(reinterpret_cast<const uint32_t*>(row) + word);
        else
          block[k] = bits_of(load(row + word));
      }
      transpose(block);
      typename Form::Element* const column = to + int64_t{word} * kInWord<T> / Form::size * columns + key;
#pragma GCC unroll 16
      for (int32_t k = 0; k < Words::width; ++k) {
        if constexpr (Form::size == 2) {
          put_lanes(column + k * columns, block[k]);
        } else if constexpr (kInWord<T> == 2) {
          put_lanes(column + 2 * k * columns, float_of(shift_left(block[k], 16)));
          put_lanes(column + (2 * k + 1) * columns, float_of(block[k] & constant(block[k], 0xffff0000u)));
        } else {
          put_lanes(column + k * columns, float_of(block[k]));
        }
      }
    }
}

// The scores of few rows, [key, row], as the products of many are.
template <typename Form>
void score_few(const TileRows<typename Form::Storage>& keys, const AttentionScratch& scratch, int32_t dim, int32_t rows,
               Ahead& ahead) {
  using E = typename Form::Element;
  constexpr int32_t width = Floats::width;
  const int32_t steps = dim / Form::size;
  int32_t most = kMostVectors * width;
  while (most > width && most * steps * 4 > kColumnBytes) most /= 2;
  E* const tile = reinterpret_cast<E*>(scratch.keys);
  float* const scores = reinterpret_cast<float*>(scratch.scores);
  float* const by_row = scores + kTileKeys * width;
  for (int32_t first = 0; first < keys.count; first += most) {
    const int32_t columns = static_cast<int32_t>(minimum_of(most, (keys.count - first + width - 1) / width * width));
    arrange_keys<Form>(keys, first, dim, columns, tile);
    multiply(
        Product<E>{
            reinterpret_cast<const E*>(scratch.queries), steps, 1, {tile, columns}, steps, by_row, columns, nullptr},
        rows, columns, ahead);
    for (int32_t key = 0; key < columns; key += width) {
      Words block[width];
      for (int32_t r = 0; r < width; ++r) block[r] = bits_of(r < rows ? load(by_row + r * columns + key) : zeros());
      transpose(block);
      for (int32_t k = 0; k < width; ++k) store(scores + (first + key + k) * width, float_of(block[k]));
    }
  }
}
