// The Python module _core: csrc/core and csrc/cpu/simd.h as plain functions on arrays, one per instruction set.
// Called by test_core.py.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

#include "core/half.h"
#include "core/lookahead.h"
#include "core/philox.h"

#define PASS_EXT_KERNELS "core_kernels.h"
#include "cpu/each_isa.h"

namespace {

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style | pybind11::array::forcecast>;

template <typename From, typename To>
void convert_at(const std::string& isa, const From* in, To* out, int64_t n) {
#if defined(__x86_64__)
  if (isa == "avx512_bf16") return pass_ext::avx512_bf16::convert(in, out, n);
  if (isa == "avx512") return pass_ext::avx512::convert(in, out, n);
  if (isa == "avx2") return pass_ext::avx2::convert(in, out, n);
#endif
  pass_ext::portable::convert(in, out, n);
}

template <typename Half>
pybind11::array_t<float> widen(const std::string& isa, const Array<uint16_t>& in) {
  pybind11::array_t<float> out(in.size());
  convert_at(isa, reinterpret_cast<const Half*>(in.data()), out.mutable_data(), in.size());
  return out;
}

template <typename Half>
pybind11::array_t<uint16_t> narrow(const std::string& isa, const Array<float>& in) {
  pybind11::array_t<uint16_t> out(in.size());
  convert_at(isa, in.data(), reinterpret_cast<Half*>(out.mutable_data()), in.size());
  return out;
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.def("philox4x32", [](std::array<uint32_t, 4> counter, uint64_t key) {
    pass_ext::PhiloxBlock block;
    for (int i = 0; i < 4; ++i) block.word[i] = counter[i];
    block = pass_ext::philox4x32(block, key);
    return std::array<uint32_t, 4>{block.word[0], block.word[1], block.word[2], block.word[3]};
  });
  module.def("widen_bfloat16", &widen<pass_ext::bfloat16>);
  module.def("widen_float16", &widen<pass_ext::float16>);
  module.def("narrow_bfloat16", &narrow<pass_ext::bfloat16>);
  module.def("narrow_float16", &narrow<pass_ext::float16>);
}
