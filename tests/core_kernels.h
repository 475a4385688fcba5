// Vector loads and stores of csrc/cpu/simd.h over an array, at one instruction set. Called by core.cpp.
template <typename From, typename To>
void convert(const From* in, To* out, int64_t n) {
  int64_t i = 0;
  for (; i + Floats::width <= n; i += Floats::width) store(out + i, load(in + i));
  for (; i < n; ++i) out[i] = from_float<To>(to_float(in[i]));
}
