// The kernel of csrc/cuda/linear.cuh through its own launch function, as linear.cu calls it.
#include "cuda/linear.cuh"

#include <stdexcept>

#include "launches.h"

namespace emulator {
namespace {

template <typename T>
void launch_of(const Arguments& given) {
  const pass_ext::LinearRows<T> problem{given.at<T>("x"),   given.at<T>("weight"), given.at<T>("bias"),
                                        given.at<T>("out"), given("rows"),         given("in"),
                                        given("outputs"),   given("x_row"),        given("weight_row")};
  pass_ext::gpu::launch_products<T>("linear_rows", &problem, 1, {}, {}, {}, false, {});
}

void linear_rows(const Arguments& given) {
  const std::string dtype = given.text("dtype");
  if (dtype == "bfloat16") return launch_of<pass_ext::bfloat16>(given);
  if (dtype == "float16") return launch_of<pass_ext::float16>(given);
  if (dtype == "float32") return launch_of<float>(given);
  throw std::invalid_argument("the emulator has no linear_rows for dtype " + dtype);
}

const Registration kLaunches[] = {{"linear_rows", linear_rows}};

}  // namespace
}  // namespace emulator
