// The recurrence over a tree on the CPU, at one instruction set (see each_isa.h): for a slice of 16 value columns of
// one head all nodes, one after the other. The problem: core/recurrent.h. A slice of the state lies as [dk, 16].

#include "cpu/slice-inl.h"

inline NodeRow node_row(const float* prepared, int64_t node, int64_t dk) {
  const float* at = prepared + node * node_row_size(dk);
  return {at, at + dk, at + 2 * dk, at[3 * dk]};
}

// k, q, decay and beta of a request's nodes for one head, in fp32.
template <typename T>
void prepare_nodes(const RecurrentTree<T>& problem, const WalkPlan& plan, int64_t head, float* prepared) {
  const int64_t dk = problem.dk, key_head = problem.key_head(head);
  for (int64_t n = 0; n < plan.nodes; ++n) {
    const int64_t row = plan.first + n;
    const T *k = problem.k.at(row, key_head), *q = problem.q.at(row, key_head);
    const float* log = problem.decay.of_row(row, head, problem.heads, dk, problem.dv);
    float* const to = prepared + n * node_row_size(dk);
    const Floats scale = constant(Floats{}, problem.scale);
    const bool of_channels = problem.decay.kind == Decay::channel;
    for (int64_t i = 0; i < dk; i += Floats::width) {
      store_first(to + i, load_first(k + i, dk - i), dk - i);
      store_first(to + dk + i, load_first(q + i, dk - i) * scale, dk - i);
      if (of_channels) store_first(to + 2 * dk + i, decay_of(load_first(log + i, dk - i)), dk - i);
    }
    if (!of_channels) to[2 * dk] = problem.decay.kind == Decay::head ? decay_of(log[0]) : 1.0f;
    to[3 * dk] = problem.beta ? problem.beta[row * problem.heads + head] : 1.0f;
  }
}

// The rows of a slice before a node: in a buffer, or in the states themselves.
struct SliceSource {
  const float* data;
  int64_t distance;
};

// A slice of elements' decays e^(g rate): g of its columns, the rates of its rows.
struct ElementDecay {
  SliceRow log;
  const float* rates;
  int64_t distance, columns;
};

// One node. Each element of the state is read once, and written once or, in the delta form, twice.
template <Decay decay, bool is_delta>
inline void walk_node(const NodeRow& node, const ElementDecay& elements, SliceSource from, float* to, int64_t dk,
                      const SliceRow& value, SliceRow& u, SliceRow& out) {
  SliceRow sum[kSumParts];
  const Floats of_head = constant(Floats{}, node.decay[0]), beta = constant(Floats{}, node.beta);
  const auto decayed = [&](int64_t i) {
    SliceRow state, rate;
    for (int p = 0; p < kStateVectors; ++p) state.part[p] = load(from.data + i * from.distance + p * Floats::width);
    if (decay == Decay::element) rate = load_row(elements.rates + i * elements.distance, elements.columns);
    const Floats one = decay == Decay::channel ? constant(Floats{}, node.decay[i]) : of_head;
    for (int p = 0; p < kStateVectors; ++p)
      state.part[p] = (decay == Decay::element ? decay_of(elements.log.part[p] * rate.part[p]) : one) * state.part[p];
    return state;
  };
  const auto clear_sums = [&] {
    for (int j = 0; j < kSumParts; ++j)
      for (int p = 0; p < kStateVectors; ++p) sum[j].part[p] = zeros();
  };
  const auto add = [&](SliceRow& part, const SliceRow& state, float factor) {
    const Floats f = constant(Floats{}, factor);
    for (int p = 0; p < kStateVectors; ++p) part.part[p] = fused(state.part[p], f, part.part[p]);
  };
  // function(i, part of the sum) for all rows, four at a time
  const auto for_each_row = [&](auto function) {
    int64_t i = 0;
    for (; i + kSumParts <= dk; i += kSumParts)
      for (int j = 0; j < kSumParts; ++j) function(i + j, sum[j]);
    for (int j = 0; i + j < dk; ++j) function(i + j, sum[j]);
  };
  const auto total = [&](int p) {
    return sum_of_parts(sum[0].part[p], sum[1].part[p], sum[2].part[p], sum[3].part[p]);
  };

  clear_sums();
  if (is_delta)
    for_each_row([&](int64_t i, SliceRow& part) {
      const SliceRow state = decayed(i);
      for (int p = 0; p < kStateVectors; ++p) store(to + i * kStateColumns + p * Floats::width, state.part[p]);
      add(part, state, node.k[i]);
    });
  for (int p = 0; p < kStateVectors; ++p) u.part[p] = update_of<is_delta>(beta, value.part[p], total(p));
  clear_sums();
  for_each_row([&](int64_t i, SliceRow& part) {
    SliceRow state;
    if (is_delta)
      for (int p = 0; p < kStateVectors; ++p) state.part[p] = load(to + i * kStateColumns + p * Floats::width);
    else
      state = decayed(i);
    const Floats key = constant(Floats{}, node.k[i]);
    for (int p = 0; p < kStateVectors; ++p) {
      state.part[p] = updated_state(state.part[p], key, u.part[p]);
      store(to + i * kStateColumns + p * Floats::width, state.part[p]);
    }
    add(part, state, node.q[i]);
  });
  for (int p = 0; p < kStateVectors; ++p) out.part[p] = total(p);
}

