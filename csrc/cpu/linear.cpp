// torch.ops.pass_ext.linear_rows on the CPU: checks, parallel split, registration. The inner loops:
// cpu/linear_kernels-inl.h.
#include "cpu/linear.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cpu/buffer.h"
#include "host/linear.h"

#define PASS_EXT_KERNELS "cpu/linear_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

constexpr int64_t kRowBytes = 512 * 1024;        // arranged rows at a time: a part of a core's own cache
constexpr int64_t kFewestRows = 24;              // least rows at a time, whatever their bytes
constexpr int64_t kBytesPerThread = 192 * 1024;  // weights; below, a second thread costs more than it saves
constexpr int64_t kRowsPerRead = 8;              // rows multiplied while a weight is read

LinearScratch scratch_for(int64_t rows, int64_t in) {
  thread_local Buffer buffer;
  const int64_t width = (in + kMostStep - 1) / kMostStep * kMostStep;
  const int64_t row_bytes = std::max<int64_t>(1, width * int64_t{sizeof(float)});
  rows = std::min(rows, std::max<int64_t>(kFewestRows, kRowBytes / row_bytes));
  LinearScratch scratch;
  const int64_t sizes[] = {rows * width, kTileOutputs * kPiece, rows * kTileOutputs * kMostStep / 2};
  scratch.x = buffer.at_least(sizes[0] + sizes[1] + sizes[2] + rows * kGroupOutputs);
  scratch.weights = scratch.x + sizes[0];
  scratch.between = scratch.weights + sizes[1];
  scratch.sums = scratch.between + sizes[2];
  scratch.rows = rows;
  return scratch;
}

template <typename T>
void multiply(const LinearRows<T>& problem) {
  const int64_t tiles = (problem.outputs + kTileOutputs - 1) / kTileOutputs;
  const int64_t tile_bytes =
      kTileOutputs * problem.in * int64_t{sizeof(T)} * ((problem.rows + kRowsPerRead - 1) / kRowsPerRead);
  const int64_t tiles_per_thread = std::max<int64_t>(1, kBytesPerThread / std::max<int64_t>(1, tile_bytes));
  const auto run = [&](int64_t begin, int64_t end) {
    const LinearScratch scratch = scratch_for(problem.rows, problem.in);
    PASS_EXT_AT_ISA(
        multiply_rows(problem, scratch, begin * kTileOutputs, std::min(end * kTileOutputs, problem.outputs)));
  };
  if (tiles <= tiles_per_thread)
    run(0, tiles);
  else
    torch::stable::parallel_for(0, tiles, tiles_per_thread, run);
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
