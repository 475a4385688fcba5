// The unit that multiplies bfloat16 numbers. Which one is fastest is measured, since processors with the same
// instructions differ: bf16 dot products do twice the work of fp32 multiplications on some, half of it on others. A
// row's bits depend on the unit, so a process has one, whatever the number of rows.
#pragma once

#include "cpu/isa.h"

namespace pass_ext {

// Widened to fp32; in pairs, by bf16 dot products.
enum class Unit { fp32, pairs };

// The unit in use: measured when it is first asked for, unless a limit names it.
Unit product_unit();

// The level whose kernels multiply by that unit.
Isa product_isa();

}  // namespace pass_ext

// For ctypes (pass_ext/_library): "fp32" or "pairs".
extern "C" __attribute__((visibility("default"))) const char* pass_ext_cpu_products();
