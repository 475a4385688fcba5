// The Python module _core: csrc/core and csrc/cpu/simd-inl.h as plain functions on arrays, one per instruction set.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

#include "core/half.h"
#include "core/inverse.h"
#include "core/lookahead.h"
#include "core/philox.h"

#define PASS_EXT_KERNELS "core_kernels-inl.h"
#include "cpu/each_isa.h"

namespace {

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style | pybind11::array::forcecast>;

// Calls the function compiled for the instruction set of that name.
#if defined(__x86_64__)
#define AT_ISA(isa, call)                                  \
  do {                                                     \
    if (isa == "avx512_bf16") pass_ext::avx512_bf16::call; \
    if (isa == "avx512") pass_ext::avx512::call;           \
    if (isa == "avx2") pass_ext::avx2::call;               \
    if (isa == "portable") pass_ext::portable::call;       \
  } while (false)
#elif defined(__aarch64__)
#define AT_ISA(isa, call)                            \
  do {                                               \
    if (isa == "neon_dot") pass_ext::neon_dot::call; \
    if (isa == "portable") pass_ext::portable::call; \
  } while (false)
#else
#define AT_ISA(isa, call) pass_ext::portable::call
#endif

template <typename Half>
pybind11::array_t<float> widen(const std::string& isa, const Array<uint16_t>& in) {
  pybind11::array_t<float> out(in.size());
  AT_ISA(isa, convert(reinterpret_cast<const Half*>(in.data()), out.mutable_data(), in.size()));
  return out;
}

template <typename Half>
pybind11::array_t<uint16_t> narrow(const std::string& isa, const Array<float>& in) {
  pybind11::array_t<uint16_t> out(in.size());
  AT_ISA(isa, convert(in.data(), reinterpret_cast<Half*>(out.mutable_data()), in.size()));
  return out;
}

// core/elementary-inl.h at an instruction set, or "scalar" for single floats.

pybind11::array_t<float> exponentials(const std::string& isa, const Array<float>& in) {
  pybind11::array_t<float> out(in.size());
  AT_ISA(isa, exponentials(in.data(), out.mutable_data(), in.size()));
  for (int64_t i = 0; i < in.size() && isa == "scalar"; ++i)
    out.mutable_data()[i] = pass_ext::exponential(in.data()[i]);
  return out;
}

pybind11::array_t<float> logarithms(const std::string& isa, const Array<float>& in) {
  pybind11::array_t<float> out(in.size());
  AT_ISA(isa, logarithms(in.data(), out.mutable_data(), in.size()));
  for (int64_t i = 0; i < in.size() && isa == "scalar"; ++i) out.mutable_data()[i] = pass_ext::logarithm(in.data()[i]);
  return out;
}

pybind11::array_t<float> exponential_variates(const std::string& isa, const Array<uint32_t>& in) {
  pybind11::array_t<float> out(in.size());
  AT_ISA(isa, exponential_variates(in.data(), out.mutable_data(), in.size()));
  for (int64_t i = 0; i < in.size() && isa == "scalar"; ++i)
    out.mutable_data()[i] = pass_ext::exponential_variate(in.data()[i]);
  return out;
}

pybind11::array_t<uint32_t> philox_words(const std::string& isa, const Array<uint32_t>& in, uint64_t key) {
  pybind11::array_t<uint32_t> out(in.size());
  AT_ISA(isa, philox_words(in.data(), out.mutable_data(), key, in.size()));
  for (int64_t i = 0; i < in.size() && isa == "scalar"; ++i)
    out.mutable_data()[i] = pass_ext::philox4x32({{in.data()[i], 1, 2, 3}}, key).word[0];
  return out;
}

pybind11::array_t<float> other_operations(const std::string& isa, const Array<float>& a, const Array<float>& b) {
  pybind11::array_t<float> out(a.size());
  AT_ISA(isa, other_operations(a.data(), b.data(), out.mutable_data(), a.size()));
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
  module.def("exponentials", &exponentials);
  module.def("logarithms", &logarithms);
  module.def("exponential_variates", &exponential_variates);
  module.def("philox_words", &philox_words);
  module.def("high_product", &pass_ext::high_product);
  module.def("other_operations", &other_operations);
}
