// The kernels of csrc/cuda/shard.cuh through their own launch functions, as shard.cu calls them.
#include "cuda/shard.cuh"

#include "logits.h"

namespace emulator {
namespace {

pass_ext::AcceptProblem tree_problem(const LogitArguments& given) {
  pass_ext::AcceptProblem problem{};
  problem.target = given.rows("target");
  problem.draft = given.rows("draft");
  problem.has_draft = given("has_draft") != 0;
  problem.tokens = given.at<int64_t>("tokens");
  problem.parents = given.at<int32_t>("parents");
  problem.cu_nodes = given.at<int32_t>("cu_nodes");
  problem.draft_rows = given.at<int32_t>("draft_rows");
  problem.draft_row_count = static_cast<int32_t>(given("draft_row_count"));
  problem.target_sampling = given.sampling("");
  problem.draft_sampling = given.sampling("draft_");
  problem.seeds = given.at<int64_t>("seeds");
  problem.positions = given.at<int64_t>("positions");
  problem.requests = given("requests");
  problem.nodes = given("nodes");
  problem.max_depth = static_cast<int32_t>(given("max_depth"));
  problem.rule = static_cast<pass_ext::Rule>(given("rule"));
  problem.emitted = given.at<int64_t>("emitted");
  problem.path = given.at<int32_t>("path");
  problem.num_accepted = given.at<int32_t>("num_accepted");
  problem.status = given.at<int32_t>("status");
  return problem;
}

void shard_local(const Arguments& arguments) {
  const LogitArguments given{arguments};
  pass_ext::ShardProblem shard{};
  shard.problem = tree_problem(given);
  shard.start = static_cast<int32_t>(given("vocab_start"));
  shard.slices = given("slices");
  shard.round = static_cast<pass_ext::Round>(given("round"));
  if (given("state") != 0) shard.state = pass_ext::state_at(given.at<int64_t>("state"), shard.problem.nodes);
  shard.answers = given.at<void>("answers");
  shard.shape = pass_ext::answer_shape(shard.problem, shard.round, shard.slices);
  pass_ext::gpu::launch_shard_local(shard, {});
}

pass_ext::ShardCombination combination(const LogitArguments& given) {
  pass_ext::ShardCombination combination{};
  combination.problem = tree_problem(given);
  combination.round = static_cast<pass_ext::Round>(given("round"));
  combination.next = static_cast<pass_ext::Round>(given("next"));
  pass_ext::AnswerShape shape = pass_ext::answer_shape(combination.problem, combination.round, 0);
  shape.width = given("width");
  combination.answers = {given.at<void>("answers"), given("ranks"), shape};
  combination.former = given.at<int64_t>("former");
  combination.state = given.at<int64_t>("state");
  combination.words = pass_ext::state_words(combination.problem.nodes);
  return combination;
}

int64_t shard_combine_workspace(const Arguments& arguments) {
  return pass_ext::gpu::shard_combine_workspace(combination({arguments}));
}

void shard_combine(const Arguments& arguments) {
  const LogitArguments given{arguments};
  pass_ext::gpu::launch_shard_combine(combination(given), given.at<void>("workspace"), {});
}

void shard_best(const Arguments& arguments) {
  const LogitArguments given{arguments};
  pass_ext::ShardBest best{};
  best.draft.logits = given.rows("logits");
  best.draft.sampling.temperature = given.at<float>("temperature");
  best.draft.seeds = given.at<int64_t>("seeds");
  best.draft.positions = given.at<int64_t>("positions");
  best.draft.nodes = given.at<int32_t>("nodes");
  best.draft.rows = given("rows");
  best.draft.count = static_cast<int32_t>(given("count"));
  best.draft.mode = static_cast<pass_ext::DraftMode>(given("mode"));
  best.start = static_cast<int32_t>(given("vocab_start"));
  best.slots = pass_ext::state_at(given.at<int64_t>("state"), best.draft.rows).slots;
  best.words = given.at<uint32_t>("words");
  pass_ext::gpu::launch_shard_best(best, {});
}

const Registration kLaunches[] = {{"shard_local", shard_local},
                                  {"shard_combine", shard_combine},
                                  {"shard_combine_workspace", shard_combine_workspace},
                                  {"shard_best", shard_best}};

}  // namespace
}  // namespace emulator
