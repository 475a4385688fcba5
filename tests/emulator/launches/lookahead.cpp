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
  throw std::invalid_argument("the emulator knows no dtype " + dtype);
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

}  // namespace

void lookahead_embed(const std::string& dtype, const std::string& slot_dtype, bool wide_ids, Address ids, Address table,
                     Address lookahead, Address out, int64_t rows, int64_t dim, int64_t vocabulary, int64_t slots,
                     int64_t table_stride) {
  with_types(dtype, slot_dtype, wide_ids, [&](auto value, auto slot, auto id) {
    using T = typename decltype(value)::type;
    using S = typename decltype(slot)::type;
    using Id = typename decltype(id)::type;
    pass_ext::gpu::launch_lookahead_embed(
        pass_ext::LookaheadEmbed<T, S, Id>{as<Id>(ids), as<T>(table), as<S>(lookahead), as<T>(out), rows, dim,
                                           vocabulary, slots, table_stride},
        {});
  });
}

void lookahead_embed_backward(const std::string& dtype, const std::string& out_dtype, bool wide_ids, Address grad,
                              Address ids, Address out, Address partial, int64_t rows, int64_t dim, int64_t out_rows,
                              bool slots) {
  with_types(dtype, out_dtype, wide_ids, [&](auto value, auto result, auto id) {
    using T = typename decltype(value)::type;
    using S = typename decltype(result)::type;
    using Id = typename decltype(id)::type;
    pass_ext::gpu::launch_lookahead_embed_backward(
        pass_ext::LookaheadEmbedBackward<T, S, Id>{as<T>(grad), as<Id>(ids), as<S>(out), rows, dim, out_rows, slots},
        as<pass_ext::sum_t<T>>(partial), {});
  });
}

int64_t lookahead_embed_backward_splits(int64_t rows) { return pass_ext::gpu::count_splits(rows); }

}  // namespace emulator
