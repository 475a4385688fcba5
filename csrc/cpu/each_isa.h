// Compiles PASS_EXT_KERNELS, a kernels header, once per instruction set, each time with simd-inl.h in a namespace of
// its own:
//   #define PASS_EXT_KERNELS "cpu/lookahead_kernels-inl.h"
//   #include "cpu/each_isa.h"
// gives pass_ext::portable::…, and pass_ext::avx2::…, pass_ext::avx512::… and pass_ext::avx512_bf16::… on x86-64,
// pass_ext::neon_dot::… on ARM.
//
// A kernels header includes nothing but text for the same namespace (-inl.h). It calls no inline function of the
// standard library that it could instantiate: the linker could pick code compiled here for AVX-512 for the whole
// library. Other headers that it needs are included below, before the first level.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/accept.h"
#include "core/adapter.h"
#include "core/attention.h"
#include "core/convolution.h"
#include "core/draft.h"
#include "core/half.h"
#include "core/linear.h"
#include "core/lookahead.h"
#include "core/next.h"
#include "core/recall.h"
#include "core/recurrent.h"
#include "core/scalar.h"
#include "core/shard.h"
#include "core/state.h"
#include "core/step.h"
#include "cpu/attention.h"
#include "cpu/isa.h"
#include "cpu/linear.h"
#include "cpu/recurrent.h"
#include "cpu/rows.h"
#include "cpu/tiles.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define PASS_EXT_LEVEL 0
namespace pass_ext::portable {
#include "core/elementary-inl.h"
#include "core/recurrent-inl.h"
#include "core/step-inl.h"
#include "core/weights-inl.h"
#include "cpu/simd-inl.h"
#include PASS_EXT_KERNELS
}  // namespace pass_ext::portable
#undef PASS_EXT_LEVEL

#if defined(__clang__)
#define PASS_EXT_TARGET_BEGIN(features) \
  _Pragma(PASS_EXT_STRING(clang attribute push(__attribute__((target(features))), apply_to = function)))
#define PASS_EXT_TARGET_END _Pragma("clang attribute pop")
#else
#define PASS_EXT_TARGET_BEGIN(features) _Pragma("GCC push_options") _Pragma(PASS_EXT_STRING(GCC target(features)))
#define PASS_EXT_TARGET_END _Pragma("GCC pop_options")
#endif
#define PASS_EXT_STRING(text) #text

#if defined(__aarch64__)

#define PASS_EXT_LEVEL 1
PASS_EXT_TARGET_BEGIN("arch=armv8.2-a+dotprod")
namespace pass_ext::neon_dot {
#include "core/elementary-inl.h"
#include "core/recurrent-inl.h"
#include "core/step-inl.h"
#include "core/weights-inl.h"
#include "cpu/simd-inl.h"
#include PASS_EXT_KERNELS
}  // namespace pass_ext::neon_dot
PASS_EXT_TARGET_END
#undef PASS_EXT_LEVEL

#elif defined(__x86_64__)

#define PASS_EXT_LEVEL 1
PASS_EXT_TARGET_BEGIN("avx2,fma,f16c")
namespace pass_ext::avx2 {
#include "core/elementary-inl.h"
#include "core/recurrent-inl.h"
#include "core/step-inl.h"
#include "core/weights-inl.h"
#include "cpu/simd-inl.h"
#include PASS_EXT_KERNELS
}  // namespace pass_ext::avx2
PASS_EXT_TARGET_END
#undef PASS_EXT_LEVEL

#define PASS_EXT_LEVEL 2
PASS_EXT_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
namespace pass_ext::avx512 {
#include "core/elementary-inl.h"
#include "core/recurrent-inl.h"
#include "core/step-inl.h"
#include "core/weights-inl.h"
#include "cpu/simd-inl.h"
#include PASS_EXT_KERNELS
}  // namespace pass_ext::avx512
PASS_EXT_TARGET_END
#undef PASS_EXT_LEVEL

#define PASS_EXT_LEVEL 3
PASS_EXT_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")
namespace pass_ext::avx512_bf16 {
#include "core/elementary-inl.h"
#include "core/recurrent-inl.h"
#include "core/step-inl.h"
#include "core/weights-inl.h"
#include "cpu/simd-inl.h"
#include PASS_EXT_KERNELS
}  // namespace pass_ext::avx512_bf16
PASS_EXT_TARGET_END
#undef PASS_EXT_LEVEL

#endif
