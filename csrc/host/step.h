// Checks the step ops' arguments, the same on every device, and packs them into the structs of core/step.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "core/step.h"
#include "host/checks.h"
#include "host/dispatch.h"
#include "host/tensor.h"

namespace pass_ext {

// The distances of a tensor's rows [..., d] in groups, see RowGroups; none if they are less regular.
struct RowDistances {
  int64_t rows_in_group, group_distance, row_distance;
};

inline std::optional<RowDistances> distances_of_rows(const Tensor& x) {
  const int64_t width = x.size(x.dim() - 1);
  if (width > 1 && x.stride(x.dim() - 1) != 1) return std::nullopt;
  int64_t counts[2] = {1, 1}, distances[2] = {width, width};  // in a group, of groups
  int level = -1;
  for (int64_t i = x.dim() - 2; i >= 0; --i) {
    if (x.size(i) == 1) continue;
    if (level < 0 || x.stride(i) != distances[level] * counts[level]) {
      if (++level > 1) return std::nullopt;
      distances[level] = x.stride(i);
      counts[level] = 1;
    }
    counts[level] *= x.size(i);
  }
  return RowDistances{counts[0], distances[1], distances[0]};
}

// The tensor itself, or a contiguous copy if its rows are not regular.
inline Tensor regular_rows_of(const char* op, const char* argument, const Tensor& x) {
  return distances_of_rows(x) ? x : contiguous_of(op, argument, x);
}

template <typename T>
RowGroups<T> row_groups_of(const char* op, const char* argument, const Tensor& x) {
  const RowDistances distances = *distances_of_rows(x);
  return {data_of<T>(op, argument, x), distances.rows_in_group, distances.group_distance, distances.row_distance};
}

inline std::vector<int64_t> shape_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

inline void check_step_input(const char* op, const char* argument, const Tensor& tensor) {
  check_dtype(op, argument, tensor, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
}

// Refuses a tensor that has not the dtype, shape and device of another.
inline void check_like(const char* op, const char* argument, const Tensor& tensor, const char* other_argument,
                       const Tensor& other) {
  check_dtype(op, argument, tensor, {other.scalar_type()});
  bool is_alike = tensor.dim() == other.dim();
  for (int64_t i = 0; is_alike && i < tensor.dim(); ++i) is_alike = tensor.size(i) == other.size(i);
  if (!is_alike)
    refuse(op, argument, " must have the shape of ", other_argument, " (", describe(other), "), got ",
           describe(tensor));
  check_same_device(op, argument, tensor, other_argument, other);
}

// ---- the ops with their torch signatures; `run(problem, like)` computes on the device of the tensor `like` ----

template <typename Run>
std::tuple<Tensor, Tensor> step_rms_norm(const Tensor& x, const Tensor& weight, const OptionalTensor& residual,
                                         double eps, int64_t form) {
  constexpr const char* op = "step_rms_norm";
  check_step_input(op, "x", x);
  if (x.dim() == 0) refuse(op, "x must have shape [..., d], got ", describe(x));
  const int64_t dim = x.size(x.dim() - 1);
  check_dtype(op, "weight", weight, {x.scalar_type()});
  check_dim(op, "weight", weight, 1, "[d]");
  check_size(op, "weight", weight, 0, dim, "d, the width of x");
  check_same_device(op, "weight", weight, "x", x);
  if (residual) check_like(op, "residual", *residual, "x", x);
  if (!(eps >= 0.0)) refuse(op, "eps must be at least 0, got ", eps);
  if (form < 0 || form >= kNormForms) refuse(op, "form must be in [0, ", kNormForms, "), got ", form);

  const Tensor rows = regular_rows_of(op, "x", x), flat_weight = contiguous_of(op, "weight", weight);
  const OptionalTensor other = residual ? OptionalTensor(regular_rows_of(op, "residual", *residual)) : residual;
  const Tensor out = empty_of_shape(op, x, shape_of(x));
  const Tensor sum = empty_of_shape(op, x, residual ? shape_of(x) : std::vector<int64_t>{0});
  dispatch_up_to_float32(x.scalar_type(), [&](auto value) {
    using T = type_of<decltype(value)>;
    StepNorm<T> problem{};
    problem.x = row_groups_of<T>(op, "x", rows);
    problem.weight = data_of<T>(op, "weight", flat_weight);
    problem.out = output_of<T>(out);
    if (other) {
      problem.residual = row_groups_of<T>(op, "residual", *other);
      problem.sum = output_of<T>(sum);
    }
    problem.rows = dim == 0 ? 0 : out.numel() / dim;
    problem.dim = dim;
    problem.eps = static_cast<float>(eps);
    problem.form = static_cast<NormForm>(form);
    if (problem.rows > 0) Run::run(problem, x);
  });
  return {out, sum};
}

template <typename Run>
std::tuple<Tensor, Tensor> step_rotary(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  constexpr const char* op = "step_rotary";
  check_step_input(op, "q", q);
  check_dim(op, "q", q, 3, "[N, Hq, D]");
  check_dtype(op, "k", k, {q.scalar_type()});
  check_dim(op, "k", k, 3, "[N, Hk, D]");
  check_size(op, "k", k, 0, q.size(0), "N, the rows of q");
  check_size(op, "k", k, 2, q.size(2), "D, the width of a head of q");
  check_same_device(op, "k", k, "q", q);
  if (q.scalar_type() == ScalarType::Float)
    check_dtype(op, "cos", cos, {ScalarType::Float});
  else
    check_dtype(op, "cos", cos, {q.scalar_type(), ScalarType::Float});
  check_dim(op, "cos", cos, 2, "[N, D']");
  check_size(op, "cos", cos, 0, q.size(0), "N, the rows of q");
  const int64_t rotated = cos.size(1);
  if (rotated % 2 != 0 || rotated > q.size(2))
    refuse(op, "cos must have an even number of at most ", q.size(2), " (D) in dimension 1, got ", describe(cos));
  check_same_device(op, "cos", cos, "q", q);
  check_like(op, "sin", sin, "cos", cos);

  const auto with_contiguous_rows = [&](const char* argument, const Tensor& tensor) {
    const int64_t last = tensor.dim() - 1;
    return tensor.size(last) > 1 && tensor.stride(last) != 1 ? contiguous_of(op, argument, tensor) : tensor;
  };
  const Tensor queries = with_contiguous_rows("q", q), keys = with_contiguous_rows("k", k);
  const Tensor cosines = with_contiguous_rows("cos", cos), sines = with_contiguous_rows("sin", sin);
  const Tensor q_out = empty_of_shape(op, q, shape_of(q)), k_out = empty_of_shape(op, k, shape_of(k));
  dispatch_up_to_float32(q.scalar_type(), [&](auto value) {
    using T = type_of<decltype(value)>;
    const auto heads_of = [&](const char* argument, const Tensor& heads, const Tensor& out) {
      return RotaryHeads<T>{data_of<T>(op, argument, heads), output_of<T>(out), heads.size(1), heads.stride(0),
                            heads.stride(1)};
    };
    const auto call = [&](auto factor) {
      using S = type_of<decltype(factor)>;
      const StepRotary<T, S> problem{heads_of("q", queries, q_out),
                                     heads_of("k", keys, k_out),
                                     data_of<S>(op, "cos", cosines),
                                     data_of<S>(op, "sin", sines),
                                     cosines.stride(0),
                                     sines.stride(0),
                                     q.size(0),
                                     q.size(2),
                                     rotated};
      if (q_out.numel() + k_out.numel() > 0) Run::run(problem, q);
    };
    if (cos.scalar_type() == q.scalar_type())
      call(TypeTag<T>{});
    else
      call(TypeTag<float>{});
  });
  return {q_out, k_out};
}

template <typename Run>
Tensor step_gate(const Tensor& gate, const OptionalTensor& up, int64_t activation) {
  constexpr const char* op = "step_gate";
  check_step_input(op, "gate", gate);
  if (gate.dim() == 0)
    refuse(op, "gate must have shape [..., I], or [..., 2 I] if there is no up, got ", describe(gate));
  const int64_t last = gate.dim() - 1;
  if (up) check_like(op, "up", *up, "gate", gate);
  if (!up && gate.size(last) % 2 != 0)
    refuse(op, "gate must have an even number (2 I, gate and up) in dimension ", last, ", got ", describe(gate));
  if (activation < 0 || activation >= kActivations)
    refuse(op, "activation must be in [0, ", kActivations, "), got ", activation);

  const int64_t dim = up ? gate.size(last) : gate.size(last) / 2;
  const Tensor rows = regular_rows_of(op, "gate", gate);
  const OptionalTensor other = up ? OptionalTensor(regular_rows_of(op, "up", *up)) : up;
  std::vector<int64_t> shape = shape_of(gate);
  shape.back() = dim;
  const Tensor out = empty_of_shape(op, gate, shape);
  dispatch_up_to_float32(gate.scalar_type(), [&](auto value) {
    using T = type_of<decltype(value)>;
    StepGate<T> problem{};
    problem.gate = problem.up = row_groups_of<T>(op, "gate", rows);
    if (other)
      problem.up = row_groups_of<T>(op, "up", *other);
    else
      problem.up.data += dim;
    problem.out = output_of<T>(out);
    problem.rows = dim == 0 ? 0 : out.numel() / dim;
    problem.dim = dim;
    problem.activation = static_cast<Activation>(activation);
    if (problem.rows > 0) Run::run(problem, gate);
  });
  return out;
}

}  // namespace pass_ext
