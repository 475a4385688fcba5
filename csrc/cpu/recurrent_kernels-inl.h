// The recurrence over a tree on the CPU, at one instruction set (see each_isa.h): for a vector of value columns of one
// head all nodes, one after the other. The problem: core/recurrent.h. The columns of a state lie as [dk, vector].

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

// The decay of a node's state, at one vector of value columns.
template <Decay decay>
struct NodeDecay {
  Floats of_head;     // or, for elements, g of the columns
  const float* rows;  // a decay for each row, or the rates of the columns' elements
  int64_t columns;    // for elements: how many of the vector there are, and
  int64_t distance;   // from row to row of the rates

  Floats operator()(int64_t i, Floats state) const {
    switch (decay) {
      case Decay::head: return of_head * state;
      case Decay::channel: return constant(Floats{}, rows[i]) * state;
      case Decay::element: return decay_of(of_head * load_first(rows + i * distance, columns)) * state;
    }
    __builtin_unreachable();
  }
};

// A node, at one vector of value columns. Kernels take it by value: stores into a buffer cannot change it, so it stays
// in registers.
template <Decay decay>
struct Node {
  const float *k, *q;
  NodeDecay<decay> decayed;
  Floats beta, value;
};

// A vector of columns before a node: in a buffer, or in the states themselves.
struct Source {
  const float* data;
  int64_t distance;  // from row to row
};

// A sum over the rows of a state, in the order of core/recurrent-inl.h.
struct RowSum {
  Floats part[kSumParts];

  RowSum() {
    for (Floats& p : part) p = zeros();
  }
  Floats total() const { return sum_of_parts(part[0], part[1], part[2], part[3]); }
};

// function(i, i % 4) for all rows; in whole fours the second is a constant, and sums stay in registers.
template <typename Function>
inline void for_each_row(int64_t dk, Function&& function) {
  int64_t i = 0;
  for (; i + kSumParts <= dk; i += kSumParts)
    for (int j = 0; j < kSumParts; ++j) function(i + j, j);
  for (int j = 0; i + j < dk; ++j) function(i + j, j);
}

// Delta form: writes D S of a node and returns what it holds for the node's key. Of the state that is read next, a
// cache line is fetched with every row.
template <Decay decay>
inline Floats begin_node(const Node<decay> node, const Source from, float* to, int64_t dk, const float* ahead) {
  RowSum recalled;
  for_each_row(dk, [&](int64_t i, int j) {
    __builtin_prefetch(ahead + i * kStateColumns, 0, 2);
    const Floats state = node.decayed(i, load(from.data + i * from.distance));
    store(to + i * Floats::width, state);
    recalled.part[j] = fused(state, constant(Floats{}, node.k[i]), recalled.part[j]);
  });
  return recalled.total();
}

// What happens to a node's state: nobody continues it; the next node does, and overwrites it; or writes elsewhere.
enum class Continued { never, once, again };

// Delta form: adds u to D S in `state` and returns the node's output. If the next node continues it, this also begins
// that node: each element of a chain's states is read once and written once per node.
template <Decay decay, Continued continued>
inline Floats end_node(const Node<decay> node, Floats u, float* state, int64_t dk, const Node<decay> next,
                       float* next_state, Floats& next_recalled) {
  RowSum out, recalled;
  for_each_row(dk, [&](int64_t i, int j) {
    const Floats own = updated_state(load(state + i * Floats::width), constant(Floats{}, node.k[i]), u);
    out.part[j] = fused(own, constant(Floats{}, node.q[i]), out.part[j]);
    if (continued == Continued::never) return;
    if (continued == Continued::again) store(state + i * Floats::width, own);
    const Floats after = next.decayed(i, own);
    store(next_state + i * Floats::width, after);
    recalled.part[j] = fused(after, constant(Floats{}, next.k[i]), recalled.part[j]);
  });
  next_recalled = recalled.total();
  return out.total();
}

// Additive form: a node's output, from its parent's state.
template <Decay decay, bool is_continued>
inline Floats add_node(const Node<decay> node, Floats u, const Source from, float* to, int64_t dk, const float* ahead) {
  RowSum out;
  for_each_row(dk, [&](int64_t i, int j) {
    __builtin_prefetch(ahead + i * kStateColumns, 0, 2);
    const Floats decayed = node.decayed(i, load(from.data + i * from.distance));
    const Floats own = updated_state(decayed, constant(Floats{}, node.k[i]), u);
    if (is_continued) store(to + i * Floats::width, own);
    out.part[j] = fused(own, constant(Floats{}, node.q[i]), out.part[j]);
  });
  return out.total();
}

