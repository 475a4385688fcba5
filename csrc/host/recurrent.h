// Checks recurrent_tree's arguments, the same on every device, and packs them into the struct of core/recurrent.h. The
// checks of states and their index serve convolution_tree and state_commit_ too.
#pragma once

#include <tuple>
#include <vector>

#include "core/recurrent.h"
#include "core/tree.h"
#include "host/dispatch.h"
#include "host/packed.h"

namespace pass_ext {

// state_index [B], or null without one: then there must be a state for each request.
inline const int32_t* check_state_index(const char* op, const OptionalTensor& state_index, const char* states_name,
                                        int64_t slots, int64_t requests, const Tensor& states) {
  if (state_index) {
    const int32_t* index = check_integers(op, "state_index", *state_index, states_name, states);
    check_size(op, "state_index", *state_index, 0, requests, "the requests of cu_nodes");
    return index;
  }
  if (slots != requests)
    refuse(op, states_name, " must have ", requests, " (the requests of cu_nodes; no state_index was given) in ",
           "dimension 0, got ", describe(states));
  return nullptr;
}

// Refuses, on the CPU, a slot that is not there; `index` is null without one.
inline void check_slots(const char* op, const int32_t* cu_nodes, int64_t requests, const int32_t* index,
                        int64_t slots) {
  for (int64_t b = 0; index && b < requests; ++b)
    if (cu_nodes[b] < cu_nodes[b + 1] && (index[b] < 0 || index[b] >= slots))
      refuse(op, "state_index must be in [0, ", slots, ") (the slots of the states), got ", index[b], " at ", b);
}

// Refuses, on the CPU, bounds that do not divide the rows, requests with too many nodes, and parents that are no tree.
inline void check_forest(const char* op, const int32_t* parents, const int32_t* cu_nodes, int64_t requests,
                         int64_t rows) {
  check_bounds(op, cu_nodes, requests, rows, rows);
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t first = cu_nodes[b], nodes = cu_nodes[b + 1] - first;
    if (nodes > kMaxTreeNodes)
      refuse(op, "cu_nodes must give a request at most ", kMaxTreeNodes, " nodes, got ", nodes, " for request ", b);
    for (int64_t i = 0; i < nodes; ++i)
      if (parents[first + i] < -1 || parents[first + i] >= i)
        refuse(op, "parents must be -1 or an earlier node of the same request, got ", parents[first + i],
               " at flat index ", first + i, ", node ", i, " of request ", b);
  }
}

// The tensor, or a contiguous copy if its heads are not contiguous.
inline Tensor contiguous_heads_of(const char* op, const char* argument, const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return x.size(last) > 1 && x.stride(last) != 1 ? contiguous_of(op, argument, x) : x;
}

inline const int32_t* check_parents(const char* op, const Tensor& parents, int64_t rows, const char* other_argument,
                                    const Tensor& other) {
  const int32_t* data = check_integers(op, "parents", parents, other_argument, other);
  check_size(op, "parents", parents, 0, rows, "the packed nodes");
  return data;
}

// Refuses decays that do not fit heads, dk and dv; returns what they belong to.
inline Decay check_decay(const char* op, const char* log_name, const Tensor& log_decay, const char* rates_name,
                         const Tensor* rates, int64_t rows, int64_t heads, int64_t dk, int64_t dv,
                         const char* other_argument, const Tensor& other) {
  check_dtype(op, log_name, log_decay, {ScalarType::Float});
  if (log_decay.dim() != 3 && (rates || log_decay.dim() != 2))
    refuse(op, log_name, " must have shape ", rates ? "[N, H, dv] beside decay_rates" : "[N, H] or [N, H, dk]",
           ", got ", describe(log_decay));
  check_size(op, log_name, log_decay, 0, rows, "the packed nodes");
  check_size(op, log_name, log_decay, 1, heads, "the heads of v");
  check_same_device(op, log_name, log_decay, other_argument, other);
  if (!rates) {
    if (log_decay.dim() == 3) check_size(op, log_name, log_decay, 2, dk, "dk, the width of k");
    return log_decay.dim() == 2 ? Decay::head : Decay::channel;
  }
  check_size(op, log_name, log_decay, 2, dv, "dv, the width of v");
  check_dtype(op, rates_name, *rates, {ScalarType::Float});
  check_dim(op, rates_name, *rates, 3, "[H, dk, dv]");
  check_size(op, rates_name, *rates, 0, heads, "the heads of v");
  check_size(op, rates_name, *rates, 1, dk, "dk, the width of k");
  check_size(op, rates_name, *rates, 2, dv, "dv, the width of v");
  check_same_device(op, rates_name, *rates, other_argument, other);
  return Decay::element;
}

inline void check_key_heads(const char* op, const char* argument, const Tensor& k, int64_t heads) {
  const int64_t key_heads = k.size(1), dk = k.size(2);
  if (dk < 1 || dk > kMostKeyChannels)
    refuse(op, argument, " must have 1 to ", kMostKeyChannels, " (dk) in dimension 2, got ", describe(k));
  if (heads > 0 && (key_heads < 1 || heads % key_heads != 0))
    refuse(op, argument, " must have a number of heads that divides ", heads, " (the heads of v), got ", describe(k));
}

