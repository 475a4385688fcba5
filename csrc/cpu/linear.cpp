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

// What is common to products of the same rows: how the outputs are cut, and which rows are arranged.
template <typename T>
struct Job {
  const LinearRows<T>& product;
  int64_t first, rows;  // of x; few enough to stay arranged while all weights are read
  uint64_t number = next_job();
  int64_t group = group_outputs(product.in * int64_t{sizeof(T)});

  static int64_t group_outputs(int64_t output_bytes) {
    const int64_t bytes_of_12 = 12 * std::max<int64_t>(1, output_bytes);
    return std::min(kGroupOutputs, 12 * ((kGroupBytes + bytes_of_12 - 1) / bytes_of_12));
  }
  int64_t groups(int64_t outputs) const { return (outputs + group - 1) / group; }

  // function(arranged rows, scratch) with this thread's memory.
  template <typename Function>
  void with_memory(Function&& function) const {
    ThreadMemory& memory = ThreadMemory::get();
    float* const arranged = memory.rows.at_least(arranged_bytes(rows, product.in) / sizeof(float));
    if (memory.job != number) PASS_EXT_AT_LEVEL(product_isa(), arrange_rows(product, first, rows, arranged));
    memory.job = number;
    function(arranged, LinearScratch(memory.scratch.at_least(LinearScratch::floats(rows)), rows));
  }
};

// function(job) for sets of rows that may stay arranged.
template <typename T, typename Function>
void for_sets_of_rows(const LinearRows<T>& product, Function&& function) {
  const int64_t row_bytes = std::max<int64_t>(1, arranged_bytes(1, product.in));
  const int64_t at_once = std::max(kFewestRows, kArrangedBytes / row_bytes);
  for (int64_t first = 0; first < product.rows; first += at_once)
    function(Job<T>{product, first, std::min(at_once, product.rows - first)});
}

}  // namespace

template <typename T>
void multiply(const LinearRows<T>* products, int count) {
  for_sets_of_rows(products[0], [&](const Job<T>& job) {
    int64_t pieces = 0;
    for (int i = 0; i < count; ++i) pieces += job.groups(products[i].outputs);
    for_each_piece(pieces, [&](int64_t piece) {
      const LinearRows<T>* product = products;
      for (; piece >= job.groups(product->outputs); ++product) piece -= job.groups(product->outputs);
      const int64_t begin = piece * job.group, end = std::min(begin + job.group, product->outputs);
      job.with_memory([&](const float* arranged, const LinearScratch& scratch) {
        PASS_EXT_AT_LEVEL(product_isa(),
                          multiply_group(*product, job.rows, arranged, scratch, scratch.sums, begin, end));
        PASS_EXT_AT_LEVEL(product_isa(), finish_group(*product, job.first, job.rows, scratch.sums, begin, end));
      });
    });
  });
}

template <typename T>
void multiply(const GatedRows<T>& product) {
  for_sets_of_rows(product.gate, [&](const Job<T>& job) {
    for_each_piece(job.groups(product.gate.outputs), [&](int64_t piece) {
      const int64_t begin = piece * job.group, end = std::min(begin + job.group, product.gate.outputs);
      job.with_memory([&](const float* arranged, const LinearScratch& scratch) {
        float* const up_sums = scratch.sums + job.rows * kGroupOutputs;
        PASS_EXT_AT_LEVEL(product_isa(),
                          multiply_group(product.gate, job.rows, arranged, scratch, scratch.sums, begin, end));
        PASS_EXT_AT_LEVEL(product_isa(), multiply_group(product.up, job.rows, arranged, scratch, up_sums, begin, end));
        PASS_EXT_AT_LEVEL(product_isa(), finish_group(product, job.first, job.rows, scratch.sums, up_sums, begin, end));
      });
    });
  });
}

template void multiply(const LinearRows<float>*, int);
template void multiply(const LinearRows<float16>*, int);
template void multiply(const LinearRows<bfloat16>*, int);
template void multiply(const GatedRows<float>&);
template void multiply(const GatedRows<float16>&);
template void multiply(const GatedRows<bfloat16>&);

namespace {

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
    const LinearRows<T> product{data_of<T>(op, "x", x),
                                data_of<T>(op, "weight", weight),
                                bias ? data_of<T>(op, "bias", *bias) : nullptr,
                                output_of<T>(out),
                                rows,
                                in,
                                outputs,
                                distance < 0 ? in : distance,
                                weight.stride(0)};
    multiply(&product, 1);
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
