// Checks adapter_rows_' arguments, the same on every device, and packs them into the struct of core/adapter.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "core/adapter.h"
#include "host/checks.h"
#include "host/dispatch.h"
#include "host/linear.h"
#include "host/tensor.h"

namespace pass_ext {

inline void check_adapter_rows(const Tensor& out, const Tensor& x, const Tensor& ids, const Tensor& down,
                               const Tensor& up) {
  constexpr const char* op = "adapter_rows_";
  check_dtype(op, "out", out, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  check_dtype(op, "x", x, {out.scalar_type()});
  check_dtype(op, "ids", ids, {ScalarType::Int, ScalarType::Long});
  check_dtype(op, "down", down, {out.scalar_type()});
  check_dtype(op, "up", up, {out.scalar_type()});
  if (x.dim() == 0) refuse(op, "x must have shape [..., in], got ", describe(x));
  check_dim(op, "ids", ids, 1, "[N]");
  check_dim(op, "down", down, 3, "[K, r, in]");
  check_dim(op, "up", up, 3, "[K, r, out]");
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  check_size(op, "ids", ids, 0, rows, "N, the rows of x");
  check_dim(op, "out", out, x.dim(), "[..., out], as many dimensions as x");
  for (int64_t i = 0; i + 1 < x.dim(); ++i) check_size(op, "out", out, i, x.size(i), "as x");
  check_size(op, "x", x, x.dim() - 1, down.size(2), "in, the last size of down");
  check_size(op, "out", out, out.dim() - 1, up.size(2), "out, the last size of up");
  check_size(op, "up", up, 0, down.size(0), "K, the adapters of down");
  check_size(op, "up", up, 1, down.size(1), "r, the rank of down");
  check_below(op, "down", down, 1, kMaxAdapterRank + 1, "ranks");
  for (const auto& [name, tensor] : {std::pair("x", &x), {"ids", &ids}, {"down", &down}, {"up", &up}})
    check_same_device(op, name, *tensor, "out", out);
  if (distance_of_rows(out) < 0)
    refuse(op, "out must have contiguous rows that lie evenly apart, got ", describe(out), " with other strides");
}

// `run(problem, out)` computes on the device of the tensor `out`.
template <typename Run>
void adapter_rows(Tensor out, const Tensor& x, const Tensor& ids, const Tensor& down, const Tensor& up, double scale) {
  constexpr const char* op = "adapter_rows_";
  check_adapter_rows(out, x, ids, down, up);
  if (out.numel() == 0 || down.size(1) == 0 || down.size(0) == 0) return;
  const int64_t x_distance = distance_of_rows(x);
  const Tensor rows = x_distance < 0 ? contiguous_of(op, "x", x) : x, flat_ids = contiguous_of(op, "ids", ids);
  const Tensor flat_down = contiguous_of(op, "down", down), flat_up = contiguous_of(op, "up", up);
  dispatch_up_to_float32(out.scalar_type(), [&](auto value) {
    dispatch_index(ids.scalar_type(), [&](auto index) {
      using T = type_of<decltype(value)>;
      using Id = type_of<decltype(index)>;
      const AdapterRows<T, Id> problem{data_of<Id>(op, "ids", flat_ids),
                                       data_of<T>(op, "x", rows),
                                       data_of<T>(op, "down", flat_down),
                                       data_of<T>(op, "up", flat_up),
                                       address_of<T>(op, "out", out),
                                       ids.numel(),
                                       down.size(2),
                                       up.size(2),
                                       down.size(0),
                                       down.size(1),
                                       x_distance < 0 ? down.size(2) : x_distance,
                                       distance_of_rows(out),
                                       static_cast<float>(scale)};
      if (static_cast<const void*>(problem.out) == problem.x)
        refuse(op, "out must not be x, which the op reads while it writes out, got the same memory for both");
      Run::run(problem, out);
    });
  });
}

}  // namespace pass_ext
