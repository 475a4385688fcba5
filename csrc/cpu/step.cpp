// torch.ops.pass_ext.step_rms_norm, step_rotary and step_gate on the CPU: parallel split, registration. The inner
// loops: cpu/step_kernels-inl.h.
#include "host/step.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cpu/workers.h"

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

struct OnCpu {
  template <typename T>
  static void run(const StepNorm<T>& problem, const Tensor&) {
    for_rows(problem.rows, problem.dim * int64_t{sizeof(T)} * (problem.sum ? 4 : 2),
             [&](int64_t begin, int64_t end) { PASS_EXT_AT_ISA(norm_rows(problem, begin, end)); });
  }

  template <typename T, typename S>
  static void run(const StepRotary<T, S>& problem, const Tensor&) {
    for_rows(problem.rows, (problem.q.heads + problem.k.heads) * problem.dim * int64_t{sizeof(T)} * 2,
             [&](int64_t begin, int64_t end) { PASS_EXT_AT_ISA(rotate_rows(problem, begin, end)); });
  }

  template <typename T>
  static void run(const StepGate<T>& problem, const Tensor&) {
    for_rows(problem.rows, problem.dim * int64_t{sizeof(T)} * 3,
             [&](int64_t begin, int64_t end) { PASS_EXT_AT_ISA(gate_rows(problem, begin, end)); });
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CPU, library) {
  library.impl("step_rms_norm", TORCH_BOX(&pass_ext::step_rms_norm<pass_ext::OnCpu>));
  library.impl("step_rotary", TORCH_BOX(&pass_ext::step_rotary<pass_ext::OnCpu>));
  library.impl("step_gate", TORCH_BOX(&pass_ext::step_gate<pass_ext::OnCpu>));
}
