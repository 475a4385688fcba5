// exp, log, softcap and an exponentially distributed number, as polynomials in the operations of core/scalar.h: at most
// 2 ulp from exact (softcap: 4), and the same bits on every processor. F is a float or a vector of floats, W its
// unsigned 32-bit counterpart. The text is included inside each namespace that has those operations: floats
// (core/scalar.h) and the vectors of each instruction set (cpu/each_isa.h).

// e^x for -86 <= x <= 0
template <typename F>
PASS_EXT_HOST_DEVICE F exponential_in_range(F x) {
  // x = n ln2 + r; adding 1.5 2^23 rounds n to an integer and leaves it in the low bits of the sum.
  const F magic = constant(x, 12582912.0f);
  const F shifted = fused(x, constant(x, kLog2E), magic);
  const F n = shifted - magic;
  F r = fused(n, constant(x, -0.693359375f), x);
  r = fused(n, constant(x, 2.12194440e-4f), r);
  F sum = constant(x, 0.0013814467237f);
  sum = fused(sum, r, constant(x, 0.0083687808365f));
  sum = fused(sum, r, constant(x, 0.0416683927178f));
  sum = fused(sum, r, constant(x, 0.1666651964188f));
  sum = fused(sum, r, constant(x, 0.4999999403954f));
  const F power = fused(r * r, sum, r) + constant(x, 1.0f);
  return float_of(bits_of(power) + shift_left(bits_of(shifted), 23));
}

// e^x for x <= 0. Below -86, where a float starts to lose digits, 0.
template <typename F>
PASS_EXT_HOST_DEVICE F exponential(F x) {
  const F lowest = constant(x, -86.0f);
  return select(less(x, lowest), constant(x, 0.0f), exponential_in_range(maximum(x, lowest)));
}

// 2^x for x <= 127; below -126, where a float starts to lose digits, 0. NaN stays NaN.
template <typename F>
PASS_EXT_HOST_DEVICE F power_of_two(F x) {
  // x = n + r; adding 1.5 2^23 + 127 rounds n to an integer and leaves n + 127, the exponent of 2^n, in the low bits.
  const F magic = constant(x, 12583039.0f);
  const F shifted = x + magic;
  const F r = x - (shifted - magic);
  F sum = constant(x, 0.0013264726f);
  sum = fused(sum, r, constant(x, 0.0096715130f));
  sum = fused(sum, r, constant(x, 0.0555073358f));
  sum = fused(sum, r, constant(x, 0.2402224243f));
  sum = fused(sum, r, constant(x, 0.6931470037f));
  sum = fused(sum, r, constant(x, 1.0f));
  const F power = sum * float_of(shift_left(bits_of(shifted), 23));
  return select(less(x, constant(x, -126.0f)), constant(x, 0.0f), power);
}

// cap tanh(s / cap)
template <typename F>
PASS_EXT_HOST_DEVICE F softcapped(F s, F cap) {
  const F y = s / cap, zero = constant(s, 0.0f), one = constant(s, 1.0f);
  const F size = maximum(zero - y, y);
  const F e = power_of_two(constant(s, -2.88539008f) * size);  // e^(-2 |y|)
  const F t = (one - e) / (one + e);
  // Near 0, where 1 - e has no digits left: tanh's series.
  const F square = y * y;
  F series = constant(s, 0.0218694885f);
  series = fused(series, square, constant(s, -0.0539682540f));
  series = fused(series, square, constant(s, 0.1333333333f));
  series = fused(series, square, constant(s, -0.3333333333f));
  series = fused(series * square, y, y);
  return cap * select(less(size, constant(s, 0.25f)), series, select(less(y, zero), zero - t, t));
}

// ln x for normal x > 0
template <typename F>
PASS_EXT_HOST_DEVICE F logarithm(F x) {
  // x = 2^n (1 + f) with 1 + f in [sqrt(1/2), sqrt(2))
  const auto bits = bits_of(x);
  const auto n_bits = shift_right_signed(bits - constant(bits, 0x3f3504f3u), 23);
  const F n = float_of_signed(n_bits);
  const F f = float_of(bits - shift_left(n_bits, 23)) - constant(x, 1.0f);
  F sum = constant(x, -0.0763449296355f);
  sum = fused(sum, f, constant(x, 0.1276157498360f));
  sum = fused(sum, f, constant(x, -0.1316018253565f));
  sum = fused(sum, f, constant(x, 0.1420175880194f));
  sum = fused(sum, f, constant(x, -0.1662335693836f));
  sum = fused(sum, f, constant(x, 0.2000122666359f));
  sum = fused(sum, f, constant(x, -0.2500081956387f));
  sum = fused(sum, f, constant(x, 0.3333333134651f));
  sum = fused(sum, f, constant(x, -0.5f));
  const F low = fused(f * f, sum, n * constant(x, -2.12194440e-4f));
  return fused(n, constant(x, 0.693359375f), low + f);
}

// -ln(1 - v) for v = (word + 1/2) 2^-32: exponentially distributed when the word is uniform. Full relative precision at
// both ends: small values, which win races, keep all their digits.
template <typename W>
PASS_EXT_HOST_DEVICE auto exponential_variate(W word) {
  const auto like = float_of(word);
  const auto step = constant(like, 0x1p-32f), half_step = constant(like, 0x1p-33f);
  const auto v = fused(float_of_unsigned(word), step, half_step);
  const auto complement = fused(float_of_unsigned(~word), step, half_step);  // 1 - v, not rounded off near 0
  const auto is_small = less(v, constant(like, 0.5f));
  const auto rest = select(is_small, constant(like, 1.0f) - v, complement);
  const auto lost =
      select(is_small, (constant(like, 1.0f) - rest) - v, constant(like, 0.0f));  // the part that rounding 1 - v lost
  return constant(like, 0.0f) - (logarithm(rest) + lost);
}

// The ten rounds of Philox4x32, see core/philox.h. Replaces the counter, or a vector of counters, by the result.
template <typename W>
PASS_EXT_HOST_DEVICE void philox_rounds(W (&word)[4], uint64_t key) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    W high0, low0, high1, low1;
    multiply_wide(word[0], constant(word[0], 0xD2511F53u), high0, low0);
    multiply_wide(word[2], constant(word[2], 0xCD9E8D57u), high1, low1);
    word[0] = high1 ^ word[1] ^ constant(word[0], key0);
    word[1] = low1;
    word[2] = high0 ^ word[3] ^ constant(word[0], key1);
    word[3] = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}
