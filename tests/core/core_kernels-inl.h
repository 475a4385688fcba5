// Vector loads and stores of csrc/cpu/simd-inl.h over an array, at one instruction set.
template <typename From, typename To>
void convert(const From* in, To* out, int64_t n) {
  int64_t i = 0;
  for (; i + Floats::width <= n; i += Floats::width) store(out + i, load(in + i));
  for (; i < n; ++i) out[i] = from_float<To>(to_float(in[i]));
}

// core/elementary-inl.h on vectors; n is a multiple of every vector's width.
void exponentials(const float* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += Floats::width) store(out + i, exponential(load(in + i)));
}
void logarithms(const float* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += Floats::width) store(out + i, logarithm(load(in + i)));
}
void exponential_variates(const uint32_t* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += Words::width) store(out + i, exponential_variate(load_words(in + i)));
}
// The first words of the blocks with counters (in[i], 1, 2, 3).
void philox_words(const uint32_t* in, uint32_t* out, uint64_t key, int64_t n) {
  for (int64_t i = 0; i < n; i += Words::width) {
    Words word[4] = {load_words(in + i), constant(Words{}, 1u), constant(Words{}, 2u), constant(Words{}, 3u)};
    philox_rounds(word, key);
    store_words(out + i, word[0]);
  }
}
// Every operation of simd-inl.h that elementary-inl.h does not use, folded into one number per lane.
void other_operations(const float* a, const float* b, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += Floats::width) {
    const Floats x = load(a + i), y = load(b + i);
    const Mask both = less(x, y) & mask_of_bits(bits_of_mask(less(constant(x, -1.0f), x)));
    const Floats picked = select(both, minimum(x, y), maximum(x, y));
    store(out + i, picked + float_of_signed(truncated(x + y)) + constant(x, largest_lane(constant(x, a[i]))));
  }
}
