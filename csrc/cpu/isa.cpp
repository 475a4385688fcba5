// Chooses the instruction set at run time, see isa.h.
#include "cpu/isa.h"

#include <atomic>
#include <cstring>

namespace pass_ext {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512", "avx512_bf16"};

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
#endif
  return Isa::portable;
}

// The index of `name` in kNames, the last index for "", or -1.
int level_of(const char* name) {
  if (*name == '\0') return 3;
  for (int level = 0; level < 4; ++level)
    if (std::strcmp(name, kNames[level]) == 0) return level;
  return -1;
}

std::atomic<Isa>& chosen_isa() {
  static std::atomic<Isa> isa = best_isa();
  return isa;
}

std::atomic<bool>& was_named() {
  static std::atomic<bool> named = false;
  return named;
}

bool has_fast_dot_products() {
#if defined(__x86_64__)
  static const bool is_amd = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
  return is_amd;
#else
  return false;
#endif
}

}  // namespace

Isa current_isa() { return chosen_isa().load(std::memory_order_relaxed); }

Isa product_isa() {
  const Isa isa = current_isa();
  return isa == Isa::avx512_bf16 && !was_named().load(std::memory_order_relaxed) && !has_fast_dot_products()
             ? Isa::avx512
             : isa;
}

}  // namespace pass_ext

const char* pass_ext_cpu_isa() { return pass_ext::kNames[static_cast<int>(pass_ext::current_isa())]; }

int pass_ext_limit_cpu_isa(const char* name) {
  const int level = pass_ext::level_of(name);
  if (level < 0) return 1;
  pass_ext::was_named().store(*name != '\0');
  const int best = static_cast<int>(pass_ext::best_isa());
  pass_ext::chosen_isa().store(static_cast<pass_ext::Isa>(level < best ? level : best));
  return 0;
}
