// The unit that multiplies bfloat16 numbers. Which one is fastest is measured, since processors with the same
// instructions differ: bf16 dot products do twice the work of fp32 multiplications on some, half of it on others. A
// row's bits depend on the unit, so a process has one, whatever the number of rows, for products of weights and for
// attention.
#pragma once

#include "cpu/isa.h"

namespace pass_ext {

// Vectors widened to fp32; vectors of pairs, by bf16 dot products; tiles (cpu/tiles.h); the same in plain C++, which is
// never the fastest.
enum class ProductUnit { fp32, pairs, amx, amx_emulated };

// Measured when it is first asked for, unless a limit names it.
ProductUnit product_unit();

// The level whose vectors multiply: avx512 where fp32 is clearly faster than pairs.
Isa product_isa();

}  // namespace pass_ext

// For ctypes (pass_ext/_library): "fp32", "pairs", "amx" or "amx_emulated".
extern "C" __attribute__((visibility("default"))) const char* pass_ext_cpu_products();
