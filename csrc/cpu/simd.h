// One vector of fp32 values at the level PASS_EXT_LEVEL (0 portable, 1 AVX2, 2 AVX-512, 3 AVX-512 with bf16): loads
// widen bf16 / fp16 / fp32 exactly, stores round to nearest even, like core/half.h to the bit (NaN payloads apart).
// Included by cpu/each_isa.h only, inside the level's namespace; used by the kernels headers.

#if PASS_EXT_LEVEL == 0

struct Floats {
  static constexpr int width = 8;
  float lane[width];
};

inline Floats zeros() { return {}; }

template <typename T>
inline Floats load(const T* from) {
  Floats value;
  for (int i = 0; i < Floats::width; ++i) value.lane[i] = to_float(from[i]);
  return value;
}

template <typename T>
inline void store(T* to, Floats value) {
  for (int i = 0; i < Floats::width; ++i) to[i] = from_float<T>(value.lane[i]);
}

inline Floats add(Floats a, Floats b) {
  for (int i = 0; i < Floats::width; ++i) a.lane[i] += b.lane[i];
  return a;
}

#elif PASS_EXT_LEVEL == 1

struct Floats {
  static constexpr int width = 8;
  __m256 lanes;
};

inline Floats zeros() { return {_mm256_setzero_ps()}; }
inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.lanes, b.lanes)}; }

inline Floats load(const float* from) { return {_mm256_loadu_ps(from)}; }
inline Floats load(const float16* from) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
}
inline Floats load(const bfloat16* from) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}

inline void store(float* to, Floats value) { _mm256_storeu_ps(to, value.lanes); }
inline void store(float16* to, Floats value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(value.lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store(bfloat16* to, Floats value) {
  const __m256i bits = _mm256_castps_si256(value.lanes);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value.lanes, value.lanes, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fff), is_nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}

#else

struct Floats {
  static constexpr int width = 16;
  __m512 lanes;
};

inline Floats zeros() { return {_mm512_setzero_ps()}; }
inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.lanes, b.lanes)}; }

inline Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Floats load(const float16* from) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
inline Floats load(const bfloat16* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

inline void store(float* to, Floats value) { _mm512_storeu_ps(to, value.lanes); }
inline void store(float16* to, Floats value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtps_ph(value.lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store(bfloat16* to, Floats value) {
#if PASS_EXT_LEVEL == 3
  // The bf16 instruction flushes subnormals, so lanes that hold one take the long way below.
  if (_mm512_fpclass_ps_mask(value.lanes, 0x20) == 0) {
    const __m256bh narrow = _mm512_cvtneps_pbh(value.lanes);
    memcpy(to, &narrow, sizeof narrow);
    return;
  }
#endif
  const __m512i bits = _mm512_castps_si512(value.lanes);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(value.lanes, value.lanes, _CMP_UNORD_Q);
  const __m512i words = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fff));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(words));
}

#endif