// Copies a slice of the state into a buffer; columns beyond `columns` are 0.
inline void copy_slice(const float* from, const StateLayout& layout, int64_t columns, int64_t dk, float* to) {
  if (layout.column == 1) {
    for (int64_t i = 0; i < dk; ++i) store_row(to + i * kStateColumns, load_row(from + i * layout.row, columns));
    return;
  }
  for (int64_t c = 0; c < kStateColumns; ++c)
    for (int64_t i = 0; i < dk; ++i)
      to[i * kStateColumns + c] = c < columns ? from[i * layout.row + c * layout.column] : 0.0f;
}

template <Decay decay, bool is_delta, typename T>
void walk_slice_as(const RecurrentTree<T>& problem, const WalkPlan& plan, int64_t head, int64_t column,
                   const float* prepared, float* buffers) {
  const int64_t dk = problem.dk, dv = problem.dv, buffer_size = dk * kStateColumns;
  const int64_t columns = dv - column < kStateColumns ? dv - column : kStateColumns;
  const StateLayout& layout = problem.layout;
  const float* const state = problem.states + layout.offset(plan.slot, head) + column * layout.column;
  const bool in_place = plan.has_one_root && layout.column == 1 && columns == kStateColumns;
  if (!in_place) copy_slice(state, layout, columns, dk, buffers);
  for (int64_t n = 0; n < plan.nodes; ++n) {
    const WalkStep& step = plan.steps[n];
    const int64_t row = plan.first + step.node, at = (row * problem.heads + head) * dv + column;
    const SliceSource from = n == 0 && in_place ? SliceSource{state, layout.row}
                                                : SliceSource{buffers + step.from * buffer_size, kStateColumns};
    ElementDecay elements{};
    if (decay == Decay::element) {
      elements.log = load_row(problem.decay.of_row(row, head, problem.heads, dk, dv) + column, columns);
      elements.rates = problem.decay.rates + head * dk * dv + column;
      elements.distance = dv;
      elements.columns = columns;
    }
    const SliceRow value = load_row(problem.v.at(row, head) + column, columns);
    SliceRow u, out;
    walk_node<decay, is_delta>(node_row(prepared, step.node, dk), elements, from, buffers + step.to * buffer_size, dk,
                               value, u, out);
    store_row(problem.u + at, u, columns);
    store_row(problem.out + at, out, columns);
  }
}

// All nodes of a request, for the value columns [column, column + 16) of one head.
template <typename T>
void walk_slice(const RecurrentTree<T>& problem, const WalkPlan& plan, int64_t head, int64_t column,
                const float* prepared, float* buffers) {
  const auto walk = [&](auto form) {
    constexpr bool is_delta = decltype(form)::value;
    switch (problem.decay.kind) {
      case Decay::head: return walk_slice_as<Decay::head, is_delta>(problem, plan, head, column, prepared, buffers);
      case Decay::channel:
        return walk_slice_as<Decay::channel, is_delta>(problem, plan, head, column, prepared, buffers);
      case Decay::element:
        return walk_slice_as<Decay::element, is_delta>(problem, plan, head, column, prepared, buffers);
    }
  };
  if (problem.form == RecurrentForm::delta)
    walk(std::true_type{});
  else
    walk(std::false_type{});
}
