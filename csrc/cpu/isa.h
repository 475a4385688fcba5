// The instruction set of the CPU kernels, chosen at run time: one binary serves every x86-64 machine, another every ARM
// machine of 64 bits. Kernels are written once (cpu/<family>_kernels-inl.h), compiled once per level (cpu/each_isa.h)
// and called with PASS_EXT_AT_ISA(…).
#pragma once

namespace pass_ext {

enum class Isa { portable, neon_dot, avx2, avx512, avx512_bf16 };  // neon_dot: ARM; behind it: x86-64

// The level in use: the best of this processor, or a lower limit set by pass_ext_limit_cpu_isa.
Isa current_isa();

// The limit as pass_ext_limit_cpu_isa was given it.
enum class Limit { portable, neon_dot, avx2, avx512, avx512_bf16, amx, amx_emulated, none };
Limit current_limit();

}  // namespace pass_ext

// Diagnostics with C names, for ctypes (pass_ext/_library). Levels have the names that Isa has; the limits "amx" and
// "amx_emulated" allow all of them and name a unit (cpu/unit.h).
extern "C" {
__attribute__((visibility("default"))) const char* pass_ext_cpu_isa();
// Use at most this level from now on; an empty name means no limit. Returns 0, or 1 for an unknown
// name, or the level of another kind of processor.
__attribute__((visibility("default"))) int pass_ext_limit_cpu_isa(const char* name);
}

// Calls function(arguments…) as compiled for the level in use: PASS_EXT_AT_ISA(embed(problem)).
#define PASS_EXT_AT_ISA(call) PASS_EXT_AT_LEVEL(::pass_ext::current_isa(), call)
#if defined(__x86_64__)
#define PASS_EXT_AT_LEVEL(isa, call)                               \
  do switch (isa) {                                                \
      case ::pass_ext::Isa::avx512_bf16: avx512_bf16::call; break; \
      case ::pass_ext::Isa::avx512: avx512::call; break;           \
      case ::pass_ext::Isa::avx2: avx2::call; break;               \
      default: portable::call;                                     \
    }                                                              \
  while (false)
#elif defined(__aarch64__)
#define PASS_EXT_AT_LEVEL(isa, call)                         \
  do switch (isa) {                                          \
      case ::pass_ext::Isa::neon_dot: neon_dot::call; break; \
      default: portable::call;                               \
    }                                                        \
  while (false)
#else
#define PASS_EXT_AT_LEVEL(isa, call) portable::call
#endif
