// torch.ops.pass_ext.state_commit_ on the CPU: checks of the values, parallel split by state, request and head, the
// shift of convolution states, registration. The inner loops of recurrences: cpu/state_kernels-inl.h.
#include "host/state.h"

#include <torch/csrc/stable/library.h>

#include <cstring>

#include "cpu/buffer.h"
#include "cpu/workers.h"

#define PASS_EXT_KERNELS "cpu/state_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

constexpr const char* kOp = "state_commit_";

// Below this many elements of states, times nodes, a second thread costs more than it saves.
constexpr int64_t kElementsPerTask = 64 * 1024;

// The packed rows of a request's accepted path.
struct RequestPath {
  int64_t request;
  std::vector<int64_t> rows;
};

// Refuses counts and nodes that do not fit. They are the same for all states.
void check_path(const StateStep& step) {
  check_bounds(kOp, step.cu_nodes, step.requests, step.rows, step.rows);
  for (int64_t b = 0; b < step.requests; ++b) {
    const int64_t nodes = step.cu_nodes[b + 1] - step.cu_nodes[b], accepted = step.num_accepted[b];
    if (nodes == 0) continue;
    if (accepted < 0 || accepted >= step.width)
      refuse(kOp, "num_accepted must be in [0, ", step.width, ") (path has ", step.width, " columns), got ", accepted,
             " at ", b);
    for (int64_t j = 0; j <= accepted; ++j) {
      const int64_t node = step.path[b * step.path_stride + j];
      if (node < -1 || node >= nodes)
        refuse(kOp, "path must be in [-1, ", nodes, ") (the nodes of request ", b, "), got ", node, " at [", b, ", ", j,
               "]");
    }
  }
}

// Refuses two requests that would write to one slot.
void check_slots_differ(const StateStep& step) {
  if (!step.state_index) return;
  std::vector<int32_t> slots;
  for (int64_t b = 0; b < step.requests; ++b)
    if (step.cu_nodes[b] < step.cu_nodes[b + 1]) slots.push_back(step.state_index[b]);
  std::sort(slots.begin(), slots.end());
  const auto twice = std::adjacent_find(slots.begin(), slots.end());
  if (twice != slots.end())
    refuse(kOp, "state_index must give every request with nodes a slot of its own, got ", *twice, " twice");
}

std::vector<RequestPath> paths_of(const StateStep& step) {
  std::vector<RequestPath> paths;
  for (int64_t b = 0; b < step.requests; ++b) {
    const AcceptedPath accepted = accepted_path(step, b);
    RequestPath path{b, {}};
    for (int32_t j = 0; j < accepted.length; ++j) {
      const int64_t row = accepted_row(step, accepted, b, j);
      if (row >= 0) path.rows.push_back(row);
    }
    if (!path.rows.empty()) paths.push_back(std::move(path));
  }
  return paths;
}

void prepare(const RecurrentState& state, int64_t head, const RequestPath& path, float* prepared) {
  const auto call = [&](auto tag) {
    using T = type_of<decltype(tag)>;
    PASS_EXT_AT_ISA(prepare_path(state, static_cast<const T*>(state.k), head, path.rows.data(),
                                 static_cast<int64_t>(path.rows.size()), prepared));
  };
  switch (state.key_type) {
    case RowType::bfloat16: return call(TypeTag<bfloat16>{});
    case RowType::float16: return call(TypeTag<float16>{});
    case RowType::float32: return call(TypeTag<float>{});
  }
}

// One head of one request.
void replay(const StateStep& step, const RecurrentState& state, const RequestPath& path, int64_t head) {
  thread_local Buffer work;
  float* const prepared = work.at_least(path.rows.size() * 2 * state.dk);
  prepare(state, head, path, prepared);
  const int64_t slot = slot_of(step.state_index, path.request, state.layout.slots);
  PASS_EXT_AT_ISA(replay_path(state, slot, head, path.rows.data(), static_cast<int64_t>(path.rows.size()), prepared));
}

// One request's window: the last of its old inputs and the path's.
template <typename Number>
void shift(const StateStep& step, const ConvolutionState& state, const RequestPath& path) {
  char* const window = state.data + slot_of(step.state_index, path.request, state.slots) * state.slot;
  const int64_t length = static_cast<int64_t>(path.rows.size());
  for (int64_t j = 0; j < state.inputs; ++j) {
    const int64_t from = length + j;  // in the sequence of old inputs and the path's
    char* const to = window + j * state.tap;
    const char* source =
        from < state.inputs ? window + from * state.tap : state.x + path.rows[from - state.inputs] * state.row;
    const int64_t distance = from < state.inputs ? state.channel : state.bytes;
    for (int64_t c = 0; c < state.channels; ++c)
      std::memcpy(to + c * state.channel, source + c * distance, sizeof(Number));
  }
}

void commit_recurrent(const StateStep& step, const std::vector<RecurrentState>& states,
                      const std::vector<RequestPath>& paths) {
  std::vector<int64_t> begin{0};  // the first task of each state: one per request and head
  int64_t elements = 1;
  for (const RecurrentState& state : states) {
    const int64_t heads = state.dv > 0 ? state.heads : 0;
    begin.push_back(begin.back() + heads * static_cast<int64_t>(paths.size()));
    elements = std::max(elements, state.dk * state.dv);
  }
  for_ranges(begin.back(), std::max<int64_t>(1, kElementsPerTask / elements), [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t index = std::upper_bound(begin.begin(), begin.end(), task) - begin.begin() - 1;
      const int64_t own = task - begin[index], heads = states[index].heads;
      replay(step, states[index], paths[own / heads], own % heads);
    }
  });
}

void commit_convolutions(const StateStep& step, const std::vector<ConvolutionState>& states,
                         const std::vector<RequestPath>& paths) {
  const int64_t requests = static_cast<int64_t>(paths.size());
  int64_t numbers = 1;
  for (const ConvolutionState& state : states) numbers = std::max(numbers, state.channels * state.inputs);
  for_ranges(static_cast<int64_t>(states.size()) * requests, std::max<int64_t>(1, kElementsPerTask / numbers),
             [&](int64_t first, int64_t last) {
               for (int64_t task = first; task < last; ++task) {
                 const ConvolutionState& state = states[task / requests];
                 const RequestPath& path = paths[task % requests];
                 state.bytes == 2 ? shift<uint16_t>(step, state, path) : shift<uint32_t>(step, state, path);
               }
             });
}

void state_commit_on_cpu(const TensorList& states, const TensorList& updates, const std::vector<int64_t>& parts,
                         const Tensor& cu_nodes, const Tensor& path, const Tensor& num_accepted,
                         const OptionalTensor& state_index) {
  const StateProblem problem = prepare_state_commit(states, updates, parts, cu_nodes, path, num_accepted, state_index);
  if (states.empty()) return;
  check_path(problem.step);
  for (const int64_t slots : problem.slots)
    check_slots(kOp, problem.step.cu_nodes, problem.step.requests, problem.step.state_index, slots);
  check_slots_differ(problem.step);
  const std::vector<RequestPath> paths = paths_of(problem.step);
  commit_recurrent(problem.step, problem.recurrent, paths);
  commit_convolutions(problem.step, problem.convolutions, paths);
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("state_commit_", TORCH_BOX(&pass_ext::state_commit_on_cpu));
}
