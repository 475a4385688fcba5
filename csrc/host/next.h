// Checks next_rows_'s arguments, the same on every device, and packs them into core/next.h's NextProblem.
#pragma once

#include <type_traits>

#include "core/next.h"
#include "host/distribution.h"
#include "host/packed.h"

namespace pass_ext {

// The address of a contiguous tensor of this dtype and shape on the device of rows.
template <typename T>
T* contiguous_data(const char* argument, const Tensor& tensor, ScalarType type, std::initializer_list<int64_t> shape,
                   const char* shape_name, const Tensor& rows) {
  constexpr const char* op = "next_rows_";
  check_dtype(op, argument, tensor, {type});
  check_dim(op, argument, tensor, static_cast<int64_t>(shape.size()), shape_name);
  int64_t dim = 0;
  for (int64_t size : shape) {
    if (tensor.size(dim) != size)
      refuse(op, argument, " must have shape ", shape_name, " with ", size, " in dimension ", dim, ", got ",
             describe(tensor));
    ++dim;
  }
  check_same_device(op, argument, tensor, "rows", rows);
  if (!tensor.is_contiguous()) refuse(op, argument, " must be contiguous, got ", describe(tensor));
  if constexpr (std::is_const_v<T>)
    return data_of<std::remove_const_t<T>>(op, argument, tensor);
  else
    return address_of<T>(op, argument, tensor);
}

// Rows of transition scores, fp32 [V, r].
inline const float* transitions_of(const char* argument, const Tensor& table, const Tensor& rows) {
  constexpr const char* op = "next_rows_";
  check_dtype(op, argument, table, {ScalarType::Float});
  check_dim(op, argument, table, 2, "[V, r]");
  check_same_device(op, argument, table, "rows", rows);
  check_contiguous_rows(op, argument, table);
  check_below(op, argument, table, 0, kInt32Limit, "tokens");
  check_below(op, argument, table, 1, kInt32Limit, "numbers");
  return data_of<float>(op, argument, table);
}

struct OfferedArguments {
  const OptionalTensor &groups, &offered, &scores, &left, &right, &seeds;
  SamplingArguments sampling;
};

inline void pack_offered(const OfferedArguments& arguments, const Tensor& rows, NextProblem& problem) {
  constexpr const char* op = "next_rows_";
  if (arguments.offered.has_value() != arguments.groups.has_value())
    refuse(op, "offered and groups must come together, got only ", arguments.offered ? "offered" : "groups");
  if (arguments.left.has_value() != arguments.right.has_value() ||
      arguments.left.has_value() != arguments.scores.has_value() ||
      (arguments.left.has_value() && !arguments.offered.has_value()))
    refuse(op, "scores, left and right must come together, with offered");
  if (!arguments.offered) return;
  const Tensor &offered = *arguments.offered, &groups = *arguments.groups;
  check_dim(op, "offered", offered, 3, "[B, S, K]");
  const int64_t slots = offered.size(1), count = offered.size(2);
  if (count > kMaxTreeNodes)
    refuse(op, "offered must have at most ", kMaxTreeNodes, " tokens in a row, got ", describe(offered));
  check_below(op, "offered", offered, 1, kInt32Limit, "look-ahead rows");
  problem.offered = contiguous_data<const int64_t>("offered", offered, ScalarType::Long,
                                                   {problem.requests, slots, count}, "[B, S, K]", rows);
  problem.slots = static_cast<int32_t>(slots);
  problem.count = static_cast<int32_t>(count);
  problem.groups = check_integers(op, "groups", groups, "rows", rows);
  check_below(op, "groups", groups, 0, kInt32Limit, "nodes");
  problem.judged_nodes = static_cast<int32_t>(groups.size(0));
  const PerRow per_request{op, rows, "rows", problem.requests, "one for each request"};
  problem.sampling = sampling_parameters_of(per_request, arguments.sampling);
  problem.seeds = column_of<int64_t>(per_request, "seeds", arguments.seeds, ScalarType::Long);
  if (!arguments.left) return;
  const Tensor &left = *arguments.left, &right = *arguments.right;
  problem.scores = contiguous_data<const float>("scores", *arguments.scores, ScalarType::Float,
                                                {problem.requests, slots, count}, "[B, S, K]", rows);
  problem.left = transitions_of("left", left, rows);
  problem.right = transitions_of("right", right, rows);
  check_size(op, "right", right, 0, left.size(0), "V, the tokens of left");
  check_size(op, "right", right, 1, left.size(1), "r, the width of left");
  problem.left_stride = left.stride(0);
  problem.right_stride = right.stride(0);
  problem.vocabulary = left.size(0);
  problem.rank = static_cast<int32_t>(left.size(1));
}

// The op with its torch signature; `run` computes on the device of rows.

using RunNext = void (*)(const NextProblem& problem, const Tensor& rows);

template <RunNext run>
void next_rows(const Tensor& rows, const Tensor& lengths, const Tensor& prefix_lens, const Tensor& report,
               const Tensor& limits, const Tensor& parents, int64_t nodes, const Tensor& emitted, const Tensor& path,
               const Tensor& num_accepted, const Tensor& status, const OptionalTensor& groups,
               const OptionalTensor& offered, const OptionalTensor& scores, const OptionalTensor& left,
               const OptionalTensor& right, const OptionalTensor& temperature, const OptionalTensor& top_k,
               const OptionalTensor& top_p, const OptionalTensor& min_p, const OptionalTensor& seeds) {
  constexpr const char* op = "next_rows_";
  NextProblem problem{};
  check_dim(op, "rows", rows, 3, "[3, B, R]");
  const int64_t requests = rows.size(1), row_count = rows.size(2);
  check_below(op, "rows", rows, 1, kInt32Limit, "requests");
  if (row_count < 1 || row_count > kMaxTreeNodes)
    refuse(op, "rows must have 1 to ", kMaxTreeNodes, " rows of a request, got ", describe(rows));
  if (nodes < 1 || nodes > row_count) refuse(op, "nodes must be in [1, ", row_count, "], got ", nodes);
  problem.requests = requests;
  problem.row_count = static_cast<int32_t>(row_count);
  problem.nodes = static_cast<int32_t>(nodes);
  problem.rows = contiguous_data<int64_t>("rows", rows, ScalarType::Long, {3, requests, row_count}, "[3, B, R]", rows);
  problem.lengths = contiguous_data<int64_t>("lengths", lengths, ScalarType::Long, {requests}, "[B]", rows);
  problem.prefix_lens = contiguous_data<int32_t>("prefix_lens", prefix_lens, ScalarType::Int, {requests}, "[B]", rows);
  problem.limits = contiguous_data<const int64_t>("limits", limits, ScalarType::Long, {requests}, "[B]", rows);
  problem.parents = contiguous_data<const int32_t>("parents", parents, ScalarType::Int, {row_count}, "[R]", rows);
  check_dim(op, "path", path, 2, "[B, A]");
  const int64_t width = path.size(1);
  if (width < 1 || width > kMaxTreeNodes)
    refuse(op, "path must have 1 to ", kMaxTreeNodes, " columns, got ", describe(path));
  problem.width = static_cast<int32_t>(width);
  problem.path = contiguous_data<const int32_t>("path", path, ScalarType::Int, {requests, width}, "[B, A]", rows);
  problem.emitted =
      contiguous_data<const int64_t>("emitted", emitted, ScalarType::Long, {requests, width}, "[B, A]", rows);
  problem.num_accepted =
      contiguous_data<const int32_t>("num_accepted", num_accepted, ScalarType::Int, {requests}, "[B]", rows);
  problem.status = contiguous_data<const int32_t>("status", status, ScalarType::Int, {requests}, "[B]", rows);
  check_dim(op, "report", report, 2, "[B, 3 + A or more]");
  if (report.size(1) < kReportNumbers + width || report.size(1) > kReportNumbers + kMaxTreeNodes)
    refuse(op, "report must have ", kReportNumbers + width, " to ", kReportNumbers + kMaxTreeNodes,
           " columns (path has ", width, "), got ", describe(report));
  problem.report_width = static_cast<int32_t>(report.size(1) - kReportNumbers);
  problem.report = contiguous_data<int64_t>("report", report, ScalarType::Long, {requests, report.size(1)},
                                            "[B, 3 + A or more]", rows);
  pack_offered({groups, offered, scores, left, right, seeds, {temperature, top_k, top_p, min_p}}, rows, problem);
  if (requests > 0) run(problem, rows);
}

}  // namespace pass_ext
