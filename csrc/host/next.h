// Checks the arguments of next_tree_, the same on every device, and packs them into core/next_tree.h's NextTreeProblem.
#pragma once

#include <type_traits>

#include "core/next.h"
#include "core/next_tree.h"
#include "host/distribution.h"
#include "host/packed.h"

namespace pass_ext {

// The address of a contiguous tensor of this dtype and shape on the device of rows.
template <typename T>
T* contiguous_data(const char* op, const char* argument, const Tensor& tensor, ScalarType type,
                   std::initializer_list<int64_t> shape, const char* shape_name, const Tensor& rows) {
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
inline const float* transitions_of(const char* op, const char* argument, const Tensor& table, const Tensor& rows) {
  check_dtype(op, argument, table, {ScalarType::Float});
  check_dim(op, argument, table, 2, "[V, r]");
  check_same_device(op, argument, table, "rows", rows);
  check_contiguous_rows(op, argument, table);
  check_below(op, argument, table, 0, kInt32Limit, "tokens");
  check_below(op, argument, table, 1, kInt32Limit, "numbers");
  return data_of<float>(op, argument, table);
}

inline void pack_transitions(const char* op, const Tensor& left, const Tensor& right, const Tensor& rows,
                             NextProblem& problem) {
  problem.left = transitions_of(op, "left", left, rows);
  problem.right = transitions_of(op, "right", right, rows);
  check_size(op, "right", right, 0, left.size(0), "V, the tokens of left");
  check_size(op, "right", right, 1, left.size(1), "r, the width of left");
  problem.left_stride = left.stride(0);
  problem.right_stride = right.stride(0);
  problem.vocabulary = left.size(0);
  problem.rank = static_cast<int32_t>(left.size(1));
}

// Tokens that look-ahead rows offer, [B, S, K].
inline void pack_tokens(const char* op, const Tensor& offered, const Tensor& rows, NextProblem& problem) {
  check_dim(op, "offered", offered, 3, "[B, S, K]");
  const int64_t slots = offered.size(1), count = offered.size(2);
  if (count > kMostTreeOffers)
    refuse(op, "offered must have at most ", kMostTreeOffers, " tokens in a row, got ", describe(offered));
  check_below(op, "offered", offered, 1, kInt32Limit, "look-ahead rows");
  problem.offered = contiguous_data<const int64_t>(op, "offered", offered, ScalarType::Long,
                                                   {problem.requests, slots, count}, "[B, S, K]", rows);
  problem.slots = static_cast<int32_t>(slots);
  problem.count = static_cast<int32_t>(count);
}

inline void pack_scores(const char* op, const Tensor& scores, const Tensor& rows, NextProblem& problem) {
  problem.scores = contiguous_data<const float>(op, "scores", scores, ScalarType::Float,
                                                {problem.requests, problem.slots, problem.count}, "[B, S, K]", rows);
}

// The texts, [B, T], which grow by what is emitted.
inline void pack_text(const char* op, const OptionalTensor& text, const Tensor& rows, NextProblem& problem) {
  if (!text) return;
  check_dim(op, "text", *text, 2, "[B, T]");
  problem.text_room = text->size(1);
  if (problem.text_room < 1) refuse(op, "text must have a column for every token, got ", describe(*text));
  problem.text = contiguous_data<int64_t>(op, "text", *text, ScalarType::Long, {problem.requests, problem.text_room},
                                          "[B, T]", rows);
}

inline void pack_sampling(const char* op, const SamplingArguments& sampling, const OptionalTensor& seeds,
                          const Tensor& rows, NextProblem& problem) {
  const PerRow per_request{op, rows, "rows", problem.requests, "one for each request"};
  problem.sampling = sampling_parameters_of(per_request, sampling);
  problem.seeds = column_of<int64_t>(per_request, "seeds", seeds, ScalarType::Long);
}

// The rows that become the next ones, and the accept result.
struct StepArguments {
  const Tensor &rows, &lengths, &prefix_lens, &report, &limits, &emitted, &path, &num_accepted, &status;
};

inline NextProblem pack_step(const char* op, const StepArguments& arguments) {
  NextProblem problem{};
  const Tensor &rows = arguments.rows, &path = arguments.path, &report = arguments.report;
  check_dim(op, "rows", rows, 3, "[3, B, R]");
  const int64_t requests = rows.size(1), row_count = rows.size(2);
  check_below(op, "rows", rows, 1, kInt32Limit, "requests");
  if (row_count < 1 || row_count > kMostChosenRows)
    refuse(op, "rows must have 1 to ", kMostChosenRows, " rows of a request, got ", describe(rows));
  problem.requests = requests;
  problem.row_count = static_cast<int32_t>(row_count);
  problem.rows =
      contiguous_data<int64_t>(op, "rows", rows, ScalarType::Long, {3, requests, row_count}, "[3, B, R]", rows);
  problem.lengths =
      contiguous_data<int64_t>(op, "lengths", arguments.lengths, ScalarType::Long, {requests}, "[B]", rows);
  problem.prefix_lens =
      contiguous_data<int32_t>(op, "prefix_lens", arguments.prefix_lens, ScalarType::Int, {requests}, "[B]", rows);
  problem.limits =
      contiguous_data<const int64_t>(op, "limits", arguments.limits, ScalarType::Long, {requests}, "[B]", rows);
  check_dim(op, "path", path, 2, "[B, A]");
  const int64_t width = path.size(1);
  if (width < 1 || width > kMaxTreeNodes)
    refuse(op, "path must have 1 to ", kMaxTreeNodes, " columns, got ", describe(path));
  problem.width = static_cast<int32_t>(width);
  problem.path = contiguous_data<const int32_t>(op, "path", path, ScalarType::Int, {requests, width}, "[B, A]", rows);
  problem.emitted = contiguous_data<const int64_t>(op, "emitted", arguments.emitted, ScalarType::Long,
                                                   {requests, width}, "[B, A]", rows);
  problem.num_accepted = contiguous_data<const int32_t>(op, "num_accepted", arguments.num_accepted, ScalarType::Int,
                                                        {requests}, "[B]", rows);
  problem.status =
      contiguous_data<const int32_t>(op, "status", arguments.status, ScalarType::Int, {requests}, "[B]", rows);
  check_dim(op, "report", report, 2, "[B, numbers + A or more]");
  if (report.size(1) < kReportNumbers + width || report.size(1) > kReportNumbers + kMaxTreeNodes)
    refuse(op, "report must have ", kReportNumbers + width, " to ", kReportNumbers + kMaxTreeNodes,
           " columns (path has ", width, "), got ", describe(report));
  problem.report_width = static_cast<int32_t>(report.size(1) - kReportNumbers);
  problem.report = contiguous_data<int64_t>(op, "report", report, ScalarType::Long, {requests, report.size(1)},
                                            "[B, numbers + A or more]", rows);
  return problem;
}

// The op with its torch signature; `run` computes on the device of rows.

using RunNextTree = void (*)(const NextTreeProblem& problem, const Tensor& rows);

template <RunNextTree run>
void next_tree(const Tensor& rows, const Tensor& parents, const Tensor& lengths, const Tensor& prefix_lens,
               const Tensor& report, const Tensor& limits, const Tensor& emitted, const Tensor& path,
               const Tensor& num_accepted, const Tensor& status, const OptionalTensor& rates,
               const OptionalTensor& costs, const OptionalTensor& offered, const OptionalTensor& scores, int64_t first,
               const OptionalTensor& left, const OptionalTensor& right, const OptionalTensor& text,
               const OptionalTensor& temperature, const OptionalTensor& top_k, const OptionalTensor& top_p,
               const OptionalTensor& min_p, const OptionalTensor& seeds) {
  constexpr const char* op = "next_tree_";
  NextTreeProblem problem{};
  NextProblem& step = problem.step;
  step = pack_step(op, {rows, lengths, prefix_lens, report, limits, emitted, path, num_accepted, status});
  problem.parents = contiguous_data<int32_t>(op, "parents", parents, ScalarType::Int, {step.requests, step.row_count},
                                             "[B, R]", rows);
  problem.slots = kMostChosenRows;  // of rows that are kept
  if (rates) {
    check_dim(op, "rates", *rates, 1, "[L]");
    const int64_t slots = rates->size(0);
    if (slots < 1 || slots > kMostChosenSlots)
      refuse(op, "rates must have 1 to ", kMostChosenSlots, " numbers, one for each slot, got ", describe(*rates));
    problem.slots = static_cast<int32_t>(slots);
    problem.rates = contiguous_data<const float>(op, "rates", *rates, ScalarType::Float, {slots}, "[L]", rows);
  }
  if (costs.has_value() && !rates.has_value()) refuse(op, "costs must come with rates, got costs alone");
  if (costs)
    problem.costs = contiguous_data<const float>(op, "costs", *costs, ScalarType::Float, {step.row_count}, "[R]", rows);
  if (offered.has_value() != scores.has_value())
    refuse(op, "offered and scores must come together, got only ", offered ? "offered" : "scores");
  if (left.has_value() != right.has_value() || (left.has_value() && !offered.has_value()))
    refuse(op, "left and right must come together, with offered");
  step.vocabulary = kInt32Limit;  // without tables every token has a successor
  pack_text(op, text, rows, step);
  if (offered) {
    pack_tokens(op, *offered, rows, step);
    pack_scores(op, *scores, rows, step);
    if (first < 0 || first + step.slots > step.row_count)
      refuse(op, "first must be in [0, ", step.row_count - step.slots, "] (rows has ", step.row_count,
             ", offered has tokens of ", step.slots, "), got ", first);
    problem.first = static_cast<int32_t>(first);
    pack_sampling(op, {temperature, top_k, top_p, min_p}, seeds, rows, step);
  }
  if (left) pack_transitions(op, *left, *right, rows, step);
  if (step.requests > 0) run(problem, rows);
}

}  // namespace pass_ext
