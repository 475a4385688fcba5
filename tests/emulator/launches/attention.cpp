// Attention's launches, as attention.cu makes them. Its kernels are compiled by the other attention_*.cu.
#include "cuda/attention_codes_plan.cuh"
#include "cuda/attention_group_plan.cuh"
#include "cuda/attention_merge.cuh"
#include "cuda/attention_plain.cuh"
#include "cuda/attention_plan.cuh"
#include "launches.h"

namespace emulator {
namespace {

pass_ext::KeyRows key_rows(const Arguments& given, const std::string& name) {
  return {given.at<void>(name), given(name + "_outer"), given(name + "_slot"), given(name + "_head")};
}

pass_ext::AttentionProblem attention_problem(const Arguments& given) {
  const auto integer = [&](const char* name) { return static_cast<int32_t>(given(name)); };
  pass_ext::AttentionProblem problem{};
  problem.q = given.at<void>("q");
  problem.k_cache = key_rows(given, "k_cache");
  problem.v_cache = key_rows(given, "v_cache");
  problem.k_new = key_rows(given, "k_new");
  problem.v_new = key_rows(given, "v_new");
  problem.prefix_lens = given.at<int32_t>("prefix_lens");
  problem.cu_nodes = given.at<int32_t>("cu_nodes");
  problem.visible = given.at<int64_t>("visible");
  problem.depths = given.at<int32_t>("depths");
  problem.block_table = given.at<int32_t>("block_table");
  problem.table_stride = given("table_stride");
  problem.requests = given("requests");
  problem.rows = given("rows");
  problem.slots = given("slots");
  problem.page_size = integer("page_size");
  problem.pages = integer("pages");
  problem.heads = integer("heads");
  problem.kv_heads = integer("kv_heads");
  problem.group = problem.heads / problem.kv_heads;
  problem.head_dim = integer("head_dim");
  problem.value_dim = integer("value_dim");
  problem.max_nodes = integer("max_nodes");
  problem.visible_stride = given("visible_stride");
  problem.window = integer("window");
  problem.chunk = integer("chunk");
  problem.type = static_cast<pass_ext::FloatType>(given("type"));
  problem.out = given.at<void>("out");
  problem.lse = given.at<float>("lse");
  problem.sinks = given.at<float>("sinks");
  return problem;
}

pass_ext::gpu::AttentionPlan attention_plan(const Arguments& given, const pass_ext::AttentionProblem& problem) {
  return pass_ext::gpu::plan_attention(problem, given("most_blocks"), static_cast<int32_t>(given("multiprocessors")));
}

pass_ext::KeyLists key_lists(const Arguments& given) {
  return {given.at<int32_t>("key_lists"), given("list_stride"), static_cast<int32_t>(given("list_size"))};
}

bool is_plain(const Arguments& given, const pass_ext::AttentionProblem& problem) {
  return pass_ext::gpu::is_plain(problem, static_cast<pass_ext::CodeType>(given("codes")), key_lists(given),
                                 given("batch_invariant") != 0);
}

pass_ext::gpu::PlainPlan plain_plan(const Arguments& given, const pass_ext::AttentionProblem& problem) {
  return pass_ext::gpu::plan_plain_attention(problem, key_lists(given), static_cast<int32_t>(given("multiprocessors")));
}

bool is_group(const Arguments& given, const pass_ext::AttentionProblem& problem) {
  return is_plain(given, problem) &&
         pass_ext::gpu::has_group_kernel(problem, static_cast<pass_ext::CodeType>(given("codes")));
}

pass_ext::gpu::GroupPlan group_plan(const Arguments& given, const pass_ext::AttentionProblem& problem) {
  return pass_ext::gpu::plan_group_attention(problem, key_lists(given), static_cast<int32_t>(given("multiprocessors")));
}

// The floats of the workspace.
int64_t attention_workspace(const Arguments& given) {
  const pass_ext::AttentionProblem problem = attention_problem(given);
  return is_group(given, problem)   ? group_plan(given, problem).workspace
         : is_plain(given, problem) ? plain_plan(given, problem).workspace
                                    : attention_plan(given, problem).workspace;
}

void attention_tree(const Arguments& given) {
  pass_ext::AttentionProblem problem = attention_problem(given);
  problem.scale = static_cast<float>(given.number("scale"));
  problem.softcap = static_cast<float>(given.number("softcap"));
  if (problem.rows == 0 || problem.heads == 0) return;
  const auto codes = static_cast<pass_ext::CodeType>(given("codes"));
  float* const workspace = given.at<float>("workspace");
  int32_t* const counter = given.at<int32_t>("counters");
  if (is_group(given, problem))
    pass_ext::gpu::launch_group_attention(problem, key_lists(given), group_plan(given, problem), workspace, counter,
                                          {});
  else if (is_plain(given, problem))
    pass_ext::gpu::launch_plain_attention(problem, codes, key_lists(given), plain_plan(given, problem), workspace,
                                          counter, {});
  else if (codes != pass_ext::CodeType::none)
    pass_ext::gpu::launch_codes_attention(problem, codes, attention_plan(given, problem), workspace, {});
  else
    pass_ext::gpu::launch_attention(problem, attention_plan(given, problem), workspace, {});
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

// Lists them on one block; `grid`: receives the blocks of the problem's own grid, those that run at once, and
// most_parts.
void attention_tasks(const Arguments& given) {
  const pass_ext::AttentionProblem problem = attention_problem(given);
  const pass_ext::gpu::TaskGrid plan =
      is_group(given, problem) ? group_plan(given, problem).grid : plain_plan(given, problem).grid;
  const AttentionTasks tasks = plan.tasks_in(given.at<float>("memory"), problem.rows, given.at<int32_t>("counters"));
  int64_t* const grid = given.at<int64_t>("grid");
  grid[0] = plan.blocks;
  grid[1] = plan.resident;
  grid[2] = plan.most_parts;
  pass_ext::gpu::launch_plan(problem, key_lists(given), plan, tasks, {});
  pass_ext::gpu::launch("attention_tasks", list_tasks_kernel, {{1}, {32}}, {}, tasks, given.at<int64_t>("listed"));
}

void attention_merge(const Arguments& given) {
  pass_ext::gpu::launch_merge(
      {given.at<void>("out_a"), given.at<void>("out_b"), given.at<float>("lse_a"), given.at<float>("lse_b"),
       given.at<void>("out"), given.at<float>("lse"), given("rows"), static_cast<int32_t>(given("head_dim")),
       static_cast<pass_ext::FloatType>(given("type")), given.at<float>("sinks"), static_cast<int32_t>(given("heads"))},
      {});
}

const Registration kLaunches[] = {{"attention_workspace", attention_workspace},
                                  {"attention_tree", attention_tree},
                                  {"attention_tasks", attention_tasks},
                                  {"attention_merge", attention_merge}};

}  // namespace
}  // namespace emulator
