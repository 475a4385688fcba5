// One vector of fp32 values at the level PASS_EXT_LEVEL (0 portable, 1 AVX2 or NEON, 2 AVX-512, 3 AVX-512 with bf16).
// Loads widen bf16 / fp16 / fp32 exactly; stores round to nearest even, like core/half.h to the bit (NaN payloads
// apart). Words are as many 32-bit integers, Mask as many truths. The operations are those of core/scalar.h, with the
// same bits. The text belongs inside a level's namespace (cpu/each_isa.h).

using ::pass_ext::bits_of;
using ::pass_ext::constant;
using ::pass_ext::float_of;
using ::pass_ext::float_of_signed;
using ::pass_ext::float_of_unsigned;
using ::pass_ext::fused;
using ::pass_ext::less;
using ::pass_ext::maximum;
using ::pass_ext::minimum;
using ::pass_ext::multiply_wide;
using ::pass_ext::select;
using ::pass_ext::shift_left;
using ::pass_ext::shift_right_signed;

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

struct Words {
  static constexpr int width = 8;
  uint32_t lane[width];
};

struct Mask {
  uint32_t bits;  // bit i: lane i
};

#define PASS_EXT_EACH_LANE(type, expression)                           \
  do {                                                                 \
    type result;                                                       \
    for (int i = 0; i < type::width; ++i) result.lane[i] = expression; \
    return result;                                                     \
  } while (false)

inline Floats constant(Floats, float value) { PASS_EXT_EACH_LANE(Floats, value); }
inline Words constant(Words, uint32_t value) { PASS_EXT_EACH_LANE(Words, value); }
inline Words counting(uint32_t first) { PASS_EXT_EACH_LANE(Words, first + i); }
inline Words load_words(const uint32_t* from) { PASS_EXT_EACH_LANE(Words, from[i]); }
inline void store_words(uint32_t* to, Words value) { memcpy(to, value.lane, sizeof value.lane); }
// Stores the lower halves of all words, two to a word; whole numbers that 16 bits hold.
inline void store_halves(uint32_t* to, Words value) {
  for (int i = 0; i < Words::width / 2; ++i) to[i] = (value.lane[2 * i] & 0xffffu) | value.lane[2 * i + 1] << 16;
}

// For the lowest four bits of each half of a word, the table's entry.
struct Table {
  uint8_t entry[16];
};
inline Table load_table(const uint8_t* from) {
  Table table;
  memcpy(table.entry, from, sizeof table.entry);
  return table;
}
inline Words looked_up(const Table& table, Words codes) {
  PASS_EXT_EACH_LANE(Words, table.entry[codes.lane[i] & 15u] | uint32_t{table.entry[codes.lane[i] >> 16 & 15u]} << 16);
}

inline Floats operator+(Floats a, Floats b) { PASS_EXT_EACH_LANE(Floats, a.lane[i] + b.lane[i]); }
inline Floats operator-(Floats a, Floats b) { PASS_EXT_EACH_LANE(Floats, a.lane[i] - b.lane[i]); }
inline Floats operator*(Floats a, Floats b) { PASS_EXT_EACH_LANE(Floats, a.lane[i] * b.lane[i]); }
inline Floats operator/(Floats a, Floats b) { PASS_EXT_EACH_LANE(Floats, a.lane[i] / b.lane[i]); }
inline Floats fused(Floats a, Floats b, Floats c) {
  PASS_EXT_EACH_LANE(Floats, fused(a.lane[i], b.lane[i], c.lane[i]));
}
inline Floats maximum(Floats a, Floats b) { PASS_EXT_EACH_LANE(Floats, maximum(a.lane[i], b.lane[i])); }
inline Floats minimum(Floats a, Floats b) { PASS_EXT_EACH_LANE(Floats, minimum(a.lane[i], b.lane[i])); }
inline Mask less(Floats a, Floats b) {
  Mask mask{0};
  for (int i = 0; i < Floats::width; ++i) mask.bits |= static_cast<uint32_t>(a.lane[i] < b.lane[i]) << i;
  return mask;
}
inline Floats select(Mask m, Floats yes, Floats no) {
  PASS_EXT_EACH_LANE(Floats, m.bits >> i & 1 ? yes.lane[i] : no.lane[i]);
}
inline uint32_t bits_of_mask(Mask mask) { return mask.bits; }
inline Mask mask_of_bits(uint32_t bits) { return {bits & 0xffu}; }
inline Mask operator&(Mask a, Mask b) { return {a.bits & b.bits}; }

