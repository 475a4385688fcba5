// torch.ops.pass_ext.adapter_rows_ on the CPU: parallel split, registration. The inner loops:
// cpu/adapter_kernels-inl.h.
#include "cpu/adapter.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cpu/buffer.h"
#include "cpu/workers.h"
#include "host/adapter.h"

#define PASS_EXT_KERNELS "cpu/adapter_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

// Below this many products a second thread costs more than it saves; fewer pay where threads stand by.
constexpr int64_t kProductsPerTask = 128 * 1024, kProductsPerReadyTask = 32 * 1024;

int64_t least_for(int64_t products_each) {
  const int64_t products = threads_are_ready() ? kProductsPerReadyTask : kProductsPerTask;
  return std::max<int64_t>(1, products / std::max<int64_t>(1, products_each));
}

}  // namespace

template <typename T>
void adapter_rows_on_cpu(const AdapterRows<T, int64_t>& problem, const RowsByAdapter& groups) {
  thread_local Buffer memory;
  float* const hidden = memory.at_least(groups.rows.size() * problem.rank);
  for (int64_t k = 0; k + 1 < static_cast<int64_t>(groups.start.size()); ++k) {
    const int64_t first = groups.start[k], count = groups.start[k + 1] - first;
    if (count == 0) continue;
    const int64_t* rows = groups.rows.data() + first;
    float* const between = hidden + first * problem.rank;
    for_ranges(problem.rank, least_for(count * problem.in), [&](int64_t begin, int64_t end) {
      PASS_EXT_AT_ISA(multiply_down(problem, k, rows, count, between, begin, end));
    });
    for_ranges(problem.outputs, least_for(count * problem.rank), [&](int64_t begin, int64_t end) {
      PASS_EXT_AT_ISA(multiply_up(problem, k, rows, count, between, begin, end));
    });
  }
}

template void adapter_rows_on_cpu(const AdapterRows<float, int64_t>&, const RowsByAdapter&);
template void adapter_rows_on_cpu(const AdapterRows<float16, int64_t>&, const RowsByAdapter&);
template void adapter_rows_on_cpu(const AdapterRows<bfloat16, int64_t>&, const RowsByAdapter&);

template <typename T>
void multiply_down_on_cpu(const SlotAdapter<T>& adapter, const T* x, int64_t in, int64_t row, float* hidden) {
  const RowsByAdapter& slots = *adapter.slots;
  const AdapterRows<T, int64_t> problem{nullptr, x, adapter.down, nullptr, nullptr, 0,   in,
                                        0,       0, adapter.rank, row,     0,       0.0f};
  for (int64_t k = 0; k + 1 < static_cast<int64_t>(slots.start.size()); ++k) {
    const int64_t first = slots.start[k], count = slots.start[k + 1] - first;
    if (count > 0)
      PASS_EXT_AT_ISA(
          multiply_down(problem, k, slots.rows.data() + first, count, hidden + first * adapter.rank, 0, adapter.rank));
  }
}

template void multiply_down_on_cpu(const SlotAdapter<float>&, const float*, int64_t, int64_t, float*);
template void multiply_down_on_cpu(const SlotAdapter<float16>&, const float16*, int64_t, int64_t, float*);
template void multiply_down_on_cpu(const SlotAdapter<bfloat16>&, const bfloat16*, int64_t, int64_t, float*);

namespace {

struct OnCpu {
  template <typename T, typename Id>
  static void run(const AdapterRows<T, Id>& problem, const Tensor&) {
    const RowsByAdapter groups = rows_by_adapter(problem.op, problem.ids, problem.rows, problem.adapters);
    adapter_rows_on_cpu<T>(
        {nullptr, problem.x, problem.down, problem.up, problem.out, problem.rows, problem.in, problem.outputs,
         problem.adapters, problem.rank, problem.x_row, problem.out_row, problem.scale},
        groups);
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("adapter_rows_", TORCH_BOX(&pass_ext::adapter_rows<pass_ext::OnCpu>));
}
