// quantize_rows' problem on the CPU, shared among threads: what csrc/cpu/quantize.cpp computes.
#pragma once

#include "core/quantize.h"

namespace pass_ext {

template <typename T>
void quantize_on_cpu(const QuantizeRows<T>& problem);

}  // namespace pass_ext
