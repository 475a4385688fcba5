// Look-ahead embedding injection on the CPU, at one instruction set (see each_isa.h): a row gather from two sources,
// and its gradient as a segment sum. The problem and its formulas: core/lookahead.h.

// Copies n values, widening or narrowing where the types differ.
template <typename T, typename S>
inline void convert_row(T* to, const S* from, int64_t n) {
  int64_t i = 0;
  if constexpr (sizeof(T) <= 4)
    for (; i + Floats::width <= n; i += Floats::width) store(to + i, load(from + i));
  for (; i < n; ++i) to[i] = from_float<T>(to_float(from[i]));
}
template <typename T>
inline void convert_row(T* to, const T* from, int64_t n) {
  if (n > 0) memcpy(to, from, n * sizeof(T));  // an empty tensor's data is null, which memcpy must not be given
}

// Rows [begin, end); every id is in range.
template <typename T, typename S, typename Id>
void embed_rows(const LookaheadEmbed<T, S, Id>& problem, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    const int64_t id = problem.ids[n];
    T* to = problem.out + n * problem.dim;
    if (id >= 0)
      convert_row(to, problem.table + id * problem.table_stride, problem.dim);
    else
      convert_row(to, problem.lookahead + (-1 - id) * problem.dim, problem.dim);
  }
}

// out[i] = sum over `count` rows of grad[positions[k]][i], for i in [begin, end), added in the order of k.
template <typename T, typename S>
void sum_rows(S* out, const T* grad, int64_t dim, const int64_t* positions, int64_t count, int64_t begin, int64_t end) {
  int64_t i = begin;
  if constexpr (sizeof(T) <= 4) {
    constexpr int kUnrolled = 8;  // sums kept in registers over all rows
    for (; i + kUnrolled * Floats::width <= end; i += kUnrolled * Floats::width) {
      Floats sum[kUnrolled];
      for (int u = 0; u < kUnrolled; ++u) sum[u] = zeros();
      for (int64_t k = 0; k < count; ++k) {
        const T* row = grad + positions[k] * dim + i;
        for (int u = 0; u < kUnrolled; ++u) sum[u] = sum[u] + load(row + u * Floats::width);
      }
      for (int u = 0; u < kUnrolled; ++u) store(out + i + u * Floats::width, sum[u]);
    }
    for (; i + Floats::width <= end; i += Floats::width) {
      Floats sum = zeros();
      for (int64_t k = 0; k < count; ++k) sum = sum + load(grad + positions[k] * dim + i);
      store(out + i, sum);
    }
    for (; i < end; ++i) {
      float sum = 0;
      for (int64_t k = 0; k < count; ++k) sum += to_float(grad[positions[k] * dim + i]);
      out[i] = from_float<S>(sum);
    }
  } else {
    for (; i < end; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < count; ++k) sum += grad[positions[k] * dim + i];
      out[i] = static_cast<S>(sum);
    }
  }
}
