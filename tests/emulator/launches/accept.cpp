// The kernels of csrc/cuda/draft.cuh and csrc/cuda/accept.cuh through their own launch functions, as draft.cu and
// accept.cu call them.
#include "cuda/accept.cuh"

#include "cuda/draft.cuh"
#include "launches.h"

namespace emulator {
namespace {

using pass_ext::LogitType;

struct LogitArguments : Arguments {
  pass_ext::LogitRows rows(const std::string& name) const {
    return {at<void>(name), at<int32_t>(name + "_allowed"), (*this)(name + "_stride"),
            static_cast<LogitType>((*this)(name + "_type")), static_cast<int32_t>((*this)("vocabulary"))};
  }
  pass_ext::SamplingParameterArrays sampling(const std::string& prefix) const {
    return {at<float>(prefix + "temperature"), at<int32_t>(prefix + "top_k"), at<float>(prefix + "top_p"),
            at<float>(prefix + "min_p")};
  }
};

pass_ext::DraftProblem draft_problem(const LogitArguments& given) {
  pass_ext::DraftProblem problem{};
  problem.logits = given.rows("logits");
  problem.sampling = given.sampling("");
  problem.seeds = given.at<int64_t>("seeds");
  problem.positions = given.at<int64_t>("positions");
  problem.nodes = given.at<int32_t>("nodes");
  problem.rows = given("rows");
  problem.count = static_cast<int32_t>(given("count"));
  problem.mode = static_cast<pass_ext::DraftMode>(given("mode"));
  problem.tokens = given.at<int64_t>("tokens");
  problem.logprobs = given.at<float>("logprobs");
  return problem;
}

pass_ext::AcceptProblem accept_problem(const LogitArguments& given, float threshold, float alpha) {
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
  problem.threshold = threshold;
  problem.alpha = alpha;
  problem.emitted = given.at<int64_t>("emitted");
  problem.path = given.at<int32_t>("path");
  problem.num_accepted = given.at<int32_t>("num_accepted");
  problem.status = given.at<int32_t>("status");
  return problem;
}

}  // namespace

int64_t draft_workspace(const Numbers& numbers) {
  const LogitArguments given{{numbers}};
  return pass_ext::gpu::plan_draft(draft_problem(given), static_cast<int>(given("multiprocessors"))).bytes();
}

int64_t draft_scan_blocks(const Numbers& numbers) {
  const LogitArguments given{{numbers}};
  return pass_ext::gpu::plan_draft(draft_problem(given), static_cast<int>(given("multiprocessors"))).scan_blocks;
}

void draft(const Numbers& numbers) {
  const LogitArguments given{{numbers}};
  const pass_ext::DraftProblem problem = draft_problem(given);
  const auto plan = pass_ext::gpu::plan_draft(problem, static_cast<int>(given("multiprocessors")));
  pass_ext::gpu::launch_draft(problem, plan, plan.carve(given.at<void>("workspace"), given.at<int32_t>("counters")),
                              {});
}

int64_t accept_workspace(const Numbers& numbers) {
  const LogitArguments given{{numbers}};
  return pass_ext::gpu::plan_accept(accept_problem(given, 0, 0), static_cast<int>(given("multiprocessors"))).bytes();
}

void accept(const Numbers& numbers, float threshold, float alpha) {
  const LogitArguments given{{numbers}};
  const pass_ext::AcceptProblem problem = accept_problem(given, threshold, alpha);
  const auto plan = pass_ext::gpu::plan_accept(problem, static_cast<int>(given("multiprocessors")));
  pass_ext::gpu::launch_accept(problem, plan, plan.carve(given.at<void>("workspace"), given.at<int32_t>("counters")),
                               {});
}

}  // namespace emulator
