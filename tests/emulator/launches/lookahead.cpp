// The kernels of csrc/cuda/lookahead.cuh through their own launch functions, as lookahead.cu calls them.
#include "cuda/lookahead.cuh"

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
  if (dtype == "float64") return function(Tag<double>{});
  throw std::invalid_argument("the emulator has no lookahead_embed for dtype " + dtype);
}

// function(T, S, Id): `other` is the dtype itself or float32.
template <typename Function>
void with_types(const std::string& dtype, const std::string& other, bool wide_ids, Function&& function) {
  with_type(dtype, [&](auto value) {
    const auto with_second = [&](auto second) {
      if (wide_ids)
        function(value, second, Tag<int64_t>{});
      else
        function(value, second, Tag<int32_t>{});
    };
    if (other == dtype)
      with_second(value);
    else
      with_second(Tag<float>{});
  });
}

void lookahead_embed(const Arguments& given) {
  with_types(given.text("dtype"), given.text("slot_dtype"), given("wide_ids"), [&](auto value, auto slot, auto id) {
    using T = typename decltype(value)::type;
    using S = typename decltype(slot)::type;
    using Id = typename decltype(id)::type;
    pass_ext::gpu::launch_lookahead_embed(
        pass_ext::LookaheadEmbed<T, S, Id>{given.at<Id>("ids"), given.at<T>("table"), given.at<S>("lookahead"),
                                           given.at<T>("out"), given("rows"), given("dim"), given("vocabulary"),
                                           given("slots"), given("table_stride")},
        {});
  });
}

void lookahead_embed_backward(const Arguments& given) {
  with_types(given.text("dtype"), given.text("out_dtype"), given("wide_ids"), [&](auto value, auto result, auto id) {
    using T = typename decltype(value)::type;
    using S = typename decltype(result)::type;
    using Id = typename decltype(id)::type;
    pass_ext::gpu::launch_lookahead_embed_backward(
        pass_ext::LookaheadEmbedBackward<T, S, Id>{given.at<T>("grad"), given.at<Id>("ids"), given.at<S>("out"),
                                                   given("rows"), given("dim"), given("out_rows"), given("slots") != 0},
        given.at<pass_ext::sum_t<T>>("partial"), {});
  });
}

int64_t lookahead_embed_backward_splits(const Arguments& given) { return pass_ext::gpu::count_splits(given("rows")); }

const Registration kLaunches[] = {{"lookahead_embed", lookahead_embed},
                                  {"lookahead_embed_backward", lookahead_embed_backward},
                                  {"lookahead_embed_backward_splits", lookahead_embed_backward_splits}};

}  // namespace
}  // namespace emulator