inline StateLayout layout_of_states(const Tensor& states) {
  return {states.size(0), states.stride(0), states.stride(1), states.stride(2), states.stride(3)};
}

// The op with its torch signature; `Run` has a static run(problem, like) for the problem of each type.
template <typename Run>
std::tuple<Tensor, Tensor> recurrent_tree(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay,
                                          const OptionalTensor& decay_rates, const OptionalTensor& beta,
                                          const Tensor& states, const OptionalTensor& state_index,
                                          const Tensor& parents, const Tensor& cu_nodes, int64_t form, double scale) {
  constexpr const char* op = "recurrent_tree";
  check_dtype(op, "v", v, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  check_dim(op, "v", v, 3, "[N, H, dv]");
  const int64_t rows = v.size(0), heads = v.size(1), dv = v.size(2);
  check_dtype(op, "k", k, {v.scalar_type()});
  check_dim(op, "k", k, 3, "[N, Hk, dk]");
  check_size(op, "k", k, 0, rows, "the packed nodes of v");
  check_same_device(op, "k", k, "v", v);
  check_key_heads(op, "k", k, heads);
  const int64_t key_heads = k.size(1), dk = k.size(2);
  check_dtype(op, "q", q, {v.scalar_type()});
  check_dim(op, "q", q, 3, "[N, Hk, dk]");
  check_size(op, "q", q, 0, rows, "the packed nodes of v");
  check_size(op, "q", q, 1, key_heads, "the heads of k");
  check_size(op, "q", q, 2, dk, "dk, the width of k");
  check_same_device(op, "q", q, "v", v);
  const Decay kind = check_decay(op, "log_decay", log_decay, "decay_rates", decay_rates ? &*decay_rates : nullptr, rows,
                                 heads, dk, dv, "v", v);
  if (beta) {
    check_dtype(op, "beta", *beta, {ScalarType::Float});
    check_dim(op, "beta", *beta, 2, "[N, H]");
    check_size(op, "beta", *beta, 0, rows, "the packed nodes of v");
    check_size(op, "beta", *beta, 1, heads, "the heads of v");
    check_same_device(op, "beta", *beta, "v", v);
  }
  check_dtype(op, "states", states, {ScalarType::Float});
  check_dim(op, "states", states, 4, "[B or slots, H, dk, dv]");
  check_size(op, "states", states, 1, heads, "the heads of v");
  check_size(op, "states", states, 2, dk, "dk, the width of k");
  check_size(op, "states", states, 3, dv, "dv, the width of v");
  check_same_device(op, "states", states, "v", v);
  const Bounds bounds = check_cu_nodes(op, cu_nodes, "v", v);
  const int32_t* index = check_state_index(op, state_index, "states", states.size(0), bounds.requests, states);
  const int32_t* tree = check_parents(op, parents, rows, "v", v);
  if (form < 0 || form >= kRecurrentForms) refuse(op, "form must be in [0, ", kRecurrentForms, "), got ", form);

  const Tensor queries = contiguous_heads_of(op, "q", q), keys = contiguous_heads_of(op, "k", k);
  const Tensor values = contiguous_heads_of(op, "v", v), logs = contiguous_of(op, "log_decay", log_decay);
  const OptionalTensor rates =
      decay_rates ? OptionalTensor(contiguous_of(op, "decay_rates", *decay_rates)) : decay_rates;
  const OptionalTensor betas = beta ? OptionalTensor(contiguous_of(op, "beta", *beta)) : beta;
  const Tensor out = empty_of_shape(op, v, {rows, heads, dv});
  const Tensor u = empty_of_shape(op, v, {rows, heads, dv}, ScalarType::Float);
  dispatch_up_to_float32(v.scalar_type(), [&](auto value) {
    using T = type_of<decltype(value)>;
    const auto heads_of = [&](const char* argument, const Tensor& x) {
      return HeadRows<T>{data_of<T>(op, argument, x), x.stride(0), x.stride(1)};
    };
    RecurrentTree<T> problem{};
    problem.q = heads_of("q", queries);
    problem.k = heads_of("k", keys);
    problem.v = heads_of("v", values);
    problem.decay = {data_of<float>(op, "log_decay", logs), rates ? data_of<float>(op, "decay_rates", *rates) : nullptr,
                     kind};
    problem.beta = betas ? data_of<float>(op, "beta", *betas) : nullptr;
    problem.states = data_of<float>(op, "states", states);
    problem.layout = layout_of_states(states);
    problem.state_index = index;
    problem.parents = tree;
    problem.cu_nodes = bounds.cu_nodes;
    problem.out = output_of<T>(out);
    problem.u = output_of<float>(u);
    problem.rows = rows;
    problem.requests = bounds.requests;
    problem.heads = heads;
    problem.key_heads = key_heads;
    problem.dk = dk;
    problem.dv = dv;
    problem.scale = static_cast<float>(scale);
    problem.form = static_cast<RecurrentForm>(form);
    Run::run(problem, v);
  });
  return {out, u};
}

}  // namespace pass_ext
