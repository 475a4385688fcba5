// The kernels of csrc/cuda/step.cuh through their own launch functions, as step.cu calls them.
#include "cuda/step.cuh"

#include <stdexcept>

#include "launches.h"

namespace emulator {
namespace {

template <typename T>
struct Tag {
  using type = T;
};

template <typename Function>
void with_type(const std::string& dtype, Function&& function) {
  if (dtype == "bfloat16") return function(Tag<pass_ext::bfloat16>{});
  if (dtype == "float16") return function(Tag<pass_ext::float16>{});
  if (dtype == "float32") return function(Tag<float>{});
  throw std::invalid_argument("the emulator has no step op for dtype " + dtype);
}

template <typename T>
pass_ext::RowGroups<T> row_groups(const Arguments& given, const std::string& name) {
  return {given.at<T>(name), given(name + "_rows_in_group"), given(name + "_group_distance"),
          given(name + "_row_distance")};
}

void step_rms_norm(const Arguments& given) {
  with_type(given.text("dtype"), [&](auto value) {
    using T = typename decltype(value)::type;
    pass_ext::gpu::launch_step(
        pass_ext::StepNorm<T>{row_groups<T>(given, "x"), row_groups<T>(given, "residual"), given.at<T>("weight"),
                              given.at<T>("out"), given.at<T>("sum"), given("rows"), given("dim"),
                              static_cast<float>(given.number("eps")), static_cast<pass_ext::NormForm>(given("form"))},
        {});
  });
}

void step_rotary(const Arguments& given) {
  with_type(given.text("dtype"), [&](auto value) {
    using T = typename decltype(value)::type;
    const auto heads = [&](const std::string& name) {
      return pass_ext::RotaryHeads<T>{given.at<T>(name), given.at<T>(name + "_out"), given(name + "_heads"),
                                      given(name + "_row_distance"), given(name + "_head_distance")};
    };
    const auto call = [&](auto factor) {
      using S = typename decltype(factor)::type;
      pass_ext::gpu::launch_step(
          pass_ext::StepRotary<T, S>{heads("q"), heads("k"), given.at<S>("cos"), given.at<S>("sin"),
                                     given("cos_distance"), given("sin_distance"), given("rows"), given("dim"),
                                     given("rotated")},
          {});
    };
    if (given.text("factor_dtype") == given.text("dtype"))
      call(value);
    else
      call(Tag<float>{});
  });
}

void step_gate(const Arguments& given) {
  with_type(given.text("dtype"), [&](auto value) {
    using T = typename decltype(value)::type;
    pass_ext::gpu::launch_step(
        pass_ext::StepGate<T>{row_groups<T>(given, "gate"), row_groups<T>(given, "up"), given.at<T>("out"),
                              given("rows"), given("dim"), static_cast<pass_ext::Activation>(given("activation"))},
        {});
  });
}

const Registration kLaunches[] = {
    {"step_rms_norm", step_rms_norm}, {"step_rotary", step_rotary}, {"step_gate", step_gate}};

}  // namespace
}  // namespace emulator
