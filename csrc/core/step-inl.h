// The formulas of the step ops, for one number of a row or a vector of them. F is a float or a vector of floats, as in
// core/elementary-inl.h; T is the tensors' type, and rounded<T> rounds to it. Where a tensor op of a model would end,
// the result is rounded to T: so the ops give the bits of the modules that they replace.

// A row's number divided by the root mean square, times its weight, not yet rounded.
template <typename T, NormForm form, typename F>
PASS_EXT_HOST_DEVICE F weighted(F normal, F weight) {
  if (form == NormForm::llama) return weight * rounded<T>(normal);
  if (form == NormForm::gemma) weight = constant(weight, 1.0f) + weight;
  return weight * normal;
}

// The two numbers of a pair, rotated by the angle with this cosine and sine, not yet rounded. Each has its own cosine
// and sine, as transformers' rows have. `in_fp32`: nothing is rounded in between.
template <typename T, bool in_fp32, typename F>
PASS_EXT_HOST_DEVICE F rotated_first(F first, F second, F cos, F sin) {
  if (in_fp32) return first * cos - second * sin;
  return rounded<T>(first * cos) - rounded<T>(second * sin);
}
template <typename T, bool in_fp32, typename F>
PASS_EXT_HOST_DEVICE F rotated_second(F first, F second, F cos, F sin) {
  if (in_fp32) return second * cos + first * sin;
  return rounded<T>(second * cos) + rounded<T>(first * sin);
}

// silu: x / (1 + e^-x), computed from e^-|x|, which cannot overflow. gelu_tanh: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715
// x^3))), in this form although it loses digits below -1, because PyTorch's has the same.
template <Activation activation, typename F>
PASS_EXT_HOST_DEVICE F activated(F x) {
  const F zero = constant(x, 0.0f), one = constant(x, 1.0f);
  if (activation == Activation::silu) {
    const F e = exponential(minimum(x, zero - x));
    return select(less(x, zero), x * e, x) / (one + e);
  }
  const F cubic = x + constant(x, 0.044715f) * (x * x * x);
  return constant(x, 0.5f) * x * (one + softcapped(constant(x, 0.797884561f) * cubic, one));
}

// activation(gate) up, not yet rounded.
template <typename T, Activation activation, typename F>
PASS_EXT_HOST_DEVICE F gated(F gate, F up) {
  return rounded<T>(activated<activation>(gate)) * up;
}

// A rounded product that is added to the residual stream: times `scale`, rounded again; a scale of 1 rounds nothing.
template <typename T, typename F>
PASS_EXT_HOST_DEVICE F scaled(F product, float scale) {
  return scale == 1.0f ? product : rounded<T>(product * constant(product, scale));
}
