// The kernels of csrc/cuda/accept.cuh, logprobs.cuh and support.cuh through their own launch functions, as accept.cu
// calls them.
#include "cuda/accept.cuh"

#include "cuda/logprobs.cuh"
#include "cuda/support.cuh"
#include "logits.h"

namespace emulator {
namespace {

pass_ext::AcceptProblem accept_problem(const LogitArguments& given) {
  pass_ext::AcceptProblem problem{};
  problem.target = given.rows("target");
  problem.draft = given.rows("draft");
  problem.is_chain = given("is_chain") != 0;
  problem.has_draft = given("has_draft") != 0;
  problem.tokens = given.at<int64_t>("tokens");
  problem.parents = given.at<int32_t>("parents");
  problem.cu_nodes = given.at<int32_t>("cu_nodes");
  problem.draft_rows = given.at<int32_t>("draft_rows");
  problem.target_request_stride = given("target_request_stride");
  problem.draft_request_stride = given("draft_request_stride");
  problem.chain_nodes = static_cast<int32_t>(given("chain_nodes"));
  problem.draft_row_count = static_cast<int32_t>(given("draft_row_count"));
  problem.target_sampling = given.sampling("");
  problem.draft_sampling = given.sampling("draft_");
  problem.seeds = given.at<int64_t>("seeds");
  problem.positions = given.at<int64_t>("positions");
  problem.requests = given("requests");
  problem.nodes = given("nodes");
  problem.max_depth = static_cast<int32_t>(given("max_depth"));
  problem.rule = static_cast<pass_ext::Rule>(given("rule"));
  problem.threshold = static_cast<float>(given.number("threshold"));
  problem.alpha = static_cast<float>(given.number("alpha"));
  problem.emitted = given.at<int64_t>("emitted");
  problem.path = given.at<int32_t>("path");
  problem.num_accepted = given.at<int32_t>("num_accepted");
  problem.status = given.at<int32_t>("status");
  problem.described = given.at<pass_ext::Distribution>("described");
  return problem;
}

pass_ext::LogprobArrays logprob_arrays(const LogitArguments& given) {
  return {given.at<float>("raw"),     given.at<float>("processed"),     given.at<int64_t>("top_tokens"),
          given.at<float>("top_raw"), given.at<float>("top_processed"), static_cast<int32_t>(given("logprobs"))};
}

pass_ext::SupportArrays support_arrays(const LogitArguments& given) {
  return {given.at<int32_t>("support_counts"), given.at<int32_t>("support_ids"), static_cast<int32_t>(given("room"))};
}

auto plan(const LogitArguments& given) {
  return pass_ext::gpu::plan_accept(accept_problem(given), static_cast<int>(given("multiprocessors")));
}

int64_t accept_workspace(const Arguments& arguments) { return plan({arguments}).bytes(); }

// Of the accept step itself, if the rows are scanned beforehand.
int64_t accept_launches(const Arguments& arguments) { return plan({arguments}).is_one_launch ? 1 : 2; }

void accept(const Arguments& arguments) {
  const LogitArguments given{arguments};
  const auto steps = plan(given);
  pass_ext::gpu::launch_accept(accept_problem(given), steps,
                               steps.carve(given.at<void>("workspace"), given.at<int32_t>("counters")), {});
  pass_ext::gpu::launch_logprobs(accept_problem(given), logprob_arrays(given), {});
  pass_ext::gpu::launch_supports(accept_problem(given), support_arrays(given), {});
}

const Registration kLaunches[] = {
    {"accept", accept}, {"accept_workspace", accept_workspace}, {"accept_launches", accept_launches}};

}  // namespace
}  // namespace emulator
