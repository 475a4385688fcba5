// torch.ops.pass_ext.linear_rows on the CPU: checks, parallel split, registration. The inner loops:
// cpu/linear_kernels-inl.h.
#include "cpu/linear.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>

#include "cpu/buffer.h"
#include "cpu/workers.h"
#include "host/linear.h"

#define PASS_EXT_KERNELS "cpu/linear_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

constexpr int64_t kArrangedBytes = 512 * 1024;  // of rows at a time: a part of a core's own cache
constexpr int64_t kFewestRows = 24;             // least rows at a time, whatever their bytes
constexpr int64_t kGroupBytes = 16 * 1024;      // least weights for a thread to take at once

// The rows of x in the order of multiplication, and work space. Each thread has its own: rows that another thread has
// just arranged would come from that thread's cache, more slowly than it takes to arrange them again.
struct ThreadMemory {
  Buffer rows, scratch;
  uint64_t job = 0;  // the product whose rows are arranged

  static ThreadMemory& get() {
    thread_local ThreadMemory memory;
    return memory;
  }
};

uint64_t next_job() {
  static std::atomic<uint64_t> jobs{0};
  return jobs.fetch_add(1, std::memory_order_relaxed) + 1;
}

// Rows [first, first + rows) of a product, few enough to stay arranged while all weights are read.
template <typename T>
void multiply_few(const LinearRows<T>& problem, int64_t first, int64_t rows) {
  const uint64_t job = next_job();
  const int64_t bytes_of_12 = 12 * std::max<int64_t>(1, problem.in) * int64_t{sizeof(T)};
  const int64_t group = std::min(kGroupOutputs, 12 * ((kGroupBytes + bytes_of_12 - 1) / bytes_of_12));
  for_each_piece((problem.outputs + group - 1) / group, [&](int64_t piece) {
    ThreadMemory& memory = ThreadMemory::get();
    float* const arranged = memory.rows.at_least(arranged_bytes(rows, problem.in) / sizeof(float));
    if (memory.job != job) PASS_EXT_AT_LEVEL(product_isa(), arrange_rows(problem, first, rows, arranged));
    memory.job = job;
    const LinearScratch scratch(memory.scratch.at_least(LinearScratch::floats(rows)), rows);
    const int64_t begin = piece * group, end = std::min(begin + group, problem.outputs);
    PASS_EXT_AT_LEVEL(product_isa(), multiply_group(problem, rows, arranged, scratch, begin, end));
    PASS_EXT_AT_LEVEL(product_isa(), finish_group(problem, first, rows, scratch.sums, begin, end));
  });
}

template <typename T>
void multiply(const LinearRows<T>& problem) {
  const int64_t row_bytes = std::max<int64_t>(1, arranged_bytes(1, problem.in));
  const int64_t at_once = std::max(kFewestRows, kArrangedBytes / row_bytes);
  for (int64_t first = 0; first < problem.rows; first += at_once)
    multiply_few(problem, first, std::min(at_once, problem.rows - first));
}

Tensor linear_rows(const Tensor& input, const Tensor& weight, const OptionalTensor& input_bias) {
  constexpr const char* op = "linear_rows";
  check_linear_rows(input, weight, input_bias);
  const int64_t distance = distance_of_rows(input);
  const Tensor x = distance < 0 ? contiguous_of(op, "x", input) : input;
  const OptionalTensor bias = input_bias ? OptionalTensor(contiguous_of(op, "bias", *input_bias)) : input_bias;
  const Tensor out = empty_linear_rows(x, weight);
  if (out.numel() == 0) return out;
  const int64_t in = weight.size(1), outputs = weight.size(0), rows = out.numel() / outputs;
  const auto call = [&](auto value) {
    using T = type_of<decltype(value)>;
    multiply(LinearRows<T>{data_of<T>(op, "x", x), data_of<T>(op, "weight", weight),
                           bias ? data_of<T>(op, "bias", *bias) : nullptr, output_of<T>(out), rows, in, outputs,
                           distance < 0 ? in : distance, weight.stride(0)});
  };
  switch (x.scalar_type()) {
    case ScalarType::BFloat16: call(TypeTag<bfloat16>{}); break;
    case ScalarType::Half: call(TypeTag<float16>{}); break;
    default: call(TypeTag<float>{});
  }
  return out;
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CPU, library) { library.impl("linear_rows", TORCH_BOX(&pass_ext::linear_rows)); }
