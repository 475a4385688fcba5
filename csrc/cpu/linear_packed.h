// Packed weights times few rows (core/linear.h), by the instruction set in use.
#pragma once

#include "core/linear.h"

namespace pass_ext {

// Whether products cross codes (cpu/linear_packed-inl.h), which no bit shows: measured, unless a limit names a unit.
// Its name stands for either way, so that tests see both.
bool crosses_codes();

// Writes rows [first, first + rows) of x as digits, in no more than arranged_bytes.
template <typename T>
void write_digits(const LinearRows<T>& problem, int64_t first, int64_t rows, bool crosses, void* memory);

// Computes the sums [rows, kGroupOutputs] of rows of digits for outputs [begin, end), whole blocks.
void multiply_packed(const void* packed, PackedForm form, int64_t in, int64_t rows, void* digits, bool crosses,
                     float* sums, int64_t begin, int64_t end);

}  // namespace pass_ext
