// quantize_rows' problem on the CPU, shared among threads: what csrc/cpu/quantized.cpp computes.
#pragma once

#include "core/quantized.h"

namespace pass_ext {

template <typename T>
void quantize_on_cpu(const QuantizeRows<T>& problem);

}  // namespace pass_ext
