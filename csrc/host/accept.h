// Checks accept_tree's and accept_chain's arguments, the same on every device, packs them into core/accept.h's
// AcceptProblem and makes the outputs, log probabilities and supports among them. Each op is a template over the
// function that fills them.
#pragma once

#include <tuple>
#include <vector>

#include "core/accept.h"
#include "core/logprobs.h"
#include "core/tree.h"
#include "host/distribution.h"

namespace pass_ext {

inline const char* name_of(Rule rule) {
  switch (rule) {
    case Rule::coupled: return "coupled";
    case Rule::rejection: return "rejection";
    case Rule::rejection_with_replacement: return "rejection_with_replacement";
    case Rule::block: return "block";
    case Rule::traversal: return "traversal";
    case Rule::kseq: return "kseq";
    case Rule::typical: return "typical";
    case Rule::coupled_inverse: return "coupled_inverse";
    case Rule::adaptive_rejection: return "adaptive_rejection";
    case Rule::joint: return "joint";
  }
  return "another rule";
}

// The arguments that both ops share.
struct AcceptArguments {
  const char* op;
  const Tensor& target_logits;
  int64_t rule;
  const OptionalTensor& draft_logits;
  SamplingArguments target_sampling, draft_sampling;
  const OptionalTensor &allowed, &draft_allowed, &seeds, &positions;
  double threshold, alpha;
};

using AcceptResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // emitted, path, num_accepted, status

inline void check_rule(const AcceptArguments& arguments) {
  if (arguments.rule < 0 || arguments.rule >= kRules)
    refuse(arguments.op, "rule must be the index of a rule, 0 to ", kRules - 1, ", got ", arguments.rule);
  const Rule rule = static_cast<Rule>(arguments.rule);
  if ((rule == Rule::kseq || rule == Rule::rejection_with_replacement) && !arguments.draft_logits.has_value())
    refuse(arguments.op, "draft_logits must be given for rule '", name_of(rule),
           "' (the distribution that the children were drawn from; coupled and rejection do without), got None");
  if (!arguments.draft_logits.has_value() && arguments.draft_allowed.has_value())
    refuse(arguments.op, "draft_logits must be given with draft_allowed, which is their mask, got None");
  if (!(arguments.threshold >= 0.0) || !(arguments.alpha >= 0.0))
    refuse(arguments.op, "threshold and alpha must not be negative, got ", arguments.threshold, " and ",
           arguments.alpha);
}

// Packs everything except the tree and its rows, and makes the outputs.
inline AcceptResult prepare_accept(const AcceptArguments& arguments, int64_t requests, int64_t max_depth,
                                   AcceptProblem& problem) {
  const char* op = arguments.op;
  const PerRow rows{op, arguments.target_logits, "target_logits", requests, "one for each request"};
  problem.target_sampling = sampling_parameters_of(rows, arguments.target_sampling);
  problem.draft_sampling = sampling_parameters_of(rows, arguments.draft_sampling, true);
  problem.seeds = column_of<int64_t>(rows, "seeds", arguments.seeds, ScalarType::Long);
  problem.positions = column_of<int64_t>(rows, "positions", arguments.positions, ScalarType::Long);
  problem.requests = requests;
  problem.max_depth = static_cast<int32_t>(max_depth);
  problem.rule = static_cast<Rule>(arguments.rule);
  problem.threshold = static_cast<float>(arguments.threshold);
  problem.alpha = static_cast<float>(arguments.alpha);
  const Tensor& like = arguments.target_logits;
  const Tensor emitted = empty_of_shape(op, like, {requests, max_depth + 1}, ScalarType::Long);
  const Tensor path = empty_of_shape(op, like, {requests, max_depth + 1}, ScalarType::Int);
  const Tensor num_accepted = empty_of_shape(op, like, {requests}, ScalarType::Int);
  const Tensor status = empty_of_shape(op, like, {requests}, ScalarType::Int);
  problem.emitted = output_of<int64_t>(emitted);
  problem.path = output_of<int32_t>(path);
  problem.num_accepted = output_of<int32_t>(num_accepted);
  problem.status = output_of<int32_t>(status);
  return {emitted, path, num_accepted, status};
}

inline void check_draft_logits(const AcceptArguments& arguments, int64_t dim, const char* shape) {
  const Tensor& target = arguments.target_logits;
  const Tensor& draft = *arguments.draft_logits;
  check_logits(arguments.op, "draft_logits", draft, dim, shape);
  check_size(arguments.op, "draft_logits", draft, dim - 1, target.size(dim - 1), "the target's vocabulary");
  check_same_device(arguments.op, "draft_logits", draft, "target_logits", target);
}

inline AcceptResult prepare_accept_tree(const AcceptArguments& arguments, const Tensor& tokens,
                                        const OptionalTensor& parents, const Tensor& cu_nodes, int64_t max_depth,
                                        const OptionalTensor& draft_rows, AcceptProblem& problem) {
  const char* const op = arguments.op;
  const Tensor& target = arguments.target_logits;
  check_logits(op, "target_logits", target, 2, "[N, V]");
  check_rule(arguments);
  const int64_t nodes = target.size(0);
  const PerRow rows{op, target, "target_logits", nodes, "one for each row of target_logits"};
  check_column(rows, "tokens", tokens, ScalarType::Long);
  if (max_depth < 0 || max_depth >= kMaxTreeNodes)
    refuse(op, "max_depth must be in [0, ", kMaxTreeNodes, "), got ", max_depth);
  check_dtype(op, "cu_nodes", cu_nodes, {ScalarType::Int});
  check_dim(op, "cu_nodes", cu_nodes, 1, "[B + 1]");
  if (cu_nodes.size(0) < 1) refuse(op, "cu_nodes must have shape [B + 1], got ", describe(cu_nodes));
  check_below(op, "cu_nodes", cu_nodes, 0, kInt32Limit, "bounds");
  check_column({op, target, "target_logits", cu_nodes.size(0), "B + 1"}, "cu_nodes", cu_nodes, ScalarType::Int);
  const int64_t requests = cu_nodes.size(0) - 1;
  problem = {};
  problem.target = logit_rows_of(op, "target_logits", target,
                                 allowed_of(op, "allowed", arguments.allowed, target, "target_logits", nodes));
  if (arguments.draft_logits.has_value()) {
    const Tensor& draft = *arguments.draft_logits;
    check_draft_logits(arguments, 2, "[R, V]");
    check_below(op, "draft_logits", draft, 0, kInt32Limit, "rows");
    if (!draft_rows.has_value() && draft.size(0) != nodes)
      refuse(op, "draft_rows must be given unless draft_logits has a row for each of the ", nodes, " nodes, got ",
             describe(draft));
    problem.draft =
        logit_rows_of(op, "draft_logits", draft,
                      allowed_of(op, "draft_allowed", arguments.draft_allowed, draft, "draft_logits", draft.size(0)));
    problem.has_draft = true;
    problem.draft_row_count = static_cast<int32_t>(draft.size(0));
  }
  problem.tokens = data_of<int64_t>(op, "tokens", tokens);
  problem.parents = column_of<int32_t>(rows, "parents", parents, ScalarType::Int);
  problem.cu_nodes = data_of<int32_t>(op, "cu_nodes", cu_nodes);
  problem.draft_rows = column_of<int32_t>(rows, "draft_rows", draft_rows, ScalarType::Int);
  problem.nodes = nodes;
  return prepare_accept(arguments, requests, max_depth, problem);
}

inline AcceptResult prepare_accept_chain(const AcceptArguments& arguments, const Tensor& draft_tokens,
                                         AcceptProblem& problem) {
  constexpr const char* op = "accept_chain";
  const Tensor& target = arguments.target_logits;
  check_logits(op, "target_logits", target, 3, "[B, K + 1, V]");
  check_rule(arguments);
  check_dtype(op, "draft_tokens", draft_tokens, {ScalarType::Long});
  check_dim(op, "draft_tokens", draft_tokens, 2, "[B, K]");
  const int64_t requests = target.size(0), nodes = target.size(1);
  if (nodes < 1 || nodes > kMaxTreeNodes)
    refuse(op, "target_logits must have 1 to ", kMaxTreeNodes, " rows (K + 1) for each request, got ",
           describe(target));
  check_size(op, "draft_tokens", draft_tokens, 0, requests, "the requests of target_logits");
  check_size(op, "draft_tokens", draft_tokens, 1, nodes - 1, "one less than target_logits has rows");
  check_same_device(op, "draft_tokens", draft_tokens, "target_logits", target);
  if (!draft_tokens.is_contiguous()) refuse(op, "draft_tokens must be contiguous, got ", describe(draft_tokens));

  problem = {};
  problem.target =
      logit_rows_of(op, "target_logits", target,
                    allowed_of(op, "allowed", arguments.allowed, target, "target_logits", requests * nodes));
  problem.target_request_stride = target.stride(0);
  if (arguments.draft_logits.has_value()) {
    const Tensor& draft = *arguments.draft_logits;
    check_draft_logits(arguments, 3, "[B, K, V]");
    check_size(op, "draft_logits", draft, 0, requests, "the requests of target_logits");
    check_size(op, "draft_logits", draft, 1, nodes - 1, "one for each draft token");
    problem.draft = logit_rows_of(
        op, "draft_logits", draft,
        allowed_of(op, "draft_allowed", arguments.draft_allowed, draft, "draft_logits", requests * (nodes - 1)));
    problem.draft_request_stride = draft.stride(0);
    problem.has_draft = true;
    problem.draft_row_count = static_cast<int32_t>(nodes - 1);
  }
  problem.tokens = data_of<int64_t>(op, "draft_tokens", draft_tokens);
  problem.is_chain = true;
  problem.chain_nodes = static_cast<int32_t>(nodes);
  problem.nodes = requests * nodes;
  return prepare_accept(arguments, requests, nodes - 1, problem);
}

// What a step says about its emitted tokens on request: outputs and scratch memory.
struct Reports {
  std::vector<Tensor> logprobs;  // raw, processed, top_tokens, top_raw, top_processed; empty for none
  std::vector<Tensor> support;   // counts, ids; empty for none
  std::optional<Tensor> described;
  LogprobArrays logprob_arrays{};
  SupportArrays support_arrays{};
};

// `alternatives`: of each token, -1 for no log probabilities; `room`: for the ids of each token's support, 0 for none.
inline Reports prepare_reports(const char* op, const Tensor& like, int64_t alternatives, int64_t room,
                               AcceptProblem& problem) {
  if (alternatives < -1 || alternatives > kMaxTopLogprobs)
    refuse(op, "logprobs must be -1 (none) or the number of alternatives, 0 to ", kMaxTopLogprobs, ", got ",
           alternatives);
  const int64_t requests = problem.requests, width = int64_t{problem.max_depth} + 1;
  const int64_t vocabulary = problem.target.vocabulary;
  if (room < 0 || room > vocabulary)
    refuse(op, "support must be 0 (none) or the ids that each token has room for, at most the vocabulary, ", vocabulary,
           ", got ", room);
  Reports reports;
  const auto make = [&](std::vector<Tensor>& outputs, const std::vector<int64_t>& shape, ScalarType type) {
    return outputs.emplace_back(empty_of_shape(op, like, shape, type));
  };
  if (alternatives >= 0) {
    const std::vector<int64_t> each{requests, width}, top{requests, width, alternatives};
    reports.logprob_arrays.raw = output_of<float>(make(reports.logprobs, each, ScalarType::Float));
    reports.logprob_arrays.processed = output_of<float>(make(reports.logprobs, each, ScalarType::Float));
    reports.logprob_arrays.top_tokens = output_of<int64_t>(make(reports.logprobs, top, ScalarType::Long));
    reports.logprob_arrays.top_raw = output_of<float>(make(reports.logprobs, top, ScalarType::Float));
    reports.logprob_arrays.top_processed = output_of<float>(make(reports.logprobs, top, ScalarType::Float));
    reports.logprob_arrays.count = static_cast<int32_t>(alternatives);
  }
  if (room > 0) {
    reports.support_arrays.counts = output_of<int32_t>(make(reports.support, {requests, width}, ScalarType::Int));
    reports.support_arrays.ids = output_of<int32_t>(make(reports.support, {requests, width, room}, ScalarType::Int));
    reports.support_arrays.room = static_cast<int32_t>(room);
  }
  if (alternatives < 0 && room == 0) return reports;
  const int64_t bytes = problem.nodes * static_cast<int64_t>(sizeof(Distribution));
  reports.described = empty_of_shape(op, like, {bytes}, ScalarType::Byte);
  problem.described = output_of<Distribution>(*reports.described);
  return reports;
}

// The ops with their torch signatures; `run` fills in the outputs on its device.

using RunAccept = void (*)(const char* op, const AcceptProblem& problem, const LogprobArrays& logprobs,
                           const SupportArrays& supports, const Tensor& target_logits);
// AcceptResult, logprobs, support
using AcceptOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, std::vector<Tensor>, std::vector<Tensor>>;

template <RunAccept run>
AcceptOutputs accept_tree(const Tensor& target_logits, const Tensor& tokens, const OptionalTensor& parents,
                          const Tensor& cu_nodes, int64_t max_depth, int64_t rule, const OptionalTensor& draft_logits,
                          const OptionalTensor& draft_rows, const OptionalTensor& temperature,
                          const OptionalTensor& top_k, const OptionalTensor& top_p, const OptionalTensor& min_p,
                          const OptionalTensor& draft_temperature, const OptionalTensor& draft_top_k,
                          const OptionalTensor& draft_top_p, const OptionalTensor& draft_min_p,
                          const OptionalTensor& allowed, const OptionalTensor& draft_allowed,
                          const OptionalTensor& seeds, const OptionalTensor& positions, double threshold, double alpha,
                          int64_t logprobs, int64_t support) {
  AcceptProblem problem{};
  const AcceptResult result = prepare_accept_tree({"accept_tree",
                                                   target_logits,
                                                   rule,
                                                   draft_logits,
                                                   {temperature, top_k, top_p, min_p},
                                                   {draft_temperature, draft_top_k, draft_top_p, draft_min_p},
                                                   allowed,
                                                   draft_allowed,
                                                   seeds,
                                                   positions,
                                                   threshold,
                                                   alpha},
                                                  tokens, parents, cu_nodes, max_depth, draft_rows, problem);
  const Reports reports = prepare_reports("accept_tree", target_logits, logprobs, support, problem);
  run("accept_tree", problem, reports.logprob_arrays, reports.support_arrays, target_logits);
  return std::tuple_cat(result, std::tuple(reports.logprobs, reports.support));
}

template <RunAccept run>
AcceptOutputs accept_chain(const Tensor& target_logits, const Tensor& draft_tokens, int64_t rule,
                           const OptionalTensor& draft_logits, const OptionalTensor& temperature,
                           const OptionalTensor& top_k, const OptionalTensor& top_p, const OptionalTensor& min_p,
                           const OptionalTensor& draft_temperature, const OptionalTensor& draft_top_k,
                           const OptionalTensor& draft_top_p, const OptionalTensor& draft_min_p,
                           const OptionalTensor& allowed, const OptionalTensor& draft_allowed,
                           const OptionalTensor& seeds, const OptionalTensor& positions, double threshold, double alpha,
                           int64_t logprobs, int64_t support) {
  AcceptProblem problem{};
  const AcceptResult result = prepare_accept_chain({"accept_chain",
                                                    target_logits,
                                                    rule,
                                                    draft_logits,
                                                    {temperature, top_k, top_p, min_p},
                                                    {draft_temperature, draft_top_k, draft_top_p, draft_min_p},
                                                    allowed,
                                                    draft_allowed,
                                                    seeds,
                                                    positions,
                                                    threshold,
                                                    alpha},
                                                   draft_tokens, problem);
  const Reports reports = prepare_reports("accept_chain", target_logits, logprobs, support, problem);
  run("accept_chain", problem, reports.logprob_arrays, reports.support_arrays, target_logits);
  return std::tuple_cat(result, std::tuple(reports.logprobs, reports.support));
}

}  // namespace pass_ext
