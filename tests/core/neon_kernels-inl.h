// What test_neon.py compares: the operations of csrc/cpu/simd-inl.h, and products with few rows.
#include "core_kernels-inl.h"
#include "cpu/linear_kernels-inl.h"
#include "cpu/transpose-inl.h"

// Of its own, since both have blocks of rows.
namespace packed {
#include "cpu/linear_packed-inl.h"
}

// The operations that core_kernels-inl.h leaves out, of `width` words at a time; returns how many numbers it wrote.
int64_t rest(const uint32_t* in, uint32_t* out) {
  uint32_t* to = out;
  const auto put = [&](Words words) { store_words(to, words), to += Words::width; };
  const Words a = load_words(in), b = load_words(in + Words::width);
  put(a + b), put(a - b), put(a & b), put(a ^ b), put(~a), put(counting(in[0]));
  put(shift_left(a, 5)), put(shift_right_signed(a, 7));
  put(bits_of(float_of_signed(a))), put(bits_of(float_of_unsigned(a)));
  Words high, low;
  multiply_wide(a, b, high, low);
  put(high), put(low);
  store_halves(to, a & constant(a, 0xffffu)), to += Words::width / 2;
  const Floats x = float_of(a), y = float_of(b);  // any bits, NaN among them
  put(bits_of(select(less(x, y), x, y))), put(bits_of(select(mask_of_bits(in[0] & 0xff), x, y)));
  *to++ = bits_of_mask(less(x, y) & mask_of_bits(in[1] & 0xff));
  const Floats p = float_of_signed(a), q = float_of_signed(b);
  put(bits_of(p + q)), put(bits_of(p - q)), put(bits_of(p * q)), put(bits_of(p / q)), put(bits_of(fused(p, q, p)));
  put(bits_of(maximum(p, q))), put(bits_of(minimum(p, q)));
  *to++ = bits_of(sum_lanes(p)), *to++ = bits_of(largest_lane(p));
  float sums[4];
  store_sums(sums, p, q, p - q, p + q);
  for (const float sum : sums) *to++ = bits_of(sum);
  float picked[Floats::width];
  for (int i = 0, count = store_selected(picked, p, less(p, q)); i < count; ++i) *to++ = bits_of(picked[i]);
  Words square[Words::width];
  for (int i = 0; i < Words::width; ++i) square[i] = load_words(in + i * Words::width);
  transpose(square);
  for (const Words& row : square) put(row);
  return to - out;
}

// Sums of one group of outputs, [rows, kGroupOutputs].
template <typename T>
void product(const LinearRows<T>& problem, void* memory, float* scratch, float* sums) {
  if (problem.packed) {
    packed::write_digit_rows(problem, 0, problem.rows, false, memory);
    packed::multiply_packed_group(problem.packed, problem.form, problem.in, problem.rows, memory, false, sums, 0,
                                  problem.outputs);
  } else {
    arrange_rows(problem, 0, problem.rows, memory);
    multiply_group(problem, problem.rows, memory, LinearScratch(scratch, problem.rows, false), sums, 0,
                   problem.outputs);
  }
}
