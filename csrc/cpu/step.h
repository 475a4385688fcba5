// The step ops' problems on the CPU, shared among threads: what csrc/cpu/step.cpp computes.
#pragma once

#include "core/step.h"

namespace pass_ext {

template <typename T>
void norm_on_cpu(const StepNorm<T>& problem);
template <typename T, typename S>
void rotary_on_cpu(const StepRotary<T, S>& problem);
template <typename T>
void gate_on_cpu(const StepGate<T>& problem);  // out may be gate
// sum = a + b, [count]; sum may be a or b.
template <typename T>
void add_on_cpu(T* sum, const T* a, const T* b, int64_t count);

}  // namespace pass_ext
