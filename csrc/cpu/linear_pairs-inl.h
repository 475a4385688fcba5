// Codes and digits of packed weights (core/linear.h) as pairs of 16 bits, one to a word. The text belongs inside a
// level's namespace, in that of linear_packed-inl.h.

// Integer sums of a row side by side, else each waits for the one before. A vector of the portable level is several.
constexpr int chains(int rows) {
  return PASS_EXT_LEVEL == 0 || rows > (PASS_EXT_LEVEL == 3 ? 8 : 3) ? 1 : rows == 1 ? 4 : 2;
}
inline Words weighted(int /*chain*/, Words sum) { return sum; }
inline Words add_products(Words sum, Words codes, const uint32_t* digits, int word) {
#if PASS_EXT_LEVEL == 3
  // GCC loads and spreads the word by an instruction of its own, which takes longer.
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum.lanes) : "v"(codes.lanes), "m"(digits[word]));
  return sum;
#else
  return add_pairs(sum, codes, constant(codes, digits[word]));
#endif
}

// Whether sums begin with a word behind the digits, else with 0.
template <typename Block>
constexpr bool begins(bool crosses) {
  return crosses;
}

// - sum of x y of the crossed digits, behind the digits.
inline void finish_digits(bool crosses, uint32_t* digits) {
  if (!crosses) return;
  int16_t digit[kPackedInputs];
  memcpy(digit, digits, sizeof digit);
  uint32_t half[2] = {0, 0};
  for (int pair = 0; pair < kDigitPairs; pair += 2)
    for (int i = 2 * pair; is_crossed(pair) && i < 2 * pair + 2; ++i)
      half[2 * pair / kDigitPairs] -= static_cast<uint32_t>(digit[i] * digit[i + 2]);
  digits[kDigitPairs] = half[0] + half[1];
  digits[kDigitPairs + 1] = half[0];
  digits[kDigitPairs + 2] = half[1];
}

// What gives the numbers that the codes of a pair stand for, of the outputs from `column` on.
template <int bits>
inline Words pair_at(const uint32_t (&codes)[bits][kPackedOutputs], int pair, int column) {
  constexpr int kInWord = 16 / bits;
  const Words words = load_words(codes[pair / kInWord] + column);
  return pair % kInWord == 0 ? words : shift_right_signed(words, bits * (pair % kInWord));
}
template <typename Block>
inline auto reader_of(const Block&) {
  constexpr uint32_t kMask = Block::kBits == 4 ? 0x000f000fu : 0x00ff00ffu;
  return [mask = constant(Words{}, kMask)](const auto& codes, int pair, int column) {
    return pair_at(codes, pair, column) & mask;
  };
}
template <typename Scale>
inline auto reader_of(const PackedTableBlock<Scale>& block) {
  return [table = load_table(block.table)](const auto& codes, int pair, int column) {
    return looked_up(table, pair_at(codes, pair, column));
  };
}
