// Checks state_commit_'s arguments, the same on every device, and packs them into the structs of core/state.h.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "core/state.h"
#include "host/recurrent.h"

namespace pass_ext {

using TensorList = std::vector<Tensor>;

struct StateProblem {
  StateStep step;
  std::vector<RecurrentState> recurrent;
  std::vector<ConvolutionState> convolutions;
  std::vector<int64_t> slots;  // of each state, in the order of the argument
  TensorList copies;           // contiguous ones, which live until the op ends
};

namespace state_commit {

constexpr const char* kOp = "state_commit_";

// "updates[3].u": a tensor of the update of a state
inline std::string part_name(size_t index, const char* part) { return "updates[" + std::to_string(index) + "]" + part; }

inline void check_not_expanded(const std::string& name, const Tensor& state) {
  for (int64_t i = 0; i < state.dim(); ++i)
    if (state.size(i) > 1 && state.stride(i) == 0)
      refuse(kOp, name, " must not be expanded, got ", describe(state), " with stride 0 in dimension ", i);
}

inline RecurrentState recurrent_state(const std::string& name, size_t index, const Tensor& state, const Tensor* parts,
                                      int64_t count, int64_t rows, StateProblem& problem) {
  const std::string names[] = {part_name(index, ".k"), part_name(index, ".u"), part_name(index, ".log_decay"),
                               part_name(index, ".decay_rates")};
  const Tensor &k = parts[0], &u = parts[1];
  const int64_t heads = state.size(1), dk = state.size(2), dv = state.size(3);
  check_dtype(kOp, name.c_str(), state, {ScalarType::Float});
  const char* const k_name = names[0].c_str();
  check_dtype(kOp, k_name, k, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  check_dim(kOp, k_name, k, 3, "[N, Hk, dk]");
  check_size(kOp, k_name, k, 0, rows, "the packed nodes");
  check_size(kOp, k_name, k, 2, dk, "dk of the state");
  check_key_heads(kOp, k_name, k, heads);
  check_same_device(kOp, k_name, k, "states[0]", state);
  const char* const u_name = names[1].c_str();
  check_dtype(kOp, u_name, u, {ScalarType::Float});
  check_dim(kOp, u_name, u, 3, "[N, H, dv]");
  check_size(kOp, u_name, u, 0, rows, "the packed nodes");
  check_size(kOp, u_name, u, 1, heads, "the heads of the state");
  check_size(kOp, u_name, u, 2, dv, "dv of the state");
  check_same_device(kOp, u_name, u, "states[0]", state);
  const Tensor* const rates = count > 3 ? &parts[3] : nullptr;
  const Decay kind =
      check_decay(kOp, names[2].c_str(), parts[2], names[3].c_str(), rates, rows, heads, dk, dv, "states[0]", state);

  const auto kept = [&](const Tensor& tensor) {
    problem.copies.push_back(tensor);
    return tensor;
  };
  const Tensor keys = kept(contiguous_heads_of(kOp, k_name, k)), updates = kept(contiguous_of(kOp, u_name, u));
  const Tensor logs = kept(contiguous_of(kOp, names[2].c_str(), parts[2]));
  RecurrentState result{};
  result.data = address_of<float>(kOp, name, state);
  result.layout = layout_of_states(state);
  result.heads = heads;
  result.key_heads = k.size(1);
  result.dk = dk;
  result.dv = dv;
  result.k = address_of<const void>(kOp, names[0], keys);
  result.key_row = keys.stride(0);
  result.key_head = keys.stride(1);
  result.key_type = k.scalar_type() == ScalarType::BFloat16 ? RowType::bfloat16
                    : k.scalar_type() == ScalarType::Half   ? RowType::float16
                                                            : RowType::float32;
  result.u = data_of<float>(kOp, names[1], updates);
  result.decay = {data_of<float>(kOp, names[2], logs), nullptr, kind};
  if (rates) result.decay.rates = data_of<float>(kOp, names[3], kept(contiguous_of(kOp, names[3].c_str(), *rates)));
  return result;
}

inline ConvolutionState convolution_state(const std::string& name, size_t index, const Tensor& state, const Tensor& x,
                                          int64_t rows, StateProblem& problem) {
  const std::string x_name = part_name(index, "");
  check_dtype(kOp, name.c_str(), state, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  check_dtype(kOp, x_name.c_str(), x, {state.scalar_type()});
  check_dim(kOp, x_name.c_str(), x, 2, "[N, C]");
  check_size(kOp, x_name.c_str(), x, 0, rows, "the packed nodes");
  check_size(kOp, x_name.c_str(), x, 1, state.size(1), "the channels of the state");
  check_same_device(kOp, x_name.c_str(), x, "states[0]", state);
  const Tensor inputs = contiguous_heads_of(kOp, x_name.c_str(), x);
  problem.copies.push_back(inputs);
  const int64_t bytes = static_cast<int64_t>(state.element_size());
  return {address_of<char>(kOp, name, state),
          state.size(0),
          state.stride(0) * bytes,
          state.stride(1) * bytes,
          state.stride(2) * bytes,
          state.size(1),
          state.size(2),
          address_of<const char>(kOp, x_name, inputs),
          inputs.stride(0) * bytes,
          bytes};
}

// Refuses the same memory twice: the path would be replayed twice.
inline void check_all_differ(const StateProblem& problem) {
  std::vector<const void*> all;
  for (const RecurrentState& state : problem.recurrent)
    if (state.layout.slots * state.heads * state.dv > 0) all.push_back(state.data);
  for (const ConvolutionState& state : problem.convolutions)
    if (state.slots * state.channels * state.inputs > 0) all.push_back(state.data);
  std::sort(all.begin(), all.end());
  if (std::adjacent_find(all.begin(), all.end()) != all.end())
    refuse(kOp, "states must be different tensors, got the same memory twice");
}

}  // namespace state_commit

inline StateProblem prepare_state_commit(const TensorList& states, const TensorList& updates,
                                         const std::vector<int64_t>& parts, const Tensor& cu_nodes, const Tensor& path,
                                         const Tensor& num_accepted, const OptionalTensor& state_index) {
  constexpr const char* op = state_commit::kOp;
  if (parts.size() != states.size())
    refuse(op, "updates must have one for each of the ", states.size(), " states, got ", parts.size());
  StateProblem problem{};
  if (states.empty()) return problem;
  const Tensor& first = states[0];
  StateStep& step = problem.step;
  const Bounds bounds = check_cu_nodes(op, cu_nodes, "states[0]", first);
  step.cu_nodes = bounds.cu_nodes;
  step.requests = bounds.requests;
  step.num_accepted = check_integers(op, "num_accepted", num_accepted, "states[0]", first);
  check_size(op, "num_accepted", num_accepted, 0, step.requests, "the requests of cu_nodes");
  check_dtype(op, "path", path, {ScalarType::Int});
  check_dim(op, "path", path, 2, "[B, A]");
  check_size(op, "path", path, 0, step.requests, "the requests of cu_nodes");
  check_same_device(op, "path", path, "states[0]", first);
  check_contiguous_rows(op, "path", path);
  if (path.size(1) > kMaxTreeNodes)
    refuse(op, "path must have at most ", kMaxTreeNodes, " columns, got ", describe(path));
  step.path = data_of<int32_t>(op, "path", path);
  step.path_stride = path.stride(0);
  step.width = static_cast<int32_t>(path.size(1));

  size_t next = 0;
  for (size_t i = 0; i < states.size(); ++i) {
    const Tensor& state = states[i];
    const std::string name = "states[" + std::to_string(i) + "]";
    const bool is_recurrent = state.dim() == 4;
    if (!is_recurrent && state.dim() != 3)
      refuse(op, name, " must have shape [B or slots, H, dk, dv] or [B or slots, C, K - 1], got ", describe(state));
    const int64_t count = parts[i];
    if (count < 1 || static_cast<size_t>(count) > updates.size() - next)
      refuse(op, "parts must divide the ", updates.size(), " tensors of updates, got ", count, " at ", i);
    if (is_recurrent ? count != 3 && count != 4 : count != 1)
      refuse(op, "updates[", i, "] must be ", is_recurrent ? "k, u, log_decay and perhaps decay_rates" : "x",
             " for a state ", describe(state), ", got ", count, " tensors");
    check_same_device(op, name.c_str(), state, "states[0]", first);
    state_commit::check_not_expanded(name, state);
    if (i == 0) {
      if (updates[0].dim() == 0) refuse(op, "updates[0] must have shape [N, …], got ", describe(updates[0]));
      step.rows = updates[0].size(0);
    }
    step.state_index = check_state_index(op, state_index, name.c_str(), state.size(0), step.requests, state);
    problem.slots.push_back(state.size(0));
    if (is_recurrent)
      problem.recurrent.push_back(
          state_commit::recurrent_state(name, i, state, &updates[next], count, step.rows, problem));
    else
      problem.convolutions.push_back(
          state_commit::convolution_state(name, i, state, updates[next], step.rows, problem));
    next += static_cast<size_t>(count);
  }
  if (next != updates.size())
    refuse(op, "parts must divide the ", updates.size(), " tensors of updates, got ", next, " in all");
  state_commit::check_all_differ(problem);
  return problem;
}

}  // namespace pass_ext
