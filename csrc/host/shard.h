// Checks the shard ops' arguments, the same on every device, and packs them into the structs of core/shard.h and
// core/shard_combine.h. Both ops take accept_tree's arguments, with this rank's columns as logits.
#pragma once

#include <tuple>

#include "core/shard.h"
#include "core/shard_combine.h"
#include "host/accept.h"
#include "host/draft.h"

namespace pass_ext {

inline Round check_round(const char* op, const char* argument, int64_t round) {
  if (round < 0 || round > static_cast<int64_t>(Round::finish))
    refuse(op, argument, " must be the index of a round, 0 to ", static_cast<int64_t>(Round::finish), ", got ", round);
  return static_cast<Round>(round);
}

// The words of a state, or null if there is none yet.
inline const int64_t* state_of(const char* op, const OptionalTensor& state, const Tensor& logits, int64_t nodes,
                               bool is_needed) {
  if (!state.has_value()) {
    if (is_needed) refuse(op, "state must be given after the first round, got None");
    return nullptr;
  }
  check_column({op, logits, "target_logits", state_words(nodes), "the words of a state"}, "state", *state,
               ScalarType::Long);
  return data_of<int64_t>(op, "state", *state);
}

inline void check_rule_of_shards(const char* op, int64_t rule) {
  if (static_cast<Rule>(rule) > Rule::traversal)
    refuse(op, "rule must be one that is verified from shards, got '", name_of(static_cast<Rule>(rule)),
           "' (gather the logits for it)");
}

inline void check_start(const char* op, int64_t start, const Tensor& logits, int64_t vocabulary_limit) {
  const int64_t columns = logits.size(logits.dim() - 1);
  if (start < 0 || start % kSliceColumns != 0 || start + columns > vocabulary_limit)
    refuse(op, "vocab_start must be a multiple of ", kSliceColumns, " from 0 to ", vocabulary_limit, " - ", columns,
           ", got ", start);
}

inline ScalarType type_of_answers(const AnswerShape& shape) {
  return shape.is_wide ? ScalarType::Long : ScalarType::Int;
}

using RunShardLocal = void (*)(const ShardProblem& shard, const Tensor& logits);

template <RunShardLocal run>
Tensor shard_local(const Tensor& target_logits, const Tensor& tokens, const Tensor& parents, const Tensor& cu_nodes,
                   int64_t rule, const OptionalTensor& draft_logits, const OptionalTensor& draft_rows,
                   const OptionalTensor& allowed, const OptionalTensor& draft_allowed, const OptionalTensor& seeds,
                   int64_t vocab_start, int64_t slices, int64_t round, const OptionalTensor& state) {
  constexpr const char* op = "shard_local";
  const OptionalTensor none;
  ShardProblem shard{};
  shard.round = check_round(op, "round", round);
  check_rule_of_shards(op, rule);
  prepare_accept_tree({op,
                       target_logits,
                       rule,
                       draft_logits,
                       {none, none, none, none},
                       {none, none, none, none},
                       allowed,
                       draft_allowed,
                       seeds,
                       none,
                       0.0,
                       0.0},
                      tokens, parents, cu_nodes, 0, draft_rows, shard.problem);
  check_start(op, vocab_start, target_logits, kMostVocabulary);
  const int64_t most = (kMostVocabulary + kSliceColumns - 1) / kSliceColumns;
  if (slices < (target_logits.size(1) + kSliceColumns - 1) / kSliceColumns || slices > most)
    refuse(op, "slices must be at least the number of slices of ", kSliceColumns, " columns, and at most ", most,
           ", got ", slices);
  const int64_t nodes = shard.problem.nodes;
  shard.start = static_cast<int32_t>(vocab_start);
  shard.slices = slices;
  const int64_t* words = state_of(op, state, target_logits, nodes, shard.round != Round::peaks);
  if (words != nullptr) shard.state = state_at(const_cast<int64_t*>(words), nodes);
  shard.shape = answer_shape(shard.problem, shard.round, slices);
  const Tensor answers =
      empty_of_shape(op, target_logits, {shard.shape.slots, shard.shape.width}, type_of_answers(shard.shape));
  shard.answers = output_of<void>(answers);
  run(shard, target_logits);
  return answers;
}

using ShardResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // state, then an AcceptResult

using RunShardCombine = void (*)(const ShardCombination& combination, const Tensor& logits);

template <RunShardCombine run>
ShardResult shard_combine(const Tensor& target_logits, const Tensor& tokens, const Tensor& parents,
                          const Tensor& cu_nodes, int64_t max_depth, int64_t rule, const OptionalTensor& draft_logits,
                          const OptionalTensor& draft_rows, const OptionalTensor& temperature,
                          const OptionalTensor& top_k, const OptionalTensor& top_p, const OptionalTensor& min_p,
                          const OptionalTensor& draft_temperature, const OptionalTensor& draft_top_k,
                          const OptionalTensor& draft_top_p, const OptionalTensor& draft_min_p,
                          const OptionalTensor& seeds, const OptionalTensor& positions, int64_t vocab_size,
                          int64_t round, int64_t next, const Tensor& answers, const OptionalTensor& state) {
  constexpr const char* op = "shard_combine";
  const OptionalTensor none;
  ShardCombination combination{};
  combination.round = check_round(op, "round", round);
  combination.next = check_round(op, "next", next);
  if (combination.round == Round::finish) refuse(op, "round must be one with answers, got the last");
  check_rule_of_shards(op, rule);
  AcceptProblem& problem = combination.problem;
  const AcceptResult result = prepare_accept_tree({op,
                                                   target_logits,
                                                   rule,
                                                   draft_logits,
                                                   {temperature, top_k, top_p, min_p},
                                                   {draft_temperature, draft_top_k, draft_top_p, draft_min_p},
                                                   none,
                                                   none,
                                                   seeds,
                                                   positions,
                                                   0.0,
                                                   0.0},
                                                  tokens, parents, cu_nodes, max_depth, draft_rows, problem);
  if (vocab_size < target_logits.size(1) || vocab_size > kMostVocabulary)
    refuse(op, "vocab_size must be at least that of target_logits, and at most ", kMostVocabulary, ", got ",
           vocab_size);
  problem.target.vocabulary = problem.draft.vocabulary = static_cast<int32_t>(vocab_size);
  AnswerShape shape = answer_shape(problem, combination.round, 0);
  check_dtype(op, "answers", answers, {type_of_answers(shape)});
  check_dim(op, "answers", answers, 3, "[ranks, slots, width]");
  check_same_device(op, "answers", answers, "target_logits", target_logits);
  if (answers.size(0) == 0) refuse(op, "answers must be those of at least one rank, got ", describe(answers));
  check_size(op, "answers", answers, 1, shape.slots, "the slots of this round");
  const int64_t width = answers.size(2);
  if (!answers.is_contiguous() || width % (combination.round == Round::residuals ? 2 : 1) != 0 ||
      (shape.width != 0 && width != shape.width))
    refuse(op, "answers must be contiguous, with the width of this round, got ", describe(answers));
  shape.width = width;
  combination.answers = {shape.is_wide ? static_cast<const void*>(data_of<int64_t>(op, "answers", answers))
                                       : data_of<int32_t>(op, "answers", answers),
                         answers.size(0), shape};
  combination.former = state_of(op, state, target_logits, problem.nodes, combination.round != Round::peaks);
  combination.words = state_words(problem.nodes);
  const Tensor next_state = empty_of_shape(op, target_logits, {combination.words}, ScalarType::Long);
  combination.state = output_of<int64_t>(next_state);
  run(combination, target_logits);
  return {next_state, std::get<0>(result), std::get<1>(result), std::get<2>(result), std::get<3>(result)};
}

using RunShardBest = void (*)(const ShardBest& best, const Tensor& logits);

template <RunShardBest run>
Tensor shard_best(const Tensor& logits, const Tensor& state, int64_t k, int64_t mode, const OptionalTensor& temperature,
                  const OptionalTensor& allowed, const OptionalTensor& seeds, const OptionalTensor& positions,
                  const OptionalTensor& nodes, int64_t vocab_start) {
  const OptionalTensor none;
  ShardBest best{};
  prepare_draft({"shard_best", logits, k, mode, {temperature, none, none, none}, allowed, seeds, positions, nodes},
                best.draft);
  check_start("shard_best", vocab_start, logits, kMostVocabulary);
  best.start = static_cast<int32_t>(vocab_start);
  const int64_t rows = best.draft.rows;
  best.slots = state_at(const_cast<int64_t*>(state_of("shard_best", state, logits, rows, true)), rows).slots;
  const Tensor words = empty_of_shape("shard_best", logits, {rows, k, kBestWords}, ScalarType::Int);
  best.words = reinterpret_cast<uint32_t*>(output_of<int32_t>(words));
  run(best, logits);
  return words;
}

}  // namespace pass_ext
