// Checks the look-ahead ops' arguments, the same on every device, and packs them into the structs of core/lookahead.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "core/lookahead.h"
#include "host/checks.h"
#include "host/dispatch.h"
#include "host/tensor.h"

namespace pass_ext {

inline void check_lookahead_ids(const Tensor& ids, const Tensor& table) {
  constexpr const char* op = "lookahead_embed";
  check_dtype(op, "ids", ids, {ScalarType::Int, ScalarType::Long});
  check_same_device(op, "ids", ids, "table", table);
}

inline void check_lookahead_slots(const Tensor& table, const Tensor& lookahead, int64_t width) {
  constexpr const char* op = "lookahead_embed";
  check_dim(op, "lookahead", lookahead, 2, "[L, d]");
  check_size(op, "lookahead", lookahead, 1, width, "the table's width d");
  check_same_device(op, "lookahead", lookahead, "table", table);
}

inline void check_lookahead_embed(const Tensor& ids, const Tensor& table, const Tensor& lookahead) {
  constexpr const char* op = "lookahead_embed";
  check_dtype(op, "table", table, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float, ScalarType::Double});
  if (table.scalar_type() == ScalarType::Float)
    check_dtype(op, "lookahead", lookahead, {ScalarType::Float});
  else
    check_dtype(op, "lookahead", lookahead, {table.scalar_type(), ScalarType::Float});
  check_dim(op, "table", table, 2, "[V, d]");
  check_contiguous_rows(op, "table", table);
  check_lookahead_ids(ids, table);
  check_lookahead_slots(table, lookahead, table.size(1));
}

// Rows for ids as those of `like`.
inline Tensor empty_lookahead_embed(const Tensor& ids, const Tensor& like) {
  std::vector<int64_t> shape(ids.sizes().begin(), ids.sizes().end());
  shape.push_back(like.size(1));
  return empty_of_shape("lookahead_embed", like, shape);
}

// Calls function(problem) with the LookaheadEmbed for the tensors' types; ids, lookahead and out are contiguous.
template <typename Function>
void with_lookahead_embed(const Tensor& ids, const Tensor& table, const Tensor& lookahead, const Tensor& out,
                          Function&& function) {
  constexpr const char* op = "lookahead_embed";
  dispatch_floating(table.scalar_type(), [&](auto value) {
    dispatch_index(ids.scalar_type(), [&](auto index) {
      using T = type_of<decltype(value)>;
      using Id = type_of<decltype(index)>;
      const auto call = [&](auto slot) {
        using S = type_of<decltype(slot)>;
        function(LookaheadEmbed<T, S, Id>{data_of<Id>(op, "ids", ids), data_of<T>(op, "table", table),
                                          data_of<S>(op, "lookahead", lookahead), output_of<T>(out), ids.numel(),
                                          table.size(1), table.size(0), lookahead.size(0), table.stride(0)});
      };
      if (lookahead.scalar_type() == table.scalar_type())
        call(TypeTag<T>{});
      else
        call(TypeTag<float>{});
    });
  });
}

inline void check_lookahead_embed_backward(const Tensor& grad, const Tensor& ids, int64_t out_rows, ScalarType dtype) {
  constexpr const char* op = "lookahead_embed_backward";
  check_dtype(op, "grad", grad, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float, ScalarType::Double});
  check_dtype(op, "ids", ids, {ScalarType::Int, ScalarType::Long});
  check_dim(op, "grad", grad, ids.dim() + 1, "[*ids.shape, d]");
  for (int64_t i = 0; i < ids.dim(); ++i) check_size(op, "grad", grad, i, ids.size(i), "as ids");
  check_same_device(op, "ids", ids, "grad", grad);
  if (out_rows < 0) refuse(op, "rows must not be negative, got ", out_rows);
  if (dtype != grad.scalar_type() && dtype != ScalarType::Float)
    refuse(op, "dtype must be ", name_of(grad.scalar_type()), " (grad's) or float32, got ", name_of(dtype));
}

// Calls function(problem) with the LookaheadEmbedBackward for the tensors' types; all three are contiguous.
template <typename Function>
void with_lookahead_embed_backward(const Tensor& grad, const Tensor& ids, const Tensor& out, bool slots,
                                   Function&& function) {
  constexpr const char* op = "lookahead_embed_backward";
  dispatch_floating(grad.scalar_type(), [&](auto value) {
    dispatch_index(ids.scalar_type(), [&](auto index) {
      using T = type_of<decltype(value)>;
      using Id = type_of<decltype(index)>;
      const auto call = [&](auto result) {
        using S = type_of<decltype(result)>;
        function(LookaheadEmbedBackward<T, S, Id>{data_of<T>(op, "grad", grad), data_of<Id>(op, "ids", ids),
                                                  output_of<S>(out), ids.numel(), out.size(1), out.size(0), slots});
      };
      if (out.scalar_type() == grad.scalar_type())
        call(TypeTag<T>{});
      else
        call(TypeTag<float>{});
    });
  });
}

}  // namespace pass_ext
