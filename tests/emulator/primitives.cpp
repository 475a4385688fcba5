// Launches of primitive_kernels.cuh by name.
#include <stdexcept>

#include "launches.h"
#include "primitive_kernels.cuh"

namespace emulator {

using namespace pass_ext::gpu;

void run_primitive(const std::string& name, Address in, Address out, Address out2, Address out3, int a, int b, int c) {
  const auto mask = static_cast<unsigned>(b);
  if (name == "indices") {
    launch("indices", indices_kernel, {{2, 3, 2}, {60}}, {}, as<int>(out));
  } else if (name == "shuffle") {
    launch("shuffle", shuffle_kernel, {{1}, {32}}, {}, as<double>(in), as<double>(out), a, mask, c);
  } else if (name == "votes") {
    launch("votes", votes_kernel, {{1}, {unsigned(a)}}, {}, as<int>(in), as<int>(out), mask);
  } else if (name == "reductions") {
    launch("reductions", reductions_kernel, {{1}, {unsigned(a)}}, {}, as<uint32_t>(in), as<uint32_t>(out), mask);
  } else if (name == "reverse") {
    launch("reverse", reverse_kernel, {{unsigned(a)}, {256}, 1024}, {}, as<int>(in), as<int>(out), as<int>(out2));
  } else if (name == "warp_sum") {
    launch("warp_sum", warp_sum_kernel, {{1}, {64}}, {}, as<int>(in), as<int>(out));
  } else if (name == "atomics") {
    launch("atomics", atomics_kernel, {{1}, {96}}, {}, as<int>(in), as<int>(out), as<float>(out2),
           as<unsigned long long>(out3));
  } else if (name == "counter") {
    launch("counter", counter_kernel, {{1}, {unsigned(a)}}, {}, as<int>(out), as<int>(out2), int(b));
  } else if (name == "last_arriver") {
    launch("last_arriver", last_arriver_kernel, {{unsigned(a)}, {64}}, {}, as<float>(in), as<float>(out2),
           as<unsigned>(out3), as<float>(out));
  } else if (name == "arrivals") {
    launch("arrivals", arrivals_kernel, {{unsigned(a)}, {64}}, {}, as<int>(in), as<int>(out2), as<int32_t>(out3),
           as<int>(out));
  } else if (name == "copy16") {
    launch("copy16", copy16_kernel, {{1}, {32}}, {}, as<int>(in), as<int>(out));
  } else if (name == "copy4") {
    launch("copy4", copy4_kernel, {{1}, {32}}, {}, as<int>(in), as<int>(out));
  } else if (name == "pipeline") {
    launch("pipeline", pipeline_kernel, {{1}, {32}, 3 * 512}, {}, as<int>(in), as<int>(out), a);
  } else if (name == "multiply") {
    launch("multiply", a ? multiply_kernel<pass_ext::bfloat16> : multiply_kernel<pass_ext::float16>, {{1}, {32}}, {},
           as<uint32_t>(in), as<uint32_t>(in) + 16 * 8, as<float>(out2), as<float>(out));
  } else if (name == "matrices") {
    auto* const kernel = a == 1   ? (b ? matrices_kernel<1, true> : matrices_kernel<1, false>)
                         : a == 2 ? (b ? matrices_kernel<2, true> : matrices_kernel<2, false>)
                                  : (b ? matrices_kernel<4, true> : matrices_kernel<4, false>);
    launch("matrices", kernel, {{1}, {32}, 512}, {}, as<uint16_t>(in), as<uint32_t>(out));
  } else if (name == "widen") {
    launch("widen", widen_kernel, {{unsigned(a)}, {256}}, {}, as<uint16_t>(in), as<float>(out), as<float>(out2));
  } else if (name == "narrow") {
    launch("narrow", narrow_kernel, {{unsigned(a)}, {256}}, {}, as<float>(in), as<uint16_t>(out), as<uint16_t>(out2),
           as<uint32_t>(out3));
  } else if (name == "exp2") {
    launch("exp2", exp2_kernel, {{int64_t{a} << c}, {32}}, {}, as<float>(in), as<float>(out));
  } else if (name == "larger") {
    launch("larger", larger_kernel, {{1}, {32}}, {}, as<float>(in), as<float>(out));
  } else if (name == "larger_pairs") {
    launch("larger_pairs", larger_pairs_kernel, {{1}, {32}}, {}, as<uint32_t>(in), as<uint32_t>(out));
  } else if (name == "fused_pairs") {
    launch("fused_pairs", fused_pairs_kernel, {{1}, {32}}, {}, as<uint32_t>(in), as<uint32_t>(out), as<uint32_t>(out2));
  } else if (name == "pick_bytes") {
    launch("pick_bytes", pick_bytes_kernel, {{1}, {32}}, {}, as<uint32_t>(in), as<uint32_t>(out));
  } else if (name == "bits") {
    launch("bits", bits_kernel, {{1}, {unsigned(a)}}, {}, as<uint64_t>(in), as<int>(out));
  } else if (name == "philox") {
    launch("philox", philox_kernel, {{unsigned(a)}, {32}}, {}, as<uint32_t>(in), as<uint64_t>(out2), as<uint32_t>(out));
  } else if (name == "path") {
    launch("path", path_kernel, {{1}, {64}}, {}, as<int>(in), as<int>(out), a, b, c);
  } else {
    throw std::invalid_argument("no primitive kernel is called " + name);
  }
}

}  // namespace emulator
