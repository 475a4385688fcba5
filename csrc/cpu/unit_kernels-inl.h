// Products of bfloat16 numbers in registers, at one instruction set (see each_isa.h): what its unit can do at most.

// Adds 2 * kChains * Floats::width products in each step. So many sums that none waits for the one before it.
void multiply_in_registers(int64_t steps, float* lanes) {
  constexpr int kChains = 12;
  const Floats factor = load(lanes);
  Floats sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = zeros();
#if PASS_EXT_LEVEL == 3
  const Words pairs = bits_of(factor);
  for (int64_t step = 0; step < steps; ++step)
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sum[i] = sum_of_products(sum[i], pairs, pairs);
#else
  for (int64_t step = 0; step < 2 * steps; ++step)
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sum[i] = fused(factor, factor, sum[i]);
#endif
  for (int i = 1; i < kChains; ++i) sum[0] = sum[0] + sum[i];
  store(lanes, sum[0]);
}
