// Chooses the instruction set at run time, see isa.h.
#include "cpu/isa.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace pass_ext {
namespace {

// Of each Limit.
constexpr const char* kNames[] = {"portable", "neon_dot", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated", ""};

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  // No processor has bf16 dot products without those of integers; a virtual machine may show only some of its features.
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) return Isa::avx512_bf16;
  if (avx512) return Isa::avx512;
  if (avx2) return Isa::avx2;
#elif defined(__aarch64__)
  constexpr unsigned long kDotProducts = 1 << 20;  // HWCAP_ASIMDDP
  if (getauxval(AT_HWCAP) & kDotProducts) return Isa::neon_dot;
#endif
  return Isa::portable;
}

// Whether it is no level of another kind of processor.
bool is_here(Limit limit) {
#if defined(__aarch64__)
  return limit <= Limit::neon_dot || limit >= Limit::amx;
#else
  return limit != Limit::neon_dot;
#endif
}

std::atomic<Limit>& chosen_limit() {
  static std::atomic<Limit> limit = Limit::none;
  return limit;
}

std::atomic<Isa>& chosen_isa() {
  static std::atomic<Isa> isa = best_isa();
  return isa;
}

}  // namespace

Isa current_isa() { return chosen_isa().load(std::memory_order_relaxed); }

Limit current_limit() { return chosen_limit().load(std::memory_order_relaxed); }

}  // namespace pass_ext

const char* pass_ext_cpu_isa() { return pass_ext::kNames[static_cast<int>(pass_ext::current_isa())]; }

int pass_ext_limit_cpu_isa(const char* name) {
  using namespace pass_ext;
  const auto* const end = std::end(kNames);
  const auto* const found = std::find_if(kNames, end, [&](const char* known) { return std::strcmp(name, known) == 0; });
  const Limit limit = static_cast<Limit>(found - kNames);
  if (found == end || !is_here(limit)) return 1;
  chosen_limit().store(limit);
  chosen_isa().store(std::min(best_isa(), static_cast<Isa>(found - kNames)));
  return 0;
}
