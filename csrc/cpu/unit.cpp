// Measures which unit multiplies bfloat16 numbers, see unit.h.
#include "cpu/unit.h"

#include <algorithm>
#include <chrono>

#define PASS_EXT_KERNELS "cpu/unit_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

constexpr int64_t kSteps = 512;  // some microseconds: shorter than any thread's turn on a busy machine
constexpr int kRuns = 16;        // of each unit, in turn; of equal work, so that the shortest is what the unit can do

// Pairs are left only for what is clearly faster. Processors lie far from this margin on either side, at 0.5 (Zen 4)
// and at about 2 (Sapphire Rapids), so that neither noise nor the clock changes the answer from process to process.
constexpr bool is_clearly_faster(double seconds, double than) { return seconds * 1.3 < than; }
static_assert(!is_clearly_faster(1.0, 1.0) && !is_clearly_faster(1.0, 0.5) && is_clearly_faster(1.0, 2.0), "");

template <typename Multiply>
double seconds_of(Multiply&& multiply) {
  using Clock = std::chrono::steady_clock;
  alignas(64) float lanes[kMostStep / 2];
  std::fill(std::begin(lanes), std::end(lanes), 1.0f);
  const Clock::time_point begin = Clock::now();
  multiply(kSteps, lanes);
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// For processors that have both.
Unit measured_unit() {
  double fp32 = 1.0, pairs = 1.0;
#if defined(__x86_64__)
  for (int run = 0; run < kRuns; ++run) {
    fp32 = std::min(fp32, seconds_of(avx512::multiply_in_registers));
    pairs = std::min(pairs, seconds_of(avx512_bf16::multiply_in_registers));
  }
#endif
  return is_clearly_faster(fp32, pairs) ? Unit::fp32 : Unit::pairs;
}

}  // namespace

Unit product_unit() {
  if (current_isa() != Isa::avx512_bf16) return Unit::fp32;
  if (current_limit() == Limit::avx512_bf16) return Unit::pairs;
  static const Unit measured = measured_unit();
  return measured;
}

Isa product_isa() {
  return current_isa() == Isa::avx512_bf16 && product_unit() == Unit::fp32 ? Isa::avx512 : current_isa();
}

}  // namespace pass_ext

const char* pass_ext_cpu_products() { return pass_ext::product_unit() == pass_ext::Unit::fp32 ? "fp32" : "pairs"; }
