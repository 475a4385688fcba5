// The kernels of csrc/cuda/draft.cuh through their own launch function, as draft.cu calls it.
#include "cuda/draft.cuh"

#include "logits.h"

namespace emulator {
namespace {

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

auto plan(const LogitArguments& given) {
  return pass_ext::gpu::plan_draft(draft_problem(given), static_cast<int>(given("multiprocessors")));
}

int64_t draft_workspace(const Arguments& arguments) { return plan({arguments}).bytes(); }

int64_t draft_scan_blocks(const Arguments& arguments) { return plan({arguments}).scan_blocks; }

void draft(const Arguments& arguments) {
  const LogitArguments given{arguments};
  const auto steps = plan(given);
  pass_ext::gpu::launch_draft(draft_problem(given), steps,
                              steps.carve(given.at<void>("workspace"), given.at<int32_t>("counters")), {});
}

const Registration kLaunches[] = {
    {"draft", draft}, {"draft_workspace", draft_workspace}, {"draft_scan_blocks", draft_scan_blocks}};

}  // namespace
}  // namespace emulator