inline Words operator+(Words a, Words b) { PASS_EXT_EACH_LANE(Words, a.lane[i] + b.lane[i]); }
inline Words operator-(Words a, Words b) { PASS_EXT_EACH_LANE(Words, a.lane[i] - b.lane[i]); }
inline Words operator&(Words a, Words b) { PASS_EXT_EACH_LANE(Words, a.lane[i] & b.lane[i]); }
inline Words operator^(Words a, Words b) { PASS_EXT_EACH_LANE(Words, a.lane[i] ^ b.lane[i]); }
inline Words operator~(Words a) { PASS_EXT_EACH_LANE(Words, ~a.lane[i]); }
inline Words shift_left(Words a, int bits) { PASS_EXT_EACH_LANE(Words, a.lane[i] << bits); }
inline Words shift_right_signed(Words a, int bits) { PASS_EXT_EACH_LANE(Words, shift_right_signed(a.lane[i], bits)); }
inline Words truncated(Floats a) { PASS_EXT_EACH_LANE(Words, static_cast<uint32_t>(static_cast<int32_t>(a.lane[i]))); }
inline Words bits_of(Floats a) { PASS_EXT_EACH_LANE(Words, bits_of(a.lane[i])); }
inline Floats float_of(Words a) { PASS_EXT_EACH_LANE(Floats, float_of(a.lane[i])); }
inline Floats float_of_signed(Words a) { PASS_EXT_EACH_LANE(Floats, float_of_signed(a.lane[i])); }
inline Floats float_of_unsigned(Words a) { PASS_EXT_EACH_LANE(Floats, float_of_unsigned(a.lane[i])); }
inline void multiply_wide(Words a, Words b, Words& high, Words& low) {
  for (int i = 0; i < Words::width; ++i) multiply_wide(a.lane[i], b.lane[i], high.lane[i], low.lane[i]);
}
// sum + the products of both halves of each word, as signed numbers of 16 bits
inline Words add_pairs(Words sum, Words a, Words b) {
  for (int i = 0; i < Words::width; ++i) {
    const auto half = [](uint32_t word, int bits) { return static_cast<int32_t>(static_cast<int16_t>(word >> bits)); };
    sum.lane[i] +=
        static_cast<uint32_t>(half(a.lane[i], 0) * half(b.lane[i], 0) + half(a.lane[i], 16) * half(b.lane[i], 16));
  }
  return sum;
}
#undef PASS_EXT_EACH_LANE

// Stores the lanes of the mask one behind the other; returns how many. May overwrite up to a vector from `to` on.
inline int store_selected(float* to, Floats value, Mask mask) {
  float lanes[Floats::width];
  store(lanes, value);
  int count = 0;
  for (uint32_t bits = bits_of_mask(mask); bits != 0; bits &= bits - 1) to[count++] = lanes[__builtin_ctz(bits)];
  return count;
}

inline float largest_lane(Floats a) {
  float largest = a.lane[0];
  for (int i = 1; i < Floats::width; ++i) largest = maximum(largest, a.lane[i]);
  return largest;
}
inline float sum_lanes(Floats a) {
  return ((a.lane[0] + a.lane[4]) + (a.lane[2] + a.lane[6])) + ((a.lane[1] + a.lane[5]) + (a.lane[3] + a.lane[7]));
}
// The sums of four vectors' lanes, added in the same order for each.
inline void store_sums(float* to, Floats a, Floats b, Floats c, Floats d) {
  to[0] = sum_lanes(a), to[1] = sum_lanes(b), to[2] = sum_lanes(c), to[3] = sum_lanes(d);
}

// Half (0 or 1) of the numbers of two vectors. The level and the type decide which numbers make a half, so this is for
// sums of products whose factors are read alike.
template <int half, typename T>
inline Floats load_half(const T* from) {
  return load(from + half * Floats::width);
}

#elif PASS_EXT_LEVEL == 1 && defined(__aarch64__)
#include "cpu/simd_neon-inl.h"
#elif PASS_EXT_LEVEL == 1

struct Floats {
  static constexpr int width = 8;
  __m256 lanes;
};

inline Floats zeros() { return {_mm256_setzero_ps()}; }

inline Floats load(const float* from) { return {_mm256_loadu_ps(from)}; }
inline Floats load(const int8_t* from) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))))};
}
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

struct Words {
  static constexpr int width = 8;
  __m256i lanes;
};

struct Mask {
  __m256 lanes;
};

