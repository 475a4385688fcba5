// Gated adapters on the CPU, at one instruction set (see each_isa.h), for rows that share an adapter. The problem and
// its formula: core/adapter.h. Every sum has one order, whatever rows are beside it: hidden numbers vector by vector
// along `in` and then lane by lane, outputs in the order of the ranks.

#if PASS_EXT_LEVEL >= 2
constexpr int kRanksAtOnce = 4;  // with four rows, the sums fit the registers
#else
constexpr int kRanksAtOnce = 2;
#endif
constexpr int kAdapterRows = 4;

// A vector of numbers along `in`, and its product with another, added to a sum: fp32, or pairs of bf16 where the
// processor multiplies those.
template <typename T>
struct Along {
  using Vector = Floats;
  static constexpr int64_t numbers = Floats::width;
  static Vector of(const T* from, int64_t count) { return load_first(from, count); }
  static Floats add_product(Floats sum, Vector a, Vector b) { return fused(a, b, sum); }
};
#if PASS_EXT_LEVEL == 3
template <>
struct Along<bfloat16> {
  using Vector = Words;
  static constexpr int64_t numbers = 2 * Floats::width;
  static Vector of(const bfloat16* from, int64_t count) {
    if (count >= numbers) return {_mm512_loadu_si512(from)};
    bfloat16 padded[numbers];
    memset(padded, 0, sizeof padded);
    memcpy(padded, from, count * sizeof(bfloat16));
    return {_mm512_loadu_si512(padded)};
  }
  static Floats add_product(Floats sum, Vector a, Vector b) { return sum_of_products(sum, a, b); }
};
#endif

// hidden[r][j] = down[first + j] x[r] for R rows and J ranks.
template <int R, int J, typename T>
void down_block(const T* const* x, const T* down, int64_t in, float* const* hidden) {
  using A = Along<T>;
  Floats sum[R][J];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) sum[r][j] = zeros();
  for (int64_t i = 0; i < in; i += A::numbers) {
    typename A::Vector weight[J];
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) weight[j] = A::of(down + j * in + i, in - i);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const typename A::Vector value = A::of(x[r] + i, in - i);
#pragma GCC unroll 16
      for (int j = 0; j < J; ++j) sum[r][j] = A::add_product(sum[r][j], value, weight[j]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) hidden[r][j] = sum_lanes(sum[r][j]);
}

template <int R, typename T>
void down_ranks(const T* const* x, const T* down, int64_t in, float* const* hidden, int64_t begin, int64_t end) {
  float* to[R];
  for (int64_t j = begin; j < end;) {
    for (int r = 0; r < R; ++r) to[r] = hidden[r] + j;
    if (end - j >= kRanksAtOnce) {
      down_block<R, kRanksAtOnce>(x, down + j * in, in, to);
      j += kRanksAtOnce;
    } else {
      down_block<R, 1>(x, down + j * in, in, to);
      ++j;
    }
  }
}

// out[r][o] += scale * sum over j of hidden[r][j] up[j][o], for outputs [begin, end).
template <int R, typename T>
void up_outputs(const float* const* hidden, const T* up, int64_t rank, int64_t outputs, float scale, T* const* out,
                int64_t begin, int64_t end) {
  const Floats factor = constant(Floats{}, scale);
  for (int64_t o = begin; o < end; o += Floats::width) {
    Floats sum[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r] = zeros();
    for (int64_t j = 0; j < rank; ++j) {
      const Floats weight = load_first(up + j * outputs + o, end - o);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r] = fused(constant(Floats{}, hidden[r][j]), weight, sum[r]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      store_first(out[r] + o, fused(factor, sum[r], load_first(out[r] + o, end - o)), end - o);
  }
}

// Up to kAdapterRows rows at a time: function(count as a constant, first).
template <typename Function>
void for_blocks_of_rows(int64_t count, Function&& function) {
  for (int64_t first = 0; first < count; first += kAdapterRows) switch (count - first) {
      case 1: function(std::integral_constant<int, 1>{}, first); break;
      case 2: function(std::integral_constant<int, 2>{}, first); break;
      case 3: function(std::integral_constant<int, 3>{}, first); break;
      default: function(std::integral_constant<int, kAdapterRows>{}, first);
    }
}

// Ranks [begin, end) of hidden [count, rank], of the rows `rows` [count] of x, by adapter k.
template <typename T, typename Id>
void multiply_down(const AdapterRows<T, Id>& problem, int64_t k, const int64_t* rows, int64_t count, float* hidden,
                   int64_t begin, int64_t end) {
  const T* down = problem.down + k * problem.rank * problem.in;
  for_blocks_of_rows(count, [&](auto block, int64_t first) {
    constexpr int R = decltype(block)::value;
    const T* x[R];
    float* to[R];
    for (int r = 0; r < R; ++r) {
      x[r] = problem.x + rows[first + r] * problem.x_row;
      to[r] = hidden + (first + r) * problem.rank;
    }
    down_ranks<R>(x, down, problem.in, to, begin, end);
  });
}

// Outputs [begin, end) of these rows.
template <typename T, typename Id>
void multiply_up(const AdapterRows<T, Id>& problem, int64_t k, const int64_t* rows, int64_t count, const float* hidden,
                 int64_t begin, int64_t end) {
  const T* up = problem.up + k * problem.rank * problem.outputs;
  for_blocks_of_rows(count, [&](auto block, int64_t first) {
    constexpr int R = decltype(block)::value;
    const float* from[R];
    T* out[R];
    for (int r = 0; r < R; ++r) {
      from[r] = hidden + (first + r) * problem.rank;
      out[r] = problem.out + rows[first + r] * problem.out_row;
    }
    up_outputs<R>(from, up, problem.rank, problem.outputs, problem.scale, out, begin, end);
  });
}
