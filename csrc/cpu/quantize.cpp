// torch.ops.pass_ext.quantize_rows on the CPU: parallel split, registration. The inner loops:
// cpu/quantize_kernels-inl.h.
#include "cpu/quantize.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cpu/workers.h"
#include "host/quantize.h"

#define PASS_EXT_KERNELS "cpu/quantize_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

// Below this many numbers a second thread costs more than it saves.
constexpr int64_t kNumbersPerTask = 32 * 1024;

}  // namespace

template <typename T>
void quantize_on_cpu(const QuantizeRows<T>& problem) {
  for_ranges(problem.rows, std::max<int64_t>(1, kNumbersPerTask / problem.dim),
             [&](int64_t begin, int64_t end) { PASS_EXT_AT_ISA(quantize_rows(problem, begin, end)); });
}

template void quantize_on_cpu(const QuantizeRows<float>&);
template void quantize_on_cpu(const QuantizeRows<float16>&);
template void quantize_on_cpu(const QuantizeRows<bfloat16>&);

namespace {

struct OnCpu {
  template <typename T>
  static void run(const QuantizeRows<T>& problem, const Tensor&) {
    quantize_on_cpu(problem);
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("quantize_rows", TORCH_BOX(&pass_ext::quantize_rows<pass_ext::OnCpu>));
}
