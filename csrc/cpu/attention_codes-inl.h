// Rows of keys and values in 8 bits, read on the CPU at one instruction set (see each_isa.h). A row is a header, which
// begins with its scale, and a code for each number: core/quantize.h. The text follows that of product-inl.h.

// The values of codes without their scale. Those in fp8 are fp16 with fewer bits: e5m2 the upper half of one, e4m3 one
// whose exponent is 8 less.
template <CodeType type>
Floats load_codes(const uint8_t* from) {
#if PASS_EXT_LEVEL == 0 || defined(__aarch64__)
  float numbers[Floats::width];
  for (int i = 0; i < Floats::width; ++i) numbers[i] = value_of_code(type, from[i]);
  return load(numbers);
#else
#if PASS_EXT_LEVEL == 1
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  if constexpr (type == CodeType::int8) return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes))};
  const __m128i wide = _mm_cvtepu8_epi16(codes), high = _mm_slli_epi16(wide, 8);
  if constexpr (type == CodeType::float8_e5m2) return {_mm256_cvtph_ps(high)};
  const __m128i size = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
  const __m128i is_nan = _mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_and_si128(high, _mm_set1_epi16(static_cast<int16_t>(0x8000)));
  const __m128i halves = _mm_or_si128(_mm_or_si128(sign, _mm_slli_epi16(size, 7)), _mm_slli_epi16(is_nan, 9));
  return Floats{_mm256_cvtph_ps(halves)} * spread(256.0f);
#else
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if constexpr (type == CodeType::int8) return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))};
  const __m256i wide = _mm256_cvtepu8_epi16(codes), high = _mm256_slli_epi16(wide, 8);
  if constexpr (type == CodeType::float8_e5m2) return {_mm512_cvtph_ps(high)};
  const __m256i size = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
  const __m256i is_nan = _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_and_si256(high, _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
  const __m256i halves =
      _mm256_or_si256(_mm256_or_si256(sign, _mm256_slli_epi16(size, 7)), _mm256_slli_epi16(is_nan, 9));
  return Floats{_mm512_cvtph_ps(halves)} * spread(256.0f);
#endif
#endif
}

// The values of a row's codes times `factor`.
template <typename T>
void decode(CodeType type, const uint8_t* row, float factor, T* to, int32_t dim) {
  const Floats scale = spread(factor);
  const uint8_t* const codes = row + kCodeHeader;
  const auto put = [&](auto values) {
    for (int32_t d = 0; d < dim; d += Floats::width) store(to + d, values(codes + d) * scale);
  };
  if (type == CodeType::int8)
    put([](const uint8_t* from) { return load_codes<CodeType::int8>(from); });
  else if (type == CodeType::float8_e4m3)
    put([](const uint8_t* from) { return load_codes<CodeType::float8_e4m3>(from); });
  else
    put([](const uint8_t* from) { return load_codes<CodeType::float8_e5m2>(from); });
}
