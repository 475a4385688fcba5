// Packed weights times few rows (core/linear.h), at one instruction set (see each_isa.h). The 16 outputs of a block are
// lanes; a pair of digits of a row, or four bytes of them, is one word for all of them. A row has sums of its own, so
// no other row changes a bit.
//
// Of several rows multiplying takes longer than reading. Then half of the codes may be crossed: of pairs of codes p, q
// and of digits x, y,
//   p x + q y = (x + q) (y + p) - x y - p q
// is one product in place of two; x y is the same for all outputs, p q for all rows. All of it modulo 2^32, exact, so
// that no bit tells which way it was. Two additions replace a product: faster where additions have units of their own
// (Zen 4), slower where they wait for those of the products (Emerald Rapids).

#include "cpu/row_blocks-inl.h"

constexpr int kDigitPairs = kPackedInputs / 2;
// Behind the pairs what sums of codes times digits may begin with: of all digits, of either half.
constexpr int kDigitWords = kDigitPairs + 3;
constexpr int kDigitNumbers = 4;

// Rows as digits, a block of rows behind the other: digits [block][row][word], then numbers [block][4][row]: the unit,
// unit times the sum of the digits, and that of either half.
struct DigitRows {
  uint32_t* digits;
  float* numbers;

  DigitRows(void* memory, int64_t rows, int64_t in)
      : digits(static_cast<uint32_t*>(memory)),
        numbers(static_cast<float*>(memory) + rows * in / kPackedInputs * kDigitWords) {}
};

// Whether tiles of so many rows may cross: where a product and its sum are one instruction, and rows share p q.
constexpr bool may_cross(int rows) { return PASS_EXT_LEVEL == 3 && rows >= 4; }
// Two pairs of each four are crossed.
constexpr bool is_crossed(int pair) { return pair % 4 >= 2; }

#if PASS_EXT_LEVEL == 1 && defined(__aarch64__)
#include "cpu/linear_bytes-inl.h"
#else
#include "cpu/linear_pairs-inl.h"
#endif

// One block of a row; `apart`: numbers of neighbouring kinds.
template <typename T>
inline void write_digits(const T* x, int apart, uint32_t* digits, float* numbers) {
  constexpr int kVectors = kPackedInputs / Floats::width;
  constexpr uint32_t kAll = (1u << Floats::width) - 1;
  const Floats infinity = constant(Floats{}, __builtin_inff());
  Floats value[kVectors], largest = zeros();
  Mask is_less = mask_of_bits(kAll);
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
    value[i] = load(x + i * Floats::width);
    const Floats size = maximum(value[i], zeros() - value[i]);
    is_less = is_less & less(size, infinity);
    largest = maximum(largest, size);
  }
  const bool is_finite = bits_of_mask(is_less) == kAll;
  const float most = largest_lane(largest);
  const bool has_digits = is_finite && most >= kLeastLargest;
  const float unit = has_digits ? most / kLargestDigit : is_finite ? 0.0f : __builtin_nanf("");
  const Floats inverse = constant(Floats{}, has_digits ? kLargestDigit / most : 0.0f);
  const Floats whole = constant(Floats{}, 0x1.8p23f);  // adding it rounds to the nearest whole number, halves to even
  Floats sum[2] = {zeros(), zeros()};                  // exact: sums of digits are below 2^24
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
    const Floats digit = is_finite ? (value[i] * inverse + whole) - whole : zeros();
    store_halves(digits + i * Words::width / 2, truncated(digit));
    sum[2 * i / kVectors] = sum[2 * i / kVectors] + digit;
  }
  const float first = sum_lanes(sum[0]), second = sum_lanes(sum[1]);
  numbers[0] = unit;
  numbers[apart] = unit * (first + second);
  numbers[2 * apart] = unit * first;
  numbers[3 * apart] = unit * second;
}

// Rows [first, first + rows) of x; `crosses`: for tiles that cross where they may.
template <typename T>
void write_digit_rows(const LinearRows<T>& problem, int64_t first, int64_t rows, bool crosses, void* memory) {
  const RowBlocks blocks(rows);
  const DigitRows to(memory, rows, problem.in);
  const int64_t steps = problem.in / kPackedInputs;
  for (int64_t block = 0; block < blocks.count; ++block) {
    const int64_t begin = blocks.begin(block);
    const int size = blocks.size(block);
    for (int r = 0; r < size; ++r)
      for (int64_t s = 0; s < steps; ++s) {
        uint32_t* const digits = to.digits + (begin * steps + s * size + r) * kDigitWords;
        write_digits(problem.x + (first + begin + r) * problem.x_row + s * kPackedInputs, size, digits,
                     to.numbers + (begin * steps + s * size) * kDigitNumbers + r);
        finish_digits(crosses && may_cross(size), digits);
      }
  }
}

// How often the loops over a block's codes are unrolled. A vector of the portable level is a loop itself: unrolled, all
// forms took a minute to compile.
constexpr int kUnrolled = PASS_EXT_LEVEL == 0 ? 1 : 8;

// Bytes of weights that are asked for before they are needed: far ahead for the second cache, since memory answers
// late, and a little for the first.
constexpr int kFarAhead = 6144, kAhead = 1024;

