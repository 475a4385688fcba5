// torch.ops.pass_ext.convolution_tree on the CPU: checks of the values, windows, parallel split by request and channel,
// registration. The inner loops: cpu/convolution_kernels-inl.h.
#include "host/convolution.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cpu/workers.h"

#define PASS_EXT_KERNELS "cpu/convolution_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

// Below this many products a second thread costs more than it saves.
constexpr int64_t kProductsPerTask = 64 * 1024;

struct OnCpu {
  template <typename T>
  static void run(const ConvolutionTree<T>& problem, const Tensor&) {
    constexpr const char* op = "convolution_tree";
    check_forest(op, problem.parents, problem.cu_nodes, problem.requests, problem.rows);
    check_slots(op, problem.cu_nodes, problem.requests, problem.state_index, problem.slots);
    if (problem.channels == 0) return;
    const int64_t begin = problem.requests > 0 ? problem.cu_nodes[0] : problem.rows;
    const int64_t end = problem.requests > 0 ? problem.cu_nodes[problem.requests] : problem.rows;
    std::fill(problem.out, problem.out + begin * problem.channels, T{});  // rows that belong to no request
    std::fill(problem.out + end * problem.channels, problem.out + problem.rows * problem.channels, T{});

    std::vector<int32_t> inputs(problem.rows * problem.taps);
    std::vector<int64_t> requests;  // those with nodes
    for (int64_t b = 0; b < problem.requests; ++b) {
      const int64_t first = problem.cu_nodes[b], nodes = problem.cu_nodes[b + 1] - first;
      if (nodes > 0) requests.push_back(b);
      for (int64_t n = 0; n < nodes; ++n)
        for (int64_t j = 0; j < problem.taps; ++j)
          inputs[(first + n) * problem.taps + j] =
              static_cast<int32_t>(input_of(problem.parents + first, n, problem.taps - 1 - j, problem.taps));
    }
    const int64_t blocks = (problem.channels + kStateColumns - 1) / kStateColumns;
    const int64_t tasks = static_cast<int64_t>(requests.size()) * blocks;
    const int64_t products = problem.taps * kStateColumns * (1 + problem.rows / std::max<int64_t>(1, requests.size()));
    for_ranges(tasks, std::max<int64_t>(1, kProductsPerTask / products), [&](int64_t first_task, int64_t last_task) {
      for (int64_t task = first_task; task < last_task; ++task) {
        const int64_t b = requests[task / blocks], first = problem.cu_nodes[b];
        PASS_EXT_AT_ISA(
            convolve_channels(problem, inputs.data() + first * problem.taps, first, problem.cu_nodes[b + 1] - first,
                              slot_of(problem.state_index, b, problem.slots), task % blocks * kStateColumns));
      }
    });
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("convolution_tree", TORCH_BOX(&pass_ext::convolution_tree<pass_ext::OnCpu>));
}
