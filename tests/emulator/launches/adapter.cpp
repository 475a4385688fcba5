// The kernel of csrc/cuda/adapter.cuh through its own launch function, as adapter.cu calls it.
#include "cuda/adapter.cuh"

#include <stdexcept>

#include "launches.h"

namespace emulator {
namespace {

template <typename T, typename Id>
void launch_with(const Arguments& given) {
  pass_ext::gpu::launch_adapter_rows(
      pass_ext::AdapterRows<T, Id>{given.at<Id>("ids"), given.at<T>("x"), given.at<T>("down"), given.at<T>("up"),
                                   given.at<T>("out"), given("rows"), given("in"), given("outputs"), given("adapters"),
                                   given("rank"), given("x_row"), given("out_row"),
                                   static_cast<float>(given.number("scale"))},
      {});
}

template <typename T>
void launch_of(const Arguments& given) {
  given.text("id_dtype") == "int32" ? launch_with<T, int32_t>(given) : launch_with<T, int64_t>(given);
}

void adapter_rows(const Arguments& given) {
  const std::string dtype = given.text("dtype");
  if (dtype == "bfloat16") return launch_of<pass_ext::bfloat16>(given);
  if (dtype == "float16") return launch_of<pass_ext::float16>(given);
  if (dtype == "float32") return launch_of<float>(given);
  throw std::invalid_argument("the emulator has no adapter_rows_ for dtype " + dtype);
}

const Registration kLaunches[] = {{"adapter_rows", adapter_rows}};

}  // namespace
}  // namespace emulator
