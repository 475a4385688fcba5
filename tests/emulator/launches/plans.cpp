// What accept and draft plan for rows of logits on a GPU: numbers for tests, which launch nothing.
#include "cuda/accept.cuh"
#include "cuda/draft.cuh"
#include "launches.h"

namespace emulator {
namespace {

auto plan_accept(const Arguments& given) {
  pass_ext::AcceptProblem problem{};
  problem.target.vocabulary = problem.draft.vocabulary = static_cast<int32_t>(given("vocabulary"));
  problem.is_chain = true;
  problem.has_draft = given("has_draft") != 0;
  problem.chain_nodes = static_cast<int32_t>(given("nodes"));
  problem.requests = given("requests");
  problem.nodes = given("requests") * given("nodes");
  problem.max_depth = problem.chain_nodes - 1;
  problem.rule = static_cast<pass_ext::Rule>(given("rule"));
  return pass_ext::gpu::plan_accept(problem, static_cast<int>(given("multiprocessors")));
}

auto plan_draft(const Arguments& given) {
  pass_ext::DraftProblem problem{};
  problem.logits.vocabulary = static_cast<int32_t>(given("vocabulary"));
  problem.rows = given("rows");
  problem.count = 1;
  problem.mode = static_cast<pass_ext::DraftMode>(given("mode"));
  return pass_ext::gpu::plan_draft(problem, static_cast<int>(given("multiprocessors")));
}

int64_t accept_workspace(const Arguments& given) { return plan_accept(given).bytes(); }
// Of the accept step itself, if the rows are scanned beforehand.
int64_t accept_launches(const Arguments& given) { return plan_accept(given).is_one_launch ? 1 : 2; }
int64_t draft_workspace(const Arguments& given) { return plan_draft(given).bytes(); }
int64_t draft_scan_blocks(const Arguments& given) { return plan_draft(given).scan_blocks; }

const Registration kPlans[] = {{"accept_workspace", accept_workspace},
                               {"accept_launches", accept_launches},
                               {"draft_workspace", draft_workspace},
                               {"draft_scan_blocks", draft_scan_blocks}};

}  // namespace
}  // namespace emulator