inline Floats constant(Floats, float value) { return {_mm256_set1_ps(value)}; }
inline Words constant(Words, uint32_t value) { return {_mm256_set1_epi32(static_cast<int>(value))}; }
inline Words counting(uint32_t first) {
  return {_mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))};
}
inline Words load_words(const uint32_t* from) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))}; }
inline void store_words(uint32_t* to, Words value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value.lanes); }
inline void store_halves(uint32_t* to, Words value) {
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(value.lanes, value.lanes), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(halves));
}

inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.lanes, b.lanes)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.lanes, b.lanes)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.lanes, b.lanes)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.lanes, b.lanes)}; }
inline Floats fused(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.lanes, b.lanes, c.lanes)}; }
inline Floats maximum(Floats a, Floats b) { return {_mm256_max_ps(a.lanes, b.lanes)}; }
inline Floats minimum(Floats a, Floats b) { return {_mm256_min_ps(a.lanes, b.lanes)}; }
inline Mask less(Floats a, Floats b) { return {_mm256_cmp_ps(a.lanes, b.lanes, _CMP_LT_OQ)}; }
inline Floats select(Mask m, Floats yes, Floats no) { return {_mm256_blendv_ps(no.lanes, yes.lanes, m.lanes)}; }
inline uint32_t bits_of_mask(Mask mask) { return static_cast<uint32_t>(_mm256_movemask_ps(mask.lanes)); }
inline Mask mask_of_bits(uint32_t bits) {
  const __m256i lane_bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return {_mm256_castsi256_ps(
      _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane_bits), lane_bits))};
}

inline Mask operator&(Mask a, Mask b) { return {_mm256_and_ps(a.lanes, b.lanes)}; }

inline Words operator+(Words a, Words b) { return {_mm256_add_epi32(a.lanes, b.lanes)}; }
inline Words operator-(Words a, Words b) { return {_mm256_sub_epi32(a.lanes, b.lanes)}; }
inline Words operator&(Words a, Words b) { return {_mm256_and_si256(a.lanes, b.lanes)}; }
inline Words operator^(Words a, Words b) { return {_mm256_xor_si256(a.lanes, b.lanes)}; }
inline Words operator~(Words a) { return {_mm256_xor_si256(a.lanes, _mm256_set1_epi32(-1))}; }
inline Words shift_left(Words a, int bits) { return {_mm256_slli_epi32(a.lanes, bits)}; }
inline Words shift_right_signed(Words a, int bits) { return {_mm256_srai_epi32(a.lanes, bits)}; }
// sum + the products of both halves of each word, as signed numbers of 16 bits
inline Words add_pairs(Words sum, Words a, Words b) {
  sum.lanes = _mm256_add_epi32(sum.lanes, _mm256_madd_epi16(a.lanes, b.lanes));
  asm("" : "+x"(sum.lanes));  // else GCC adds in an order of its own, for which the registers do not suffice
  return sum;
}
// For the lowest four bits of each half of a word, the table's entry.
struct Table {
  __m256i lanes;
};
inline Table load_table(const uint8_t* from) {
  return {_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
}
inline Words looked_up(Table table, Words codes) {
  const __m256i four = _mm256_and_si256(codes.lanes, _mm256_set1_epi32(0x000f000f));
  return {_mm256_and_si256(_mm256_shuffle_epi8(table.lanes, four), _mm256_set1_epi32(0x00ff00ff))};
}
inline Words truncated(Floats a) { return {_mm256_cvttps_epi32(a.lanes)}; }
inline Words bits_of(Floats a) { return {_mm256_castps_si256(a.lanes)}; }
inline Floats float_of(Words a) { return {_mm256_castsi256_ps(a.lanes)}; }
inline Floats float_of_signed(Words a) { return {_mm256_cvtepi32_ps(a.lanes)}; }
inline Floats float_of_unsigned(Words a) {  // both halves are exact, their sum is rounded once
  const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(a.lanes, 16));
  const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(a.lanes, _mm256_set1_epi32(0xffff)));
  return {_mm256_fmadd_ps(high, _mm256_set1_ps(65536.0f), low)};
}
inline void multiply_wide(Words a, Words b, Words& high, Words& low) {
  const __m256i even = _mm256_mul_epu32(a.lanes, b.lanes);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a.lanes, 32), _mm256_srli_epi64(b.lanes, 32));
  high.lanes = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  low.lanes = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}

// Stores the lanes of the mask one behind the other; returns how many. May overwrite up to a vector from `to` on.
inline int store_selected(float* to, Floats value, Mask mask) {
  float lanes[Floats::width];
  store(lanes, value);
  int count = 0;
  for (uint32_t bits = bits_of_mask(mask); bits != 0; bits &= bits - 1) to[count++] = lanes[__builtin_ctz(bits)];
  return count;
}

