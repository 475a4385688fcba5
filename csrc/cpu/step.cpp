// torch.ops.pass_ext.step_rms_norm, step_rotary and step_gate on the CPU: parallel split, registration. The inner
// loops: cpu/step_kernels-inl.h.
#include "cpu/step.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cpu/workers.h"
#include "host/step.h"

#define PASS_EXT_KERNELS "cpu/step_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

// Below this many bytes a second thread costs more than it saves.
constexpr int64_t kBytesPerTask = 128 * 1024;

// function(begin, end) for parts of the rows, each of which reads and writes `row_bytes`.
template <typename Function>
void for_rows(int64_t rows, int64_t row_bytes, Function&& function) {
  const int64_t rows_per_task = std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, row_bytes));
  for_ranges(rows, rows_per_task, function);
}

}  // namespace

template <typename T>
void norm_on_cpu(const StepNorm<T>& problem) {
  for_rows(problem.rows, problem.dim * int64_t{sizeof(T)} * (problem.sum ? 4 : 2),
           [&](int64_t begin, int64_t end) { PASS_EXT_AT_ISA(norm_rows(problem, begin, end)); });
}

template <typename T, typename S>
void rotary_on_cpu(const StepRotary<T, S>& problem) {
  for_rows(problem.rows, (problem.q.heads + problem.k.heads) * problem.dim * int64_t{sizeof(T)} * 2,
           [&](int64_t begin, int64_t end) { PASS_EXT_AT_ISA(rotate_rows(problem, begin, end)); });
}

template <typename T>
void gate_on_cpu(const StepGate<T>& problem) {
  for_rows(problem.rows, problem.dim * int64_t{sizeof(T)} * 3,
           [&](int64_t begin, int64_t end) { PASS_EXT_AT_ISA(gate_rows(problem, begin, end)); });
}

template <typename T>
void add_on_cpu(T* sum, const T* a, const T* b, int64_t count) {
  PASS_EXT_AT_ISA(add_rows(sum, a, b, count));
}

template void norm_on_cpu(const StepNorm<float>&);
template void norm_on_cpu(const StepNorm<float16>&);
template void norm_on_cpu(const StepNorm<bfloat16>&);
template void rotary_on_cpu(const StepRotary<float, float>&);
template void rotary_on_cpu(const StepRotary<float16, float16>&);
template void rotary_on_cpu(const StepRotary<float16, float>&);
template void rotary_on_cpu(const StepRotary<bfloat16, bfloat16>&);
template void rotary_on_cpu(const StepRotary<bfloat16, float>&);
template void gate_on_cpu(const StepGate<float>&);
template void gate_on_cpu(const StepGate<float16>&);
template void gate_on_cpu(const StepGate<bfloat16>&);
template void add_on_cpu(float*, const float*, const float*, int64_t);
template void add_on_cpu(float16*, const float16*, const float16*, int64_t);
template void add_on_cpu(bfloat16*, const bfloat16*, const bfloat16*, int64_t);

namespace {

struct OnCpu {
  template <typename T>
  static void run(const StepNorm<T>& problem, const Tensor&) {
    norm_on_cpu(problem);
  }
  template <typename T, typename S>
  static void run(const StepRotary<T, S>& problem, const Tensor&) {
    rotary_on_cpu(problem);
  }
  template <typename T>
  static void run(const StepGate<T>& problem, const Tensor&) {
    gate_on_cpu(problem);
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("step_rms_norm", TORCH_BOX(&pass_ext::step_rms_norm<pass_ext::OnCpu>));
  library.impl("step_rotary", TORCH_BOX(&pass_ext::step_rotary<pass_ext::OnCpu>));
  library.impl("step_gate", TORCH_BOX(&pass_ext::step_gate<pass_ext::OnCpu>));
}
