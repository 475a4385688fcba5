// Codes and digits of packed weights (core/linear.h) as signed bytes, four to a word, for dot products of those. A
// digit is two bytes, and sums over each are exact:
//   digit = 256 upper + lower,  sum over i of code digit = 256 sum over i of code upper + sum over i of code lower
// Codes that need eight bits are less 128, and 128 times the sum of the digits is added. The text belongs inside a
// level's namespace, in that of linear_packed-inl.h.

static_assert(static_cast<int>(kLargestDigit) + 128 < 1 << 15, "the upper byte of the largest digit is below 128");

// Sums of a row: over the lower bytes, over the upper ones.
constexpr int chains(int /*rows*/) { return 2; }
inline Words weighted(int chain, Words sum) { return chain == 0 ? sum : shift_left(sum, 8); }
inline Words add_products(Words sum, Words codes, const uint32_t* digits, int word) {
  const uint32x4_t four = vld1q_u32(digits + word / 4 * 4);
  return {add_bytes(sum.low, codes.low, four, word % 4), add_bytes(sum.high, codes.high, four, word % 4)};
}

// From a block's digits of 16 bits: of each eight, the lower bytes of 0, 4, 1, 5, their upper bytes, and those of
// 2, 6, 3, 7. This is how codes of 4 bits lie. Behind them 128 times the sum of all, and of either half.
inline void finish_digits(bool /*crosses*/, uint32_t* digits) {
  constexpr int kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  int16_t digit[kPackedInputs];
  memcpy(digit, digits, sizeof digit);
  int8_t bytes[2 * kPackedInputs];
  uint32_t half[2] = {0, 0};
  for (int i = 0; i < kPackedInputs; ++i) {
    const int number = digit[i / 8 * 8 + kOrder[i % 8]], upper = (number + 128) >> 8;
    int8_t* const to = bytes + i / 4 * 8 + i % 4;
    to[0] = static_cast<int8_t>(number - 256 * upper);
    to[4] = static_cast<int8_t>(upper);
    half[2 * i / kPackedInputs] += static_cast<uint32_t>(128 * number);
  }
  memcpy(digits, bytes, sizeof bytes);
  digits[kDigitPairs] = half[0] + half[1];
  digits[kDigitPairs + 1] = half[0];
  digits[kDigitPairs + 2] = half[1];
}

// The bytes of codes that are multiplied by the digits `word` and, as upper ones, `word` + 1.
template <int bits>
inline Words bytes_at(const uint32_t (&codes)[bits][kPackedOutputs], int word, int column) {
  const auto words = [&](int i) { return load_words(codes[word / 4 * bits / 4 + i] + column); };  // of eight inputs
  if (bits == 4) return word % 4 < 2 ? lower_nibbles(words(0)) : upper_nibbles(words(0));
  return word % 4 < 2 ? lower_bytes(words(0), words(1)) : upper_bytes(words(0), words(1));
}

// What gives these bytes, as the numbers that they stand for.
template <typename Block>
inline auto reader_of(const Block&) {
  return [](const auto& codes, int word, int column) {
    const Words bytes = bytes_at(codes, word, column);
    return Block::kBits == 4 ? bytes : bytes ^ constant(bytes, 0x80808080u);
  };
}
template <typename Scale>
inline auto reader_of(const PackedTableBlock<Scale>& block) {
  uint8_t less[16];
  for (int i = 0; i < 16; ++i) less[i] = block.table[i] ^ 0x80;
  return [table = load_table(less)](const auto& codes, int word, int column) {
    return looked_up(table, bytes_at(codes, word, column));
  };
}

// Whether they are less 128, so that sums begin with a word behind the digits, else with 0.
template <typename Block>
constexpr bool kAreLess128 = Block::kBits == 8;
template <typename Scale>
constexpr bool kAreLess128<PackedTableBlock<Scale>> = true;
template <typename Block>
constexpr bool begins(bool /*crosses*/) {
  return kAreLess128<Block>;
}