inline float largest_lane(Floats a) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.lanes), _mm256_extractf128_ps(a.lanes, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}
inline float sum_lanes(Floats a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.lanes), _mm256_extractf128_ps(a.lanes, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
inline void store_sums(float* to, Floats a, Floats b, Floats c, Floats d) {
  const __m256 sum = _mm256_hadd_ps(_mm256_hadd_ps(a.lanes, b.lanes), _mm256_hadd_ps(c.lanes, d.lanes));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1)));
}

template <int half, typename T>
inline Floats load_half(const T* from) {
  return load(from + half * Floats::width);
}
template <int half>
inline Floats load_half(const bfloat16* from) {  // even numbers, odd numbers: one instruction each
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return {_mm256_castsi256_ps(half == 0 ? _mm256_slli_epi32(pairs, 16)
                                        : _mm256_and_si256(pairs, _mm256_set1_epi32(-65536)))};
}

#else

struct Floats {
  static constexpr int width = 16;
  __m512 lanes;
};

inline Floats zeros() { return {_mm512_setzero_ps()}; }

inline Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Floats load(const int8_t* from) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))))};
}
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
  // The bf16 instruction flushes subnormals, so lanes that hold one are rounded below.
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

struct Words {
  static constexpr int width = 16;
  __m512i lanes;
};

struct Mask {
  __mmask16 lanes;
};

inline Floats constant(Floats, float value) { return {_mm512_set1_ps(value)}; }
inline Words constant(Words, uint32_t value) { return {_mm512_set1_epi32(static_cast<int>(value))}; }
inline Words counting(uint32_t first) {
  return {_mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)),
                           _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))};
}
inline Words load_words(const uint32_t* from) { return {_mm512_loadu_si512(from)}; }
inline void store_words(uint32_t* to, Words value) { _mm512_storeu_si512(to, value.lanes); }
inline void store_halves(uint32_t* to, Words value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(value.lanes));
}

inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.lanes, b.lanes)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.lanes, b.lanes)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.lanes, b.lanes)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.lanes, b.lanes)}; }
inline Floats fused(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.lanes, b.lanes, c.lanes)}; }
inline Floats maximum(Floats a, Floats b) { return {_mm512_max_ps(a.lanes, b.lanes)}; }
inline Floats minimum(Floats a, Floats b) { return {_mm512_min_ps(a.lanes, b.lanes)}; }
inline Mask less(Floats a, Floats b) { return {_mm512_cmp_ps_mask(a.lanes, b.lanes, _CMP_LT_OQ)}; }
inline Floats select(Mask m, Floats yes, Floats no) { return {_mm512_mask_blend_ps(m.lanes, no.lanes, yes.lanes)}; }
inline uint32_t bits_of_mask(Mask mask) { return mask.lanes; }
inline Mask mask_of_bits(uint32_t bits) { return {static_cast<__mmask16>(bits)}; }
inline Mask operator&(Mask a, Mask b) { return {static_cast<__mmask16>(a.lanes & b.lanes)}; }

inline Words operator+(Words a, Words b) { return {_mm512_add_epi32(a.lanes, b.lanes)}; }
inline Words operator-(Words a, Words b) { return {_mm512_sub_epi32(a.lanes, b.lanes)}; }
inline Words operator&(Words a, Words b) { return {_mm512_and_si512(a.lanes, b.lanes)}; }
inline Words operator^(Words a, Words b) { return {_mm512_xor_si512(a.lanes, b.lanes)}; }
inline Words operator~(Words a) { return {_mm512_xor_si512(a.lanes, _mm512_set1_epi32(-1))}; }
inline Words shift_left(Words a, int bits) { return {_mm512_slli_epi32(a.lanes, static_cast<unsigned>(bits))}; }
inline Words shift_right_signed(Words a, int bits) { return {_mm512_srai_epi32(a.lanes, static_cast<unsigned>(bits))}; }
// sum + the products of both halves of each word, as signed numbers of 16 bits
inline Words add_pairs(Words sum, Words a, Words b) {
#if PASS_EXT_LEVEL == 3
  return {_mm512_dpwssd_epi32(sum.lanes, a.lanes, b.lanes)};
#else
  sum.lanes = _mm512_add_epi32(sum.lanes, _mm512_madd_epi16(a.lanes, b.lanes));
  asm("" : "+v"(sum.lanes));  // else GCC adds in an order of its own, for which the registers do not suffice
  return sum;
#endif
}
// For the lowest four bits of each half of a word, the table's entry; it stands there twice, so a fifth bit changes
// nothing.
struct Table {
  __m512i lanes;
};
inline Table load_table(const uint8_t* from) {
  return {_mm512_broadcast_i64x4(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))))};
}
inline Words looked_up(Table table, Words codes) { return {_mm512_permutexvar_epi16(codes.lanes, table.lanes)}; }
inline Words truncated(Floats a) { return {_mm512_cvttps_epi32(a.lanes)}; }
inline Words bits_of(Floats a) { return {_mm512_castps_si512(a.lanes)}; }
inline Floats float_of(Words a) { return {_mm512_castsi512_ps(a.lanes)}; }
inline Floats float_of_signed(Words a) { return {_mm512_cvtepi32_ps(a.lanes)}; }
inline Floats float_of_unsigned(Words a) { return {_mm512_cvtepu32_ps(a.lanes)}; }
inline void multiply_wide(Words a, Words b, Words& high, Words& low) {
  const __m512i even = _mm512_mul_epu32(a.lanes, b.lanes);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.lanes, 32), _mm512_srli_epi64(b.lanes, 32));
  high.lanes = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  low.lanes = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
}

