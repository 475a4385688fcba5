// Checks quantize_rows' arguments, the same on every device, packs them into core/quantize.h's QuantizeRows and makes
// the output.
#pragma once

#include "core/quantize.h"
#include "host/step.h"

namespace pass_ext {

// The codes that a dtype is of; none: it is another.
inline CodeType codes_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Char: return CodeType::int8;
    case ScalarType::Float8_e4m3fn: return CodeType::float8_e4m3;
    case ScalarType::Float8_e5m2: return CodeType::float8_e5m2;
    default: return CodeType::none;
  }
}

// The op with its torch signature; `Run` has a static run(problem, like) for rows of each type.
template <typename Run>
Tensor quantize_rows(const Tensor& rows, ScalarType dtype) {
  constexpr const char* op = "quantize_rows";
  check_dtype(op, "rows", rows, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  if (rows.dim() == 0 || rows.size(rows.dim() - 1) == 0)
    refuse(op, "rows must have shape [..., D], D at least 1, got ", describe(rows));
  const CodeType codes = codes_of(dtype);
  if (codes == CodeType::none) refuse(op, "dtype must be int8, float8_e4m3fn or float8_e5m2, got ", name_of(dtype));

  const Tensor numbers = regular_rows_of(op, "rows", rows);
  std::vector<int64_t> shape = shape_of(rows);
  const int64_t dim = shape.back();
  shape.back() += kCodeHeader;
  const Tensor out = empty_of_shape(op, rows, shape, dtype);
  dispatch_up_to_float32(rows.scalar_type(), [&](auto value) {
    using T = type_of<decltype(value)>;
    const QuantizeRows<T> problem{row_groups_of<T>(op, "rows", numbers), output_of<uint8_t>(out),
                                  out.numel() / shape.back(), dim, codes};
    if (problem.rows > 0) Run::run(problem, rows);
  });
  return out;
}

}  // namespace pass_ext