// Copies columns of the state into a buffer; columns beyond `columns` are 0.
inline void copy_columns(const float* from, const StateLayout& layout, int64_t columns, int64_t dk, float* to) {
  if (layout.column == 1) {
    for (int64_t i = 0; i < dk; ++i) store(to + i * Floats::width, load_first(from + i * layout.row, columns));
    return;
  }
  for (int64_t c = 0; c < Floats::width; ++c)
    for (int64_t i = 0; i < dk; ++i)
      to[i * Floats::width + c] = c < columns ? from[i * layout.row + c * layout.column] : 0.0f;
}

// All nodes of a request at one vector of value columns.
template <Decay decay, bool is_delta, typename T>
void walk_columns(const RecurrentTree<T>& problem, const WalkPlan& plan, int64_t head, int64_t column,
                  const float* prepared, float* buffers, const float* ahead) {
  const int64_t dk = problem.dk, dv = problem.dv, buffer_size = dk * Floats::width;
  const int64_t columns = dv - column < Floats::width ? dv - column : Floats::width;
  const StateLayout& layout = problem.layout;
  const float* const state = problem.states + layout.offset(plan.slot, head) + column * layout.column;
  const bool in_place = plan.has_one_root && layout.column == 1 && columns == Floats::width;
  if (!in_place) copy_columns(state, layout, columns, dk, buffers);

  const auto node_of = [&](const WalkStep& step) {
    const int64_t row = plan.first + step.node;
    const NodeRow given = node_row(prepared, step.node, dk);
    Node<decay> node{given.k, given.q, {}, constant(Floats{}, given.beta), zeros()};
    node.value = load_first(problem.v.at(row, head) + column, columns);
    if (decay == Decay::element) {
      const float* const log = problem.decay.of_row(row, head, problem.heads, dk, dv) + column;
      node.decayed = {load_first(log, columns), problem.decay.rates + head * dk * dv + column, columns, dv};
    } else {
      node.decayed = {constant(Floats{}, given.decay[0]), given.decay, columns, 1};
    }
    return node;
  };
  Node<decay> node = node_of(plan.steps[0]);
  Floats recalled = zeros();
  bool has_begun = false;
  for (int64_t n = 0; n < plan.nodes; ++n) {
    const WalkStep& step = plan.steps[n];
    const WalkStep& next_step = plan.steps[n + 1 < plan.nodes ? n + 1 : n];
    const Node<decay> next = node_of(next_step);
    const Source from =
        n == 0 && in_place ? Source{state, layout.row} : Source{buffers + step.from * buffer_size, Floats::width};
    float *const own = buffers + step.to * buffer_size, *const after = buffers + next_step.to * buffer_size;
    Floats u, out;
    if (is_delta) {
      if (!has_begun) recalled = begin_node(node, from, own, dk, ahead);
      u = update_of<true>(node.beta, node.value, recalled);
      has_begun = step.is_continued;
      if (!step.is_continued)
        out = end_node<decay, Continued::never>(node, u, own, dk, next, after, recalled);
      else if (next_step.to == step.to)
        out = end_node<decay, Continued::once>(node, u, own, dk, next, after, recalled);
      else
        out = end_node<decay, Continued::again>(node, u, own, dk, next, after, recalled);
    } else {
      u = update_of<false>(node.beta, node.value, zeros());
      out = step.is_continued ? add_node<decay, true>(node, u, from, own, dk, ahead)
                              : add_node<decay, false>(node, u, from, own, dk, ahead);
    }
    const int64_t at = ((plan.first + step.node) * problem.heads + head) * dv + column;
    store_first(problem.u + at, u, columns);
    store_first(problem.out + at, out, columns);
    node = next;
  }
}

// All nodes of a request, for the value columns [column, column + 16) of one head. ahead: 16 dk numbers of a state that
// is read soon.
template <typename T>
void walk_slice(const RecurrentTree<T>& problem, const WalkPlan& plan, int64_t head, int64_t column,
                const float* prepared, float* buffers, const float* ahead) {
  const auto walk = [&](auto form) {
    constexpr bool is_delta = decltype(form)::value;
    for (int64_t c = column; c < column + kStateColumns && c < problem.dv; c += Floats::width)
      switch (problem.decay.kind) {
        case Decay::head: walk_columns<Decay::head, is_delta>(problem, plan, head, c, prepared, buffers, ahead); break;
        case Decay::channel:
          walk_columns<Decay::channel, is_delta>(problem, plan, head, c, prepared, buffers, ahead);
          break;
        case Decay::element:
          walk_columns<Decay::element, is_delta>(problem, plan, head, c, prepared, buffers, ahead);
          break;
      }
  };
  if (problem.form == RecurrentForm::delta)
    walk(std::true_type{});
  else
    walk(std::false_type{});
}
