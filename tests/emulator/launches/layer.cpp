// The launches of csrc/cuda/layer.cuh, as layer.cu makes them.
#include "cuda/layer.cuh"

#include <stdexcept>

#include "launches.h"

namespace emulator {
namespace {

using pass_ext::LayerLinear;
using pass_ext::LayerNorm;

template <typename T>
struct Tag {
  using type = T;
};

template <typename Function>
void with_type(const Arguments& given, Function&& function) {
  const std::string dtype = given.text("dtype");
  if (dtype == "bfloat16") return function(Tag<pass_ext::bfloat16>{});
  if (dtype == "float16") return function(Tag<pass_ext::float16>{});
  if (dtype == "float32") return function(Tag<float>{});
  throw std::invalid_argument("the emulator has no layer op for dtype " + dtype);
}

template <typename T>
LayerLinear<T> linear(const Arguments& given, const std::string& name) {
  return {given.at<T>(name + "_weight"), given.at<T>(name + "_bias"), given(name + "_outputs"), given(name + "_in"),
          given(name + "_row")};
}

template <typename T>
LayerNorm<T> norm(const Arguments& given, const std::string& name) {
  return {given.at<T>(name), given(name + "_dim")};
}

pass_ext::LayerOptions options(const Arguments& given) {
  return {given("head_dim"), static_cast<float>(given.number("eps")), static_cast<pass_ext::NormForm>(given("form")),
          static_cast<pass_ext::Activation>(given("activation")), static_cast<float>(given.number("scale"))};
}

pass_ext::Rotation rotation(const Arguments& given) {
  return {given.at<void>("cos"), given.at<void>("sin"), given("cos_row"),
          given("sin_row"),      given("cos_dim"),      given("cos_is_float32") != 0};
}

template <typename T>
pass_ext::LayerBefore<T> before(const Arguments& given) {
  return {norm<T>(given, "input_norm"), norm<T>(given, "q_norm"), norm<T>(given, "k_norm"),
          linear<T>(given, "q"),        linear<T>(given, "k"),    linear<T>(given, "v")};
}

template <typename T>
pass_ext::LayerAfter<T> after(const Arguments& given) {
  return {linear<T>(given, "o"),        linear<T>(given, "gate"),         linear<T>(given, "up"),
          linear<T>(given, "down"),     norm<T>(given, "attention_norm"), norm<T>(given, "mlp_norm"),
          norm<T>(given, "output_norm")};
}

pass_ext::AdapterIds ids(const Arguments& given) {
  return {given.at<void>("ids"), given("ids_are_int64") != 0, given("adapters"),
          static_cast<float>(given.number("adapter_scale"))};
}

template <typename T>
pass_ext::AdapterWeights<T> adapter(const Arguments& given, const std::string& name) {
  return {given.at<T>(name + "_adapter_down"), given.at<T>(name + "_adapter_up"), given(name + "_rank")};
}

template <typename T>
pass_ext::BeforeAdapters<T> before_adapters(const Arguments& given) {
  return {ids(given), adapter<T>(given, "q"), adapter<T>(given, "k"), adapter<T>(given, "v")};
}

template <typename T>
pass_ext::AfterAdapters<T> after_adapters(const Arguments& given) {
  return {ids(given), adapter<T>(given, "o"), adapter<T>(given, "gate"), adapter<T>(given, "up"),
          adapter<T>(given, "down")};
}

int64_t before_workspace(const Arguments& given) {
  int64_t size = 0;
  with_type(given, [&](auto value) {
    size =
        pass_ext::gpu::before_workspace(before<typename decltype(value)::type>(given), rotation(given), given("rows"));
  });
  return size;
}

void layer_before_attention(const Arguments& given) {
  with_type(given, [&](auto value) {
    using T = typename decltype(value)::type;
    pass_ext::gpu::launch_before_attention(before<T>(given), before_adapters<T>(given), options(given), rotation(given),
                                           given.at<T>("x"), given("rows"), given.at<T>("q"), given.at<T>("k"),
                                           given.at<T>("v"), given.at<T>("workspace"), {});
  });
}

int64_t after_workspace(const Arguments& given) {
  int64_t size = 0;
  with_type(given, [&](auto value) {
    size = pass_ext::gpu::after_workspace(after<typename decltype(value)::type>(given), given("rows"));
  });
  return size;
}

void layer_after_attention(const Arguments& given) {
  with_type(given, [&](auto value) {
    using T = typename decltype(value)::type;
    pass_ext::gpu::launch_after_attention(after<T>(given), after_adapters<T>(given), options(given),
                                          given.at<T>("attended"), given.at<T>("residual"), given("rows"),
                                          given.at<T>("out"), given.at<T>("workspace"), {});
  });
}

const Registration kLaunches[] = {{"layer_before_attention", layer_before_attention},
                                  {"layer_after_attention", layer_after_attention}};
const Registration kSizes[] = {{"layer_before_workspace", before_workspace},
                               {"layer_after_workspace", after_workspace}};

}  // namespace
}  // namespace emulator