// The sums of R rows and the 16 outputs of `blocks`, to [R, kGroupOutputs].
template <int R, bool crosses, typename Block>
void multiply_packed_tile(const Block* blocks, int64_t steps, const uint32_t* digits, const float* numbers, float* to) {
  constexpr int kVectors = kPackedOutputs / Floats::width, kWords = Block::kBits / Block::kParts;
  constexpr int kPairs = 16 / Block::kBits;  // in a word
  constexpr int kChains = crosses ? 1 : chains(R);
  constexpr size_t kBytes = kPackedBytes<Block>;
  Floats sum[kVectors][R], scales[kVectors], offsets[kVectors];
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[v][r] = zeros();
  for (int64_t s = 0; s < steps; ++s, digits += kDigitWords * R, numbers += kDigitNumbers * R) {
    const char* const bytes = reinterpret_cast<const char*>(blocks) + s * kBytes;
    for (size_t byte = 0; byte < kBytes; byte += 64) {
      __builtin_prefetch(bytes + kFarAhead + byte, 0, 2);
      __builtin_prefetch(bytes + kAhead + byte);
    }
    const Block& block = blocks[s / Block::kSteps];
    const int step = s % Block::kSteps;
    if (step == 0) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        scales[v] = load(block.scale + v * Floats::width);
        offsets[v] = load(block.offset + v * Floats::width);
      }
    }
    const auto read = reader_of(block);
    const auto digit = [&](int r, int word) { return constant(Words{}, digits[r * kDigitWords + word]); };
#pragma GCC unroll kUnrolled
    for (int part = 0; part < Block::kParts; ++part) {
      const int sums = Block::kParts == 1 ? 0 : 1 + part;
#pragma GCC unroll kUnrolled
      for (int v = 0; v < kVectors; ++v) {
        // Digits are read anew for each vector: AVX2's registers do not suffice to keep them.
        if (PASS_EXT_LEVEL == 1) asm volatile("" : : : "memory");
        Words dot[kChains][R], crossed_codes = constant(Words{}, 0);
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c)
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r)
            dot[c][r] = c == 0 && begins<Block>(crosses) ? digit(r, kDigitPairs + sums) : constant(Words{}, 0);
        const auto add = [&](Words code, int word) {
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r)
            dot[word % kChains][r] = add_products(dot[word % kChains][r], code, digits + r * kDigitWords, word);
        };
#pragma GCC unroll kUnrolled
        for (int w = 0; w < kWords; ++w) {
          const int word = part * kWords + w;
#pragma GCC unroll kUnrolled
          for (int i = 0; i < kPairs; i += 2) {
            const int pair = word * kPairs + i;
            const auto p = read(block.codes[step], pair, v * Words::width);
            const auto q = read(block.codes[step], pair + 1, v * Words::width);
            if constexpr (crosses)
              if (is_crossed(pair)) {
                crossed_codes = add_pairs(crossed_codes, p, q);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r)
                  dot[0][r] = add_pairs(dot[0][r], add_halves(digit(r, pair), q), add_halves(digit(r, pair + 1), p));
                continue;
              }
            add(p, pair);
            add(q, pair + 1);
          }
        }
        Floats scale = scales[v], offset = offsets[v];
        if constexpr (Block::kSteps > 1) {
          scale = scale * load(block.factors[step].scale[part] + v * Floats::width);
          offset = offset * load(block.factors[step].offset[part] + v * Floats::width);
        }
        const float* const sums_of_digits = numbers + (1 + sums) * R;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int c = 1; c < kChains; ++c) dot[0][r] = dot[0][r] + weighted(c, dot[c][r]);
          if (crosses) dot[0][r] = dot[0][r] - crossed_codes;
          const Floats unit = constant(Floats{}, numbers[r]), digit_sum = constant(Floats{}, sums_of_digits[r]);
          sum[v][r] = fused(offset, digit_sum, fused(scale * unit, float_of_signed(dot[0][r]), sum[v][r]));
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(to + r * kGroupOutputs + v * Floats::width, sum[v][r]);
}

template <typename Block>
void multiply_packed_tiles(const Block* packed, int64_t in, int64_t rows, const DigitRows& from, bool crosses,
                           float* sums, int64_t begin, int64_t end) {
  const RowBlocks blocks(rows);
  const int64_t steps = in / kPackedInputs;
  for (int64_t o = begin; o < end; o += kPackedOutputs) {
    const Block* const weights = packed + o / kPackedOutputs * steps / Block::kSteps;
    for (int64_t b = 0; b < blocks.count; ++b) {
      const int64_t row = blocks.begin(b);
      const uint32_t* const digits = from.digits + row * steps * kDigitWords;
      const float* const numbers = from.numbers + row * steps * kDigitNumbers;
      float* const to = sums + row * kGroupOutputs + o - begin;
      with_rows(blocks.size(b), [&](auto count) {
        constexpr int R = decltype(count)::value;
        if (may_cross(R) && crosses) return multiply_packed_tile<R, may_cross(R)>(weights, steps, digits, numbers, to);
        multiply_packed_tile<R, false>(weights, steps, digits, numbers, to);
      });
    }
  }
}

// Computes the sums [rows, kGroupOutputs] of rows of digits for outputs [begin, end), whole blocks.
inline void multiply_packed_group(const void* packed, PackedForm form, int64_t in, int64_t rows, void* memory,
                                  bool crosses, float* sums, int64_t begin, int64_t end) {
  const DigitRows from(memory, rows, in);
  with_blocks(packed, form,
              [&](const auto* blocks) { multiply_packed_tiles(blocks, in, rows, from, crosses, sums, begin, end); });
}
