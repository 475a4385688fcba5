// What accept, draft and attention plan on a GPU: numbers for tests.
#include "cuda/accept.cuh"
#include "cuda/attention_group_plan.cuh"
#include "cuda/attention_plain.cuh"
#include "cuda/attention_plan.cuh"
#include "cuda/draft.cuh"
#include "launches.h"

namespace emulator {
namespace {

auto plan_accept(const Numbers& given) {
  pass_ext::AcceptProblem problem{};
  problem.target.vocabulary = problem.draft.vocabulary = given.narrow("vocabulary");
  problem.is_chain = true;
  problem.has_draft = given("has_draft") != 0;
  problem.chain_nodes = given.narrow("nodes");
  problem.requests = given("requests");
  problem.nodes = given("requests") * given("nodes");
  problem.max_depth = problem.chain_nodes - 1;
  problem.rule = static_cast<pass_ext::Rule>(given("rule"));
  return pass_ext::gpu::plan_accept(problem, given.narrow("multiprocessors"));
}

auto plan_draft(const Numbers& given) {
  pass_ext::DraftProblem problem{};
  problem.logits.vocabulary = given.narrow("vocabulary");
  problem.rows = given("rows");
  problem.count = 1;
  problem.mode = static_cast<pass_ext::DraftMode>(given("mode"));
  return pass_ext::gpu::plan_draft(problem, given.narrow("multiprocessors"));
}

int64_t accept_workspace(const Numbers& given) { return plan_accept(given).bytes(); }
// Of the accept step itself, if the rows are scanned beforehand.
int64_t accept_launches(const Numbers& given) { return plan_accept(given).is_one_launch ? 1 : 2; }
int64_t draft_workspace(const Numbers& given) { return plan_draft(given).bytes(); }
int64_t draft_scan_blocks(const Numbers& given) { return plan_draft(given).scan_blocks; }

pass_ext::AttentionProblem attention_problem(const Numbers& given) {
  pass_ext::AttentionProblem problem{};
  problem.prefix_lens = given.at<int32_t>("prefix_lens");
  problem.cu_nodes = given.at<int32_t>("cu_nodes");
  problem.visible = given.at<int64_t>("visible");
  problem.visible_stride = given("visible_stride");
  problem.requests = given("requests");
  problem.rows = given("rows");
  problem.slots = given("slots");
  problem.page_size = given.narrow("page_size");
  problem.pages = given.narrow("pages");
  problem.heads = given.narrow("heads");
  problem.kv_heads = given.narrow("kv_heads");
  problem.group = problem.heads / problem.kv_heads;
  problem.head_dim = given.narrow("head_dim");
  problem.value_dim = given.narrow("value_dim");
  problem.max_nodes = given.narrow("max_nodes");
  problem.window = problem.chunk = -1;
  problem.type = static_cast<pass_ext::FloatType>(given("type"));
  return problem;
}

using pass_ext::gpu::TaskGrid;

// {the grid of attention in one order, the floats of its workspace}
std::pair<TaskGrid, int64_t> plan_one_order(const Numbers& given, const pass_ext::AttentionProblem& problem) {
  const int32_t multiprocessors = given.narrow("multiprocessors");
  if (pass_ext::gpu::has_group_kernel(problem, pass_ext::CodeType::none)) {
    const int64_t resident = pass_ext::gpu::with_group_shape(problem, pass_ext::CodeType::none, [&](auto shape) {
      return int64_t{decltype(shape)::kResidentBlocks} * multiprocessors;
    });
    const auto plan = pass_ext::gpu::plan_group_attention(problem, pass_ext::CodeType::none, {}, resident);
    return {plan.grid, plan.workspace};
  }
  const auto plan = pass_ext::gpu::plan_plain_attention(problem, {}, multiprocessors);
  return {plan.grid, plan.workspace};
}

// Floats. `most_blocks`: those that run at once; 0: of attention in one order.
int64_t attention_workspace(const Numbers& given) {
  const pass_ext::AttentionProblem problem = attention_problem(given);
  if (given("most_blocks") == 0) return plan_one_order(given, problem).second;
  return pass_ext::gpu::plan_attention(problem, pass_ext::CodeType::none, given("most_blocks"),
                                       given.narrow("multiprocessors"))
      .workspace;
}

using pass_ext::gpu::AttentionTasks;
using pass_ext::gpu::Task;

// The tasks of a problem in their order, listed: [row, first tile's head, its first place, behind its last, part or
// -1].
PASS_EXT_KERNEL list_tasks_kernel(AttentionTasks tasks, int64_t* listed) {
  PASS_EXT_SHARED(Task, scratches, 1);
  for_each_task(tasks, scratches[0], [&](const Task& task) {
    if (pass_ext::gpu::thread_rank() != 0) return;
    int64_t* const line = listed + 5 * pass_ext::gpu::atomic_add(tasks.counter + 1, 1);
    line[0] = task.row;
    line[1] = task.tile;
    line[2] = tasks.unit * pass_ext::gpu::first_place_of_share(task.first);
    line[3] = tasks.unit * pass_ext::gpu::first_place_of_share(task.last);
    line[4] = task.part;
  });
}

// Lists them on one block, and returns how many there are; `grid`: receives the blocks of the problem's own grid, those
// that run at once, and most_parts.
int64_t attention_tasks(const Numbers& given) {
  const pass_ext::AttentionProblem problem = attention_problem(given);
  const TaskGrid plan = plan_one_order(given, problem).first;
  int32_t* const counters = given.at<int32_t>("counters");
  const AttentionTasks tasks = plan.tasks_in(given.at<float>("memory"), problem.rows, counters);
  int64_t* const grid = given.at<int64_t>("grid");
  grid[0] = plan.blocks;
  grid[1] = plan.resident;
  grid[2] = plan.most_parts;
  pass_ext::gpu::launch_plan(problem, {}, plan, tasks, {});
  pass_ext::gpu::launch("attention_tasks", list_tasks_kernel, {{1}, {32}}, {}, tasks, given.at<int64_t>("listed"));
  return counters[1];
}

}  // namespace

const std::map<std::string, Plan>& plans() {
  static const std::map<std::string, Plan> all = {
      {"accept_workspace", accept_workspace},       {"accept_launches", accept_launches},
      {"draft_workspace", draft_workspace},         {"draft_scan_blocks", draft_scan_blocks},
      {"attention_workspace", attention_workspace}, {"attention_tasks", attention_tasks}};
  return all;
}

}  // namespace emulator
