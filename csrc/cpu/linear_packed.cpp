// Chooses how packed weights are multiplied, see linear_packed.h.
#include "cpu/linear_packed.h"

#include <algorithm>
#include <chrono>
#include <vector>

#define PASS_EXT_KERNELS "cpu/linear_packed-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
#if defined(__x86_64__)
namespace {

// The shortest of several runs of packed blocks that a core's caches hold, in turn: crossed, and not.
bool crossing_is_faster() {
  using Clock = std::chrono::steady_clock;
  constexpr int kRuns = 16, kSteps = 64, kRows = 4;
  const std::vector<PackedFour> blocks(kSteps);
  const std::vector<uint32_t> digits(kSteps * kRows * kPackedInputs);  // at least as much as is read
  const std::vector<float> numbers(kSteps * kRows * kPackedInputs);
  float sums[kRows * kGroupOutputs];
  const auto seconds = [&](auto multiply, double least) {
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < kRuns; ++i) multiply(blocks.data(), kSteps, digits.data(), numbers.data(), sums);
    return std::min(least, std::chrono::duration<double>(Clock::now() - begin).count());
  };
  double crossed = 1.0, plain = 1.0;
  for (int run = 0; run < kRuns; ++run) {
    crossed = seconds(avx512_bf16::multiply_packed_tile<kRows, true, PackedFour>, crossed);
    plain = seconds(avx512_bf16::multiply_packed_tile<kRows, false, PackedFour>, plain);
  }
  return crossed < plain;
}

}  // namespace
#endif

bool crosses_codes() {
  if (current_isa() != Isa::avx512_bf16) return false;
  const Limit limit = current_limit();
  if (limit != Limit::none) return limit == Limit::avx512_bf16;
#if defined(__x86_64__)
  static const bool is_faster = crossing_is_faster();
  return is_faster;
#else
  return false;
#endif
}

template <typename T>
void write_digits(const LinearRows<T>& problem, int64_t first, int64_t rows, bool crosses, void* memory) {
  PASS_EXT_AT_ISA(write_digit_rows(problem, first, rows, crosses, memory));
}

template void write_digits(const LinearRows<float>&, int64_t, int64_t, bool, void*);
template void write_digits(const LinearRows<float16>&, int64_t, int64_t, bool, void*);
template void write_digits(const LinearRows<bfloat16>&, int64_t, int64_t, bool, void*);

void multiply_packed(const void* packed, PackedForm form, int64_t in, int64_t rows, void* digits, bool crosses,
                     float* sums, int64_t begin, int64_t end) {
  PASS_EXT_AT_ISA(multiply_packed_group(packed, form, in, rows, digits, crosses, sums, begin, end));
}

}  // namespace pass_ext