#if PASS_EXT_LEVEL == 3
// Pairs of bf16, one in each half of a word.
inline Floats sum_of_products(Floats sum, Words a, Words b) {
  return {_mm512_dpbf16_ps(sum.lanes, reinterpret_cast<__m512bh>(a.lanes), reinterpret_cast<__m512bh>(b.lanes))};
}
// Sums of both halves of words.
inline Words add_halves(Words a, Words b) { return {_mm512_add_epi16(a.lanes, b.lanes)}; }
inline Words interleaved(const bfloat16* low, const bfloat16* high) {
  const __m512i l = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)));
  const __m512i h = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)));
  return {_mm512_or_si512(l, _mm512_slli_epi32(h, 16))};
}
// Rounded to nearest, halves up: cheaper than halves to even, and right for weights, which are not negative.
inline Words paired(Floats low, Floats high) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i l = _mm512_add_epi32(_mm512_castps_si512(low.lanes), half);
  const __m512i h = _mm512_add_epi32(_mm512_castps_si512(high.lanes), half);
  return {_mm512_or_si512(_mm512_srli_epi32(l, 16), _mm512_and_si512(h, _mm512_set1_epi32(-65536)))};
}
#endif

// Stores the lanes of the mask one behind the other; returns how many. May overwrite up to a vector from `to` on.
inline int store_selected(float* to, Floats value, Mask mask) {
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(mask.lanes, value.lanes));
  return __builtin_popcount(mask.lanes);
}

inline float largest_lane(Floats a) { return _mm512_reduce_max_ps(a.lanes); }
inline float sum_lanes(Floats a) { return _mm512_reduce_add_ps(a.lanes); }
// In each quarter [p p q q]: sums of the two lanes that lie two apart.
inline __m512 halved(__m512 p, __m512 q) {
  return _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, p, q), _mm512_shuffle_ps(p, q, 0x4e));
}
inline void store_sums(float* to, Floats a, Floats b, Floats c, Floats d) {
  const __m512 ab = halved(a.lanes, b.lanes), cd = halved(c.lanes, d.lanes);
  const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

template <int half, typename T>
inline Floats load_half(const T* from) {
  return load(from + half * Floats::width);
}
template <int half>
inline Floats load_half(const bfloat16* from) {  // even numbers, odd numbers: one instruction each
  const __m512i pairs = _mm512_loadu_si512(from);
  return {_mm512_castsi512_ps(half == 0 ? _mm512_slli_epi32(pairs, 16)
                                        : _mm512_and_si512(pairs, _mm512_set1_epi32(-65536)))};
}

#endif

// Rounded to T.
template <typename T>
inline Floats rounded(Floats value) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return value;
  } else {
    T narrow[Floats::width];
    store(narrow, value);
    return load(narrow);
  }
}

// The first `count` numbers of a vector; the others are 0.
template <typename T>
inline Floats load_first(const T* from, int64_t count) {
  if (count >= Floats::width) return load(from);
  T padded[Floats::width];
  memset(padded, 0, sizeof padded);
  memcpy(padded, from, count * sizeof(T));
  return load(padded);
}
template <typename T>
inline void store_first(T* to, Floats value, int64_t count) {
  if (count >= Floats::width) return store(to, value);
  T padded[Floats::width];
  store(padded, value);
  memcpy(to, padded, count * sizeof(T));
}
