// torch.ops.pass_ext.recurrent_tree on the CPU: checks of the values, the order of the nodes, parallel split by
// request, head and slice, registration. The inner loops: cpu/recurrent_kernels-inl.h.
#include "host/recurrent.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <utility>

#include "cpu/buffer.h"
#include "cpu/workers.h"

#define PASS_EXT_KERNELS "cpu/recurrent_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

// Below this many elements of states, times nodes, a second thread costs more than it saves.
constexpr int64_t kElementsPerTask = 64 * 1024;

// The order of the nodes of all requests, and how many buffers a slice needs at most.
struct WalkOrder {
  std::vector<WalkStep> steps;  // of request b from cu_nodes[b] on
  std::vector<WalkPlan> plans;  // of requests with nodes
  int64_t buffers = 1, most_nodes = 0;
};

// Appends a request's nodes depth first. Of a node's children the one with the most descendants comes last and
// overwrites the node's state, the others lie in the next buffer: a tree of 1,024 nodes needs at most 11 buffers.
class Walk {
 public:
  void append(const int32_t* parents, int32_t nodes, WalkOrder& order) {
    descendants_.assign(nodes, 1);
    for (int32_t i = nodes - 1; i > 0; --i)
      if (parents[i] >= 0) descendants_[parents[i]] += descendants_[i];
    last_child_.assign(nodes + 1, -1);  // index 0: of the request's state; 1 + i: of node i
    first_child_.assign(nodes + 1, -1);
    next_sibling_.assign(nodes, -1);
    for (int32_t i = nodes - 1; i >= 0; --i) {
      int32_t& last = last_child_[1 + parents[i]];
      if (last < 0 || descendants_[i] > descendants_[last]) last = i;
      next_sibling_[i] = first_child_[1 + parents[i]];
      first_child_[1 + parents[i]] = i;
    }
    push_children(-1, 0);
    while (!waiting_.empty()) {
      const WalkStep step = waiting_.back();
      waiting_.pop_back();
      order.steps.push_back(step);
      order.buffers = std::max<int64_t>(order.buffers, step.to + 1);
      push_children(step.node, step.to);
    }
  }

  bool has_one_root() const { return next_sibling_.empty() || next_sibling_[first_child_[0]] < 0; }

 private:
  std::vector<int32_t> descendants_, last_child_, first_child_, next_sibling_;
  std::vector<WalkStep> waiting_;

  bool has_children(int32_t node) const { return first_child_[1 + node] >= 0; }

  void push_children(int32_t node, int32_t buffer) {
    const int32_t last = last_child_[1 + node];
    if (last < 0) return;
    waiting_.push_back({last, buffer, buffer, has_children(last)});
    for (int32_t child = first_child_[1 + node]; child >= 0; child = next_sibling_[child])
      if (child != last) waiting_.push_back({child, buffer, buffer + 1, has_children(child)});
  }
};

template <typename T>
WalkOrder order_of(const RecurrentTree<T>& problem) {
  WalkOrder order;
  order.steps.reserve(problem.rows);
  Walk walk;
  for (int64_t b = 0; b < problem.requests; ++b) {
    const int64_t first = problem.cu_nodes[b], nodes = problem.cu_nodes[b + 1] - first;
    if (nodes == 0) continue;
    const size_t begin = order.steps.size();
    walk.append(problem.parents + first, static_cast<int32_t>(nodes), order);
    order.plans.push_back({order.steps.data() + begin, first, nodes,
                           slot_of(problem.state_index, b, problem.layout.slots), walk.has_one_root()});
    order.most_nodes = std::max(order.most_nodes, nodes);
  }
  return order;
}

// Rows that belong to no request: 0.
template <typename T>
void clear_other_rows(const RecurrentTree<T>& problem) {
  const int64_t width = problem.heads * problem.dv;
  const int64_t first = problem.requests > 0 ? problem.cu_nodes[0] : problem.rows;
  const int64_t last = problem.requests > 0 ? problem.cu_nodes[problem.requests] : problem.rows;
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, first}, {last, problem.rows}}) {
    std::fill(problem.out + begin * width, problem.out + end * width, T{});
    std::fill(problem.u + begin * width, problem.u + end * width, 0.0f);
  }
}

// The numbers of the task's share of the state after that of its head, for the cache: a head's slices fetch it
// together, line after line in memory's order, in which no slice of 16 columns reads. Of the last state, or one with
// gaps: its own.
template <typename T>
const float* read_soon(const RecurrentTree<T>& problem, const WalkOrder& order, int64_t task, int64_t slices) {
  const StateLayout& layout = problem.layout;
  int64_t next = task / slices + 1;  // of all requests' heads
  const bool is_dense =
      (layout.column == 1 && layout.row == problem.dv) || (layout.row == 1 && layout.column == problem.dk);
  if (!is_dense || next == static_cast<int64_t>(order.plans.size()) * problem.heads) --next;
  const float* const state =
      problem.states + layout.offset(order.plans[next / problem.heads].slot, next % problem.heads);
  return state + task % slices * problem.dk * kStateColumns;
}

struct OnCpu {
  template <typename T>
  static void run(const RecurrentTree<T>& problem, const Tensor&) {
    constexpr const char* op = "recurrent_tree";
    check_forest(op, problem.parents, problem.cu_nodes, problem.requests, problem.rows);
    check_slots(op, problem.cu_nodes, problem.requests, problem.state_index, problem.layout.slots);
    if (problem.heads * problem.dv == 0) return;
    clear_other_rows(problem);
    const WalkOrder order = order_of(problem);
    const int64_t slices = (problem.dv + kStateColumns - 1) / kStateColumns, slice = problem.dk * kStateColumns;
    const int64_t tasks_of_request = problem.heads * slices;
    const int64_t prepared_size = (order.most_nodes * node_row_size(problem.dk) + 15) / 16 * 16;
    const int64_t tasks = static_cast<int64_t>(order.plans.size()) * tasks_of_request;
    const int64_t mean_nodes = order.plans.empty() ? 1 : order.steps.size() / order.plans.size() + 1;
    for_ranges(tasks, std::max<int64_t>(1, kElementsPerTask / (slice * mean_nodes)), [&](int64_t begin, int64_t end) {
      thread_local Buffer work;
      float* const prepared = work.at_least(prepared_size + order.buffers * slice);
      int64_t prepared_for = -1;
      for (int64_t task = begin; task < end; ++task) {
        const WalkPlan& plan = order.plans[task / tasks_of_request];
        const int64_t head = task % tasks_of_request / slices, column = task % slices * kStateColumns;
        if (task / slices != prepared_for) PASS_EXT_AT_ISA(prepare_nodes(problem, plan, head, prepared));
        prepared_for = task / slices;
        PASS_EXT_AT_ISA(walk_slice(problem, plan, head, column, prepared, prepared + prepared_size,
                                   read_soon(problem, order, task, slices)));
      }
    });
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("recurrent_tree", TORCH_BOX(&pass_ext::recurrent_tree<pass_ext::OnCpu>));
}
