// torch.ops.pass_ext.adapter_rows_ on the CPU: rows grouped by adapter, parallel split, registration. The inner loops:
// cpu/adapter_kernels-inl.h.
#include "host/adapter.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "cpu/workers.h"

#define PASS_EXT_KERNELS "cpu/adapter_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

// Below this many products a second thread costs more than it saves.
constexpr int64_t kProductsPerTask = 128 * 1024;

int64_t least_for(int64_t products_each) {
  return std::max<int64_t>(1, kProductsPerTask / std::max<int64_t>(1, products_each));
}

// The rows of slots, grouped by adapter and in order within a group: those of adapter k are rows[start[k]] …
// rows[start[k + 1] - 1]. Refuses a slot without an adapter, before anything is written.
struct RowsByAdapter {
  std::vector<int64_t> start, rows;

  template <typename T, typename Id>
  explicit RowsByAdapter(const AdapterRows<T, Id>& problem) {
    int64_t count = 0;
    for (int64_t n = 0; n < problem.rows; ++n) {
      if (problem.ids[n] >= 0) continue;
      if (adapter_of_id(problem.ids[n], problem.adapters) < 0)
        refuse(problem.op, "ids must be at least ", -problem.adapters, " (", problem.adapters, " adapters), got ",
               static_cast<int64_t>(problem.ids[n]), " at index ", n);
      ++count;
    }
    if (count == 0) return;
    start.assign(problem.adapters + 1, 0);
    rows.resize(count);
    const auto each = [&](auto&& function) {
      for (int64_t n = 0; n < problem.rows; ++n)
        if (problem.ids[n] < 0) function(adapter_of_id(problem.ids[n], problem.adapters), n);
    };
    each([&](int64_t k, int64_t) { ++start[k + 1]; });
    for (int64_t k = 0; k < problem.adapters; ++k) start[k + 1] += start[k];
    std::vector<int64_t> next(start.begin(), start.end() - 1);
    each([&](int64_t k, int64_t n) { rows[next[k]++] = n; });
  }
};

struct OnCpu {
  template <typename T, typename Id>
  static void run(const AdapterRows<T, Id>& problem, const Tensor&) {
    const RowsByAdapter groups(problem);
    std::vector<float> hidden(groups.rows.size() * problem.rank);
    for (int64_t k = 0; k + 1 < static_cast<int64_t>(groups.start.size()); ++k) {
      const int64_t first = groups.start[k], count = groups.start[k + 1] - first;
      if (count == 0) continue;
      const int64_t* rows = groups.rows.data() + first;
      float* const between = hidden.data() + first * problem.rank;
      for_ranges(problem.rank, least_for(count * problem.in), [&](int64_t begin, int64_t end) {
        PASS_EXT_AT_ISA(multiply_down(problem, k, rows, count, between, begin, end));
      });
      for_ranges(problem.outputs, least_for(count * problem.rank), [&](int64_t begin, int64_t end) {
        PASS_EXT_AT_ISA(multiply_up(problem, k, rows, count, between, begin, end));
      });
    }
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CPU, library) {
  library.impl("adapter_rows_", TORCH_BOX(&pass_ext::adapter_rows<pass_ext::OnCpu>));
}
