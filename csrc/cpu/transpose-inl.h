// The transpose of a square of words, a vector to a row: word j of row i becomes word i of row j. The text belongs
// inside a level's namespace.

#if PASS_EXT_LEVEL == 0
inline void transpose(Words (&row)[Words::width]) {
  for (int i = 0; i < Words::width; ++i)
    for (int j = 0; j < i; ++j) {
      const uint32_t below = row[i].lane[j];
      row[i].lane[j] = row[j].lane[i];
      row[j].lane[i] = below;
    }
}
#elif PASS_EXT_LEVEL == 1 && defined(__aarch64__)
// Of squares of 4 x 4 words.
inline void transpose(uint32x4_t& a, uint32x4_t& b, uint32x4_t& c, uint32x4_t& d) {
  const auto wide = [](uint32x4_t words) { return vreinterpretq_u64_u32(words); };
  const auto narrow = [](uint64x2_t words) { return vreinterpretq_u32_u64(words); };
  const uint64x2_t ab = wide(vtrn1q_u32(a, b)), cd = wide(vtrn1q_u32(c, d));
  const uint64x2_t ab_odd = wide(vtrn2q_u32(a, b)), cd_odd = wide(vtrn2q_u32(c, d));
  a = narrow(vtrn1q_u64(ab, cd)), b = narrow(vtrn1q_u64(ab_odd, cd_odd));
  c = narrow(vtrn2q_u64(ab, cd)), d = narrow(vtrn2q_u64(ab_odd, cd_odd));
}
inline void transpose(Words (&row)[Words::width]) {
  transpose(row[0].low, row[1].low, row[2].low, row[3].low);
  transpose(row[0].high, row[1].high, row[2].high, row[3].high);
  transpose(row[4].low, row[5].low, row[6].low, row[7].low);
  transpose(row[4].high, row[5].high, row[6].high, row[7].high);
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t above = row[i].high;
    row[i].high = row[i + 4].low;
    row[i + 4].low = above;
  }
}
#elif PASS_EXT_LEVEL == 1
inline void transpose(Words (&row)[Words::width]) {
  __m256i two[8], four[8];  // neighbouring words, then four words, of columns in each half
  for (int i = 0; i < 8; i += 2) {
    two[i] = _mm256_unpacklo_epi32(row[i].lanes, row[i + 1].lanes);
    two[i + 1] = _mm256_unpackhi_epi32(row[i].lanes, row[i + 1].lanes);
  }
  for (int i = 0; i < 8; i += 4)
    for (int half = 0; half < 2; ++half) {
      four[i + 2 * half] = _mm256_unpacklo_epi64(two[i + half], two[i + 2 + half]);
      four[i + 2 * half + 1] = _mm256_unpackhi_epi64(two[i + half], two[i + 2 + half]);
    }
  for (int i = 0; i < 4; ++i) {
    row[i].lanes = _mm256_permute2x128_si256(four[i], four[i + 4], 0x20);
    row[i + 4].lanes = _mm256_permute2x128_si256(four[i], four[i + 4], 0x31);
  }
}
#else
inline void transpose(Words (&row)[Words::width]) {
  __m512i two[16], four[16];  // neighbouring words, then four words, of columns in each quarter
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    two[i] = _mm512_unpacklo_epi32(row[i].lanes, row[i + 1].lanes);
    two[i + 1] = _mm512_unpackhi_epi32(row[i].lanes, row[i + 1].lanes);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 16
    for (int half = 0; half < 2; ++half) {
      four[i + 2 * half] = _mm512_unpacklo_epi64(two[i + half], two[i + 2 + half]);
      four[i + 2 * half + 1] = _mm512_unpackhi_epi64(two[i + half], two[i + 2 + half]);
    }
  // Four words of rows 0 to 3, 4 to 7, 8 to 11 and 12 to 15 lie in four[i], four[i + 4], four[i + 8], four[i + 12].
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    const __m512i low = _mm512_shuffle_i32x4(four[i], four[i + 4], 0x88),
                  high = _mm512_shuffle_i32x4(four[i], four[i + 4], 0xdd);
    const __m512i low_after = _mm512_shuffle_i32x4(four[i + 8], four[i + 12], 0x88);
    const __m512i high_after = _mm512_shuffle_i32x4(four[i + 8], four[i + 12], 0xdd);
    row[i].lanes = _mm512_shuffle_i32x4(low, low_after, 0x88);
    row[i + 8].lanes = _mm512_shuffle_i32x4(low, low_after, 0xdd);
    row[i + 4].lanes = _mm512_shuffle_i32x4(high, high_after, 0x88);
    row[i + 12].lanes = _mm512_shuffle_i32x4(high, high_after, 0xdd);
  }
}
#endif
