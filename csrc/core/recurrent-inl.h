// The formulas of layers with a state, for one number of a state or a vector of neighbouring value columns. F is a
// float or a vector of floats, as in core/elementary-inl.h. Sums over the rows of a state have one order: row i is
// added to part i % 4, in the order of i and fused; then the parts are added as sum_of_parts does. No value column
// enters another's sum, so the bits do not depend on how columns are divided.

// e^x within 2 ulp. Below -86 it is 0, from 88 on infinity; NaN stays NaN.
template <typename F>
PASS_EXT_HOST_DEVICE F decay_of(F x) {
  const F beyond = x + constant(x, __builtin_inff());
  return select(less(x, constant(x, 88.0f)), exponential(x), beyond);
}

template <typename F>
PASS_EXT_HOST_DEVICE F sum_of_parts(F a, F b, F c, F d) {
  return (a + b) + (c + d);
}

// u of a node; recalled: what the decayed state holds for its key.
template <bool is_delta, typename F>
PASS_EXT_HOST_DEVICE F update_of(F beta, F value, F recalled) {
  return is_delta ? beta * (value - recalled) : beta * value;
}

// A number of the state after its node's update, `decayed` being D S.
template <typename F>
PASS_EXT_HOST_DEVICE F updated_state(F decayed, F key, F u) {
  return fused(key, u, decayed);
}
