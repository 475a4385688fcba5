// The kernel of csrc/cuda/quantize.cuh through its own launch function, as quantize.cu calls it.
#include "cuda/quantize.cuh"

#include <stdexcept>

#include "launches.h"

namespace emulator {
namespace {

template <typename T>
void launch_as(const Arguments& given) {
  const pass_ext::RowGroups<T> rows{given.at<T>("rows"), given("rows_rows_in_group"), given("rows_group_distance"),
                                    given("rows_row_distance")};
  pass_ext::gpu::launch_quantize_rows(
      pass_ext::QuantizeRows<T>{rows, given.at<uint8_t>("out"), given("count"), given("dim"),
                                static_cast<pass_ext::CodeType>(given("codes"))},
      {});
}

void quantize_rows(const Arguments& given) {
  const std::string dtype = given.text("dtype");
  if (dtype == "bfloat16") return launch_as<pass_ext::bfloat16>(given);
  if (dtype == "float16") return launch_as<pass_ext::float16>(given);
  if (dtype == "float32") return launch_as<float>(given);
  throw std::invalid_argument("the emulator has no quantize_rows for dtype " + dtype);
}

const Registration kLaunch{"quantize_rows", quantize_rows};

}  // namespace
}  // namespace emulator
