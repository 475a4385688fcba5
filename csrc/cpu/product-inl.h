// The matrix product of attention on the CPU, at one instruction set, for operands that already lie in the order of the
// loops:
//   C[m][n] = sum over k of A[m][k] B[k][n],    A read number by number, B and C as vectors along n
// in fp32, or in pairs of bf16 (one word each) if the processor multiplies those. The text belongs inside a level's
// namespace.

// Most vectors of B, and rows of A beside them, that the registers hold.
#if PASS_EXT_LEVEL >= 2
constexpr int kMostVectors = 4, kMostRows = 6;
#elif PASS_EXT_LEVEL == 1
constexpr int kMostVectors = 2, kMostRows = 6;
#else
constexpr int kMostVectors = 1, kMostRows = 4;
#endif
constexpr int kBlockRows = kMostVectors * Floats::width;  // rows whose scores are computed at once

inline int64_t minimum_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline Floats spread(float value) { return constant(Floats{}, value); }
inline Floats lanes_at(const float* from) { return load(from); }
inline void put_lanes(float* to, Floats value) { store(to, value); }
inline Floats add_product(Floats sum, Floats a, Floats b) { return fused(a, b, sum); }
#if PASS_EXT_LEVEL == 3
inline Words spread(uint32_t pair) { return constant(Words{}, pair); }
inline Words lanes_at(const uint32_t* from) { return load_words(from); }
inline void put_lanes(uint32_t* to, Words value) { store_words(to, value); }
inline Floats add_product(Floats sum, Words a, Words b) { return sum_of_products(sum, a, b); }
#endif

// Cache lines that are needed soon. They are prefetched a few at a time while the processor multiplies, so that the
// rows of a tile arrive in time.
struct Ahead {
  const void* const* keys = nullptr;  // rows
  const void* const* values = nullptr;
  int32_t count = 0, key_bytes = 0, value_bytes = 0, lines_at_once = 0;  // bytes of a row
  int32_t next = 0, offset = 0;

  // For about so many calls of fetch.
  void share(int32_t calls) {
    const int32_t row_bytes = key_bytes > value_bytes ? key_bytes : value_bytes;
    lines_at_once = count * (row_bytes / 32) / 2 / (calls + 1) + 1;
  }

  void fetch() {
    for (int32_t i = 0; i < lines_at_once && next < count; ++i) {
      if (offset < key_bytes) __builtin_prefetch(static_cast<const char*>(keys[next]) + offset, 0, 2);
      if (offset < value_bytes) __builtin_prefetch(static_cast<const char*>(values[next]) + offset, 0, 2);
      offset += 64;
      if (offset >= key_bytes && offset >= value_bytes) {
        offset = 0;
        ++next;
      }
    }
  }
};

// B in memory, a row to a step.
template <typename E>
struct Stored {
  const E* data;
  int64_t row;

  auto at(int64_t step, int64_t column) const { return lanes_at(data + step * row + column); }
};

// A [rows, steps] with strides, B [steps, columns], C [rows, columns]: overwritten, or first multiplied by scale[row].
template <typename E, typename B = Stored<E>>
struct Product {
  const E* a;
  int64_t a_row, a_step;
  B b;
  int64_t steps;
  float* c;
  int64_t c_row;
  const float* scale;
};

template <int M, int V, typename E, typename B>
inline void multiply_block(const Product<E, B>& p, int64_t first_row, int64_t first_column) {
  const E* a = p.a + first_row * p.a_row;
  float* c = p.c + first_row * p.c_row + first_column;
  Floats sum[M][V];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[m][v] = zeros();
  for (int64_t k = 0; k < p.steps; ++k) {
    decltype(p.b.at(0, 0)) right[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) right[v] = p.b.at(k, first_column + v * Floats::width);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const auto left = spread(a[m * p.a_row + k * p.a_step]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[m][v] = add_product(sum[m][v], left, right[v]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      float* to = c + m * p.c_row + v * Floats::width;
      store(to, p.scale ? fused(load(to), spread(p.scale[first_row + m]), sum[m][v]) : sum[m][v]);
    }
}

template <int V, typename E, typename B>
void multiply_columns(const Product<E, B>& p, int64_t rows, int64_t column, Ahead& ahead) {
  int64_t m = 0;
  if constexpr (V == 1 && kMostVectors == 4)  // with six sums, an addition would wait for the one before it
    for (; rows - m >= 12; m += 12) {
      ahead.fetch();
      multiply_block<12, V>(p, m, column);
    }
  for (; rows - m >= kMostRows; m += kMostRows) {
    ahead.fetch();
    multiply_block<kMostRows, V>(p, m, column);
  }
  if (m < rows) ahead.fetch();
  switch (rows - m) {
    case 5: return multiply_block<5, V>(p, m, column);
    case 4: return multiply_block<4, V>(p, m, column);
    case 3: return multiply_block<3, V>(p, m, column);
    case 2: return multiply_block<2, V>(p, m, column);
    case 1: return multiply_block<1, V>(p, m, column);
  }
}

// `columns` is a multiple of the vector.
template <typename E, typename B>
void multiply(const Product<E, B>& p, int64_t rows, int64_t columns, Ahead& ahead) {
  for (int64_t n = 0; n < columns;) {
    const int64_t left = (columns - n) / Floats::width;
    // Five and six vectors are faster as three and the rest than as four and the rest.
    const int64_t vectors = left == 5 || left == 6 ? minimum_of(3, kMostVectors) : minimum_of(left, kMostVectors);
    switch (vectors) {
      case 4:
        if constexpr (kMostVectors >= 4) multiply_columns<4>(p, rows, n, ahead);
        break;
      case 3:
        if constexpr (kMostVectors >= 3) multiply_columns<3>(p, rows, n, ahead);
        break;
      case 2:
        if constexpr (kMostVectors >= 2) multiply_columns<2>(p, rows, n, ahead);
        break;
      default: multiply_columns<1>(p, rows, n, ahead);
    }
    n += vectors * Floats::width;
  }
}
