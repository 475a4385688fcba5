// Checks recall_scores' arguments, the same on every device, packs them into core/recall.h's RecallProblem and makes
// the output.
#pragma once

#include "core/recall.h"
#include "host/packed.h"

namespace pass_ext {

inline const int64_t* check_tokens(const char* op, const char* argument, const Tensor& tensor, int64_t dim,
                                   const char* shape, const Tensor& tokens) {
  check_dtype(op, argument, tensor, {ScalarType::Long});
  check_dim(op, argument, tensor, dim, shape);
  check_same_device(op, argument, tensor, "tokens", tokens);
  if (!tensor.is_contiguous()) refuse(op, argument, " must be contiguous, got ", describe(tensor));
  return data_of<int64_t>(op, argument, tensor);
}

using RunRecall = void (*)(const RecallProblem& problem, const Tensor& tokens);

template <RunRecall run>
Tensor recall_scores(const Tensor& tokens, const Tensor& contexts, const Tensor& requests, const Tensor& text,
                     const Tensor& lengths) {
  constexpr const char* op = "recall_scores";
  RecallProblem problem{};
  problem.tokens = check_tokens(op, "tokens", tokens, 2, "[N, K]", tokens);
  problem.contexts = check_tokens(op, "contexts", contexts, 2, "[N, 3]", tokens);
  problem.text = check_tokens(op, "text", text, 2, "[B, T]", tokens);
  problem.lengths = check_tokens(op, "lengths", lengths, 1, "[B]", tokens);
  problem.requests = check_integers(op, "requests", requests, "tokens", tokens);
  check_size(op, "contexts", contexts, 0, tokens.size(0), "N, the rows of tokens");
  check_size(op, "contexts", contexts, 1, kRecallTokens, "the tokens that are compared");
  check_size(op, "requests", requests, 0, tokens.size(0), "N, the rows of tokens");
  check_size(op, "lengths", lengths, 0, text.size(0), "B, the rows of text");
  check_below(op, "tokens", tokens, 0, kInt32Limit, "rows");
  check_below(op, "text", text, 0, kInt32Limit, "requests");
  if (tokens.size(1) > kMostRecallRow)
    refuse(op, "tokens must have at most ", kMostRecallRow, " in a row, got ", describe(tokens));
  const Tensor scores = empty_of_shape(op, tokens, {tokens.size(0), tokens.size(1)}, ScalarType::Float);
  problem.scores = output_of<float>(scores);
  problem.rows = tokens.size(0);
  problem.count = static_cast<int32_t>(tokens.size(1));
  problem.request_count = text.size(0);
  problem.room = text.size(1);
  if (problem.rows > 0) run(problem, tokens);  // without columns too: the CPU checks values
  return scores;
}

}  // namespace pass_ext
