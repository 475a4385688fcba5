// Measures which unit multiplies bfloat16 numbers, see unit.h.
#include "cpu/unit.h"

#include <algorithm>
#include <chrono>

#include "cpu/linear_tiles.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define PASS_EXT_KERNELS "cpu/unit_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

struct Units {
  bool has_pairs, has_tiles;  // fp32 is not clearly faster; usable
  ProductUnit fastest;
};

#if defined(__x86_64__)
// Tens of microseconds by vectors: shorter than any thread's turn on a busy machine, and long beside the 1 to 2 that
// tiles take to wake after work by vectors.
constexpr int64_t kSteps = 4096;
constexpr int kRuns = 16;  // of each unit, in turn; of equal work, so that the shortest is what the unit can do

// Pairs are left only for what is clearly faster. Processors lie far from this margin on either side, at 0.5 (Zen 4),
// 2.0 (Emerald Rapids) and, with tiles, 8.8 there, so that neither noise nor the clock changes the answer from process
// to process.
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

// Whether the processor has tiles for bfloat16, and Linux lets this process use them (since 5.16, once asked).
bool may_use_tiles() {
  constexpr unsigned kTiles = 1u << 24, kBfloat16 = 1u << 22;  // of leaf 7
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, features = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &features)) return false;
  return (features & kTiles) && (features & kBfloat16) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// For processors that have both kinds of vectors.
Units measured_units() {
  const bool has_tiles = may_use_tiles() && tiles_are_right();
  double fp32 = 1.0, pairs = 1.0, tiles = 1.0;
  for (int run = 0; run < kRuns; ++run) {
    fp32 = std::min(fp32, seconds_of(avx512::multiply_in_registers));
    pairs = std::min(pairs, seconds_of(avx512_bf16::multiply_in_registers));
    if (has_tiles) tiles = std::min(tiles, seconds_of(multiply_in_tiles));
  }
  const bool has_pairs = !is_clearly_faster(fp32, pairs);
  const bool tiles_are_faster = has_tiles && is_clearly_faster(tiles, std::min(fp32, pairs));
  return {has_pairs, has_tiles,
          tiles_are_faster ? ProductUnit::amx
          : has_pairs      ? ProductUnit::pairs
                           : ProductUnit::fp32};
}
#else
Units measured_units() { return {false, false, ProductUnit::fp32}; }
#endif

const Units& units() {
  static const Units measured = measured_units();
  return measured;
}

}  // namespace

ProductUnit product_unit() {
  const Limit limit = current_limit();
  if (limit == Limit::amx_emulated) return ProductUnit::amx_emulated;
  if (current_isa() != Isa::avx512_bf16) return ProductUnit::fp32;
  if (limit == Limit::avx512_bf16) return ProductUnit::pairs;
  return limit == Limit::amx && units().has_tiles ? ProductUnit::amx : units().fastest;
}

Isa product_isa() {
  const Isa isa = current_isa();
  return isa != Isa::avx512_bf16 || current_limit() == Limit::avx512_bf16 || units().has_pairs ? isa : Isa::avx512;
}

}  // namespace pass_ext

const char* pass_ext_cpu_products() {
  constexpr const char* kNames[] = {"fp32", "pairs", "amx", "amx_emulated"};
  return kNames[static_cast<int>(pass_ext::product_unit())];
}
