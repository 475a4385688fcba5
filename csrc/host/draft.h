// Checks draft_sample's arguments, the same on every device, packs them into core/draft.h's DraftProblem and makes the
// outputs. The op is a template over the function that fills them.
#pragma once

#include <tuple>

#include "core/draft.h"
#include "core/tree.h"
#include "host/distribution.h"

namespace pass_ext {

struct DraftArguments {
  const char* op;
  const Tensor& logits;
  int64_t k, mode;
  SamplingArguments sampling;
  const OptionalTensor &allowed, &seeds, &positions, &nodes;
};

using DraftResult = std::tuple<Tensor, Tensor>;  // tokens, logprobs

// Makes the outputs and packs the problem.
inline DraftResult prepare_draft(const DraftArguments& arguments, DraftProblem& problem) {
  const char* const op = arguments.op;
  const Tensor& logits = arguments.logits;
  check_logits(op, "logits", logits, 2, "[R, V]");
  if (arguments.k < 1 || arguments.k > kMaxTreeNodes)
    refuse(op, "k must be in [1, ", kMaxTreeNodes, "], got ", arguments.k);
  if (arguments.mode < 0 || arguments.mode > static_cast<int64_t>(DraftMode::top))
    refuse(op, "mode must be the index of a mode, 0 to 3, got ", arguments.mode);
  const int64_t count = logits.size(0);
  const PerRow rows{op, logits, "logits", count, "one for each row of logits"};
  problem.sampling = sampling_parameters_of(rows, arguments.sampling);
  problem.seeds = column_of<int64_t>(rows, "seeds", arguments.seeds, ScalarType::Long);
  problem.positions = column_of<int64_t>(rows, "positions", arguments.positions, ScalarType::Long);
  problem.nodes = column_of<int32_t>(rows, "nodes", arguments.nodes, ScalarType::Int);
  problem.logits =
      logit_rows_of(op, "logits", logits, allowed_of(op, "allowed", arguments.allowed, logits, "logits", count));
  problem.rows = count;
  problem.count = static_cast<int32_t>(arguments.k);
  problem.mode = static_cast<DraftMode>(arguments.mode);
  const Tensor tokens = empty_of_shape(op, logits, {count, arguments.k}, ScalarType::Long);
  const Tensor logprobs = empty_of_shape(op, logits, {count, arguments.k}, ScalarType::Float);
  problem.tokens = output_of<int64_t>(tokens);
  problem.logprobs = output_of<float>(logprobs);
  return {tokens, logprobs};
}

// The op with its torch signature; `run` fills in the outputs on its device.

using RunDraft = void (*)(const DraftProblem& problem, const Tensor& logits);

template <RunDraft run>
DraftResult draft_sample(const Tensor& logits, int64_t k, int64_t mode, const OptionalTensor& temperature,
                         const OptionalTensor& top_k, const OptionalTensor& top_p, const OptionalTensor& min_p,
                         const OptionalTensor& allowed, const OptionalTensor& seeds, const OptionalTensor& positions,
                         const OptionalTensor& nodes) {
  DraftProblem problem{};
  const DraftResult result = prepare_draft(
      {"draft_sample", logits, k, mode, {temperature, top_k, top_p, min_p}, allowed, seeds, positions, nodes}, problem);
  run(problem, logits);
  return result;
}

}  // namespace pass_ext
