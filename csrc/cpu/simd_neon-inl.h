// One vector of fp32 values on ARM, as two of NEON, with the bits that simd-inl.h's portable vector has: the text of
// level 1 there.

struct Floats {
  static constexpr int width = 8;
  float32x4_t low, high;
};

inline Floats zeros() { return {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}; }

inline Floats load(const float* from) { return {vld1q_f32(from), vld1q_f32(from + 4)}; }
inline Floats load(const int8_t* from) {
  const int16x8_t wide = vmovl_s8(vld1_s8(from));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))};
}
inline Floats load(const float16* from) {
  const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(&from->bits));
  return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
inline Floats load(const bfloat16* from) {
  const uint16x8_t halves = vld1q_u16(&from->bits);
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)),
          vreinterpretq_f32_u32(vshll_high_n_u16(halves, 16))};
}

inline void store(float* to, Floats value) {
  vst1q_f32(to, value.low);
  vst1q_f32(to + 4, value.high);
}
inline void store(float16* to, Floats value) {
  const float16x8_t halves = vcvt_high_f16_f32(vcvt_f16_f32(value.low), value.high);
  vst1q_u16(&to->bits, vreinterpretq_u16_f16(halves));
}
inline uint32x4_t rounded_to_upper_half(float32x4_t value) {
  const uint32x4_t bits = vreinterpretq_u32_f32(value);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  return vbslq_u32(vceqq_f32(value, value), rounded, vdupq_n_u32(0x7fff0000));
}
inline void store(bfloat16* to, Floats value) {
  const uint16x4_t low = vshrn_n_u32(rounded_to_upper_half(value.low), 16);
  vst1q_u16(&to->bits, vshrn_high_n_u32(low, rounded_to_upper_half(value.high), 16));
}

struct Words {
  static constexpr int width = 8;
  uint32x4_t low, high;
};

struct Mask {
  uint32x4_t low, high;
};

inline Floats constant(Floats, float value) { return {vdupq_n_f32(value), vdupq_n_f32(value)}; }
inline Words constant(Words, uint32_t value) { return {vdupq_n_u32(value), vdupq_n_u32(value)}; }
inline Words counting(uint32_t first) {
  const uint32x4_t low = {first, first + 1, first + 2, first + 3};
  return {low, vaddq_u32(low, vdupq_n_u32(4))};
}
inline Words load_words(const uint32_t* from) { return {vld1q_u32(from), vld1q_u32(from + 4)}; }
inline void store_words(uint32_t* to, Words value) {
  vst1q_u32(to, value.low);
  vst1q_u32(to + 4, value.high);
}
inline void store_halves(uint32_t* to, Words value) {
  vst1q_u32(to, vreinterpretq_u32_u16(vmovn_high_u32(vmovn_u32(value.low), value.high)));
}

inline Floats operator+(Floats a, Floats b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline Floats operator-(Floats a, Floats b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline Floats operator*(Floats a, Floats b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline Floats operator/(Floats a, Floats b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
inline Floats fused(Floats a, Floats b, Floats c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
inline Mask less(Floats a, Floats b) { return {vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high)}; }
inline Floats select(Mask m, Floats yes, Floats no) {
  return {vbslq_f32(m.low, yes.low, no.low), vbslq_f32(m.high, yes.high, no.high)};
}
// As core/scalar.h has them where a number is NaN: NEON's own would be NaN.
inline Floats maximum(Floats a, Floats b) { return select(less(b, a), a, b); }
inline Floats minimum(Floats a, Floats b) { return select(less(a, b), a, b); }
inline uint32_t bits_of_mask(Mask mask) {
  const uint32x4_t low = {1, 2, 4, 8}, high = {16, 32, 64, 128};
  return vaddvq_u32(vorrq_u32(vandq_u32(mask.low, low), vandq_u32(mask.high, high)));
}
inline Mask mask_of_bits(uint32_t bits) {
  const uint32x4_t low = {1, 2, 4, 8}, high = {16, 32, 64, 128};
  return {vtstq_u32(vdupq_n_u32(bits), low), vtstq_u32(vdupq_n_u32(bits), high)};
}
inline Mask operator&(Mask a, Mask b) { return {vandq_u32(a.low, b.low), vandq_u32(a.high, b.high)}; }

inline Words operator+(Words a, Words b) { return {vaddq_u32(a.low, b.low), vaddq_u32(a.high, b.high)}; }
inline Words operator-(Words a, Words b) { return {vsubq_u32(a.low, b.low), vsubq_u32(a.high, b.high)}; }
inline Words operator&(Words a, Words b) { return {vandq_u32(a.low, b.low), vandq_u32(a.high, b.high)}; }
inline Words operator^(Words a, Words b) { return {veorq_u32(a.low, b.low), veorq_u32(a.high, b.high)}; }
inline Words operator~(Words a) { return {vmvnq_u32(a.low), vmvnq_u32(a.high)}; }
inline Words shift_left(Words a, int bits) { return {a.low << bits, a.high << bits}; }
inline Words shift_right_signed(Words a, int bits) {
  return {vreinterpretq_u32_s32(vreinterpretq_s32_u32(a.low) >> bits),
          vreinterpretq_u32_s32(vreinterpretq_s32_u32(a.high) >> bits)};
}
// sum + the products of the four signed bytes of each word of a and of b's word `place`
inline uint32x4_t add_bytes(uint32x4_t sum, uint32x4_t a, uint32x4_t b, int place) {
  const int32x4_t sums = vreinterpretq_s32_u32(sum);
  const int8x16_t left = vreinterpretq_s8_u32(a), right = vreinterpretq_s8_u32(b);
  switch (place) {  // a part of the instruction
    case 0: return vreinterpretq_u32_s32(vdotq_laneq_s32(sums, left, right, 0));
    case 1: return vreinterpretq_u32_s32(vdotq_laneq_s32(sums, left, right, 1));
    case 2: return vreinterpretq_u32_s32(vdotq_laneq_s32(sums, left, right, 2));
    default: return vreinterpretq_u32_s32(vdotq_laneq_s32(sums, left, right, 3));
  }
}
// The bytes of both words' pairs of bytes that lie lower, and those that lie higher: of a, of b, of a, of b.
inline uint8x16_t bytes_of(uint32x4_t words) { return vreinterpretq_u8_u32(words); }
inline Words lower_bytes(Words a, Words b) {
  return {vreinterpretq_u32_u8(vtrn1q_u8(bytes_of(a.low), bytes_of(b.low))),
          vreinterpretq_u32_u8(vtrn1q_u8(bytes_of(a.high), bytes_of(b.high)))};
}
inline Words upper_bytes(Words a, Words b) {
  return {vreinterpretq_u32_u8(vtrn2q_u8(bytes_of(a.low), bytes_of(b.low))),
          vreinterpretq_u32_u8(vtrn2q_u8(bytes_of(a.high), bytes_of(b.high)))};
}
inline Words lower_nibbles(Words codes) { return codes & constant(codes, 0x0f0f0f0fu); }
inline Words upper_nibbles(Words codes) {
  return {vreinterpretq_u32_u8(vshrq_n_u8(bytes_of(codes.low), 4)),
          vreinterpretq_u32_u8(vshrq_n_u8(bytes_of(codes.high), 4))};
}
// For each byte of a word, 15 at most, the table's entry.
struct Table {
  uint8x16_t lanes;
};
inline Table load_table(const uint8_t* from) { return {vld1q_u8(from)}; }
inline Words looked_up(Table table, Words codes) {
  return {vreinterpretq_u32_u8(vqtbl1q_u8(table.lanes, bytes_of(codes.low))),
          vreinterpretq_u32_u8(vqtbl1q_u8(table.lanes, bytes_of(codes.high)))};
}
inline Words truncated(Floats a) {
  return {vreinterpretq_u32_s32(vcvtq_s32_f32(a.low)), vreinterpretq_u32_s32(vcvtq_s32_f32(a.high))};
}
inline Words bits_of(Floats a) { return {vreinterpretq_u32_f32(a.low), vreinterpretq_u32_f32(a.high)}; }
inline Floats float_of(Words a) { return {vreinterpretq_f32_u32(a.low), vreinterpretq_f32_u32(a.high)}; }
inline Floats float_of_signed(Words a) {
  return {vcvtq_f32_s32(vreinterpretq_s32_u32(a.low)), vcvtq_f32_s32(vreinterpretq_s32_u32(a.high))};
}
inline Floats float_of_unsigned(Words a) { return {vcvtq_f32_u32(a.low), vcvtq_f32_u32(a.high)}; }
inline uint32x4_t high_product(uint32x4_t a, uint32x4_t b) {
  const uint64x2_t low = vmull_u32(vget_low_u32(a), vget_low_u32(b)), high = vmull_high_u32(a, b);
  return vuzp2q_u32(vreinterpretq_u32_u64(low), vreinterpretq_u32_u64(high));
}
inline void multiply_wide(Words a, Words b, Words& high, Words& low) {
  high = {high_product(a.low, b.low), high_product(a.high, b.high)};
  low = {vmulq_u32(a.low, b.low), vmulq_u32(a.high, b.high)};
}

// Stores the lanes of the mask one behind the other; returns how many. May overwrite up to a vector from `to` on.
inline int store_selected(float* to, Floats value, Mask mask) {
  float lanes[Floats::width];
  store(lanes, value);
  int count = 0;
  for (uint32_t bits = bits_of_mask(mask); bits != 0; bits &= bits - 1) to[count++] = lanes[__builtin_ctz(bits)];
  return count;
}

inline float largest_lane(Floats a) { return vmaxvq_f32(vmaxq_f32(a.low, a.high)); }
// (0 + 4) + (2 + 6), (1 + 5) + (3 + 7)
inline float32x2_t sums_of_pairs(Floats a) {
  const float32x4_t half = vaddq_f32(a.low, a.high);
  return vadd_f32(vget_low_f32(half), vget_high_f32(half));
}
inline float sum_lanes(Floats a) { return vaddv_f32(sums_of_pairs(a)); }
inline void store_sums(float* to, Floats a, Floats b, Floats c, Floats d) {
  const float32x4_t ab = vcombine_f32(sums_of_pairs(a), sums_of_pairs(b));
  vst1q_f32(to, vpaddq_f32(ab, vcombine_f32(sums_of_pairs(c), sums_of_pairs(d))));
}

template <int half, typename T>
inline Floats load_half(const T* from) {
  return load(from + half * Floats::width);
}
