// Committing a path to recurrent states on the CPU, at one instruction set (see each_isa.h). Each element is read once,
// updated by every node of the path in order, and written once. The problem: core/state.h.

#include "cpu/slice-inl.h"

template <typename T>
inline Floats load_strided(const T* from, int64_t distance, int64_t count) {
  if (distance == 1) return load_first(from, count);
  T lanes[Floats::width] = {};
  for (int64_t i = 0; i < count && i < Floats::width; ++i) lanes[i] = from[i * distance];
  return load(lanes);
}

inline void store_strided(float* to, Floats value, int64_t distance, int64_t count) {
  if (distance == 1) return store_first(to, value, count);
  float lanes[Floats::width];
  store(lanes, value);
  for (int64_t i = 0; i < count && i < Floats::width; ++i) to[i * distance] = lanes[i];
}

// Each node of the path: k in fp32, and one decay or dk.
template <typename T>
void prepare_path(const RecurrentState& state, const T* keys, int64_t head, const int64_t* rows, int64_t count,
                  float* prepared) {
  const int64_t dk = state.dk, key_head = head / (state.heads / state.key_heads);
  for (int64_t n = 0; n < count; ++n) {
    const T* k = keys + rows[n] * state.key_row + key_head * state.key_head;
    const float* log = state.decay.of_row(rows[n], head, state.heads, dk, state.dv);
    float* const to = prepared + n * 2 * dk;
    for (int64_t i = 0; i < dk; i += Floats::width) {
      store_first(to + i, load_first(k + i, dk - i), dk - i);
      if (state.decay.kind == Decay::channel) store_first(to + dk + i, decay_of(load_first(log + i, dk - i)), dk - i);
    }
    if (state.decay.kind == Decay::head) to[dk] = decay_of(log[0]);
  }
}

// Rows [begin, end) of one head's state. by_rows: neighbours of a vector are rows of the state, else value columns;
// whichever lie side by side in memory.
template <Decay decay, bool by_rows>
inline void replay_as(const RecurrentState& state, int64_t slot, int64_t head, const int64_t* rows, int64_t count,
                      const float* prepared, int64_t begin, int64_t end) {
  const int64_t dk = state.dk, dv = state.dv;
  float* const data = state.data + state.layout.offset(slot, head);
  const float* const rates = decay == Decay::element ? state.decay.rates + head * dk * dv : nullptr;
  const int64_t distance = by_rows ? state.layout.row : state.layout.column;
  const auto replay = [&](int64_t i, int64_t c, int64_t left) {
    float* const at = data + i * state.layout.row + c * state.layout.column;
    Floats value = load_strided(at, distance, left), rate = zeros();
    if (decay == Decay::element) rate = load_strided(rates + i * dv + c, by_rows ? dv : 1, left);
    for (int64_t n = 0; n < count; ++n) {
      const float *k = prepared + n * 2 * dk, *decays = k + dk;
      const float* const u = state.u + (rows[n] * state.heads + head) * dv;
      Floats factor;
      if (decay == Decay::element) {
        const float* log = state.decay.of_row(rows[n], head, state.heads, dk, dv);
        factor = decay_of((by_rows ? constant(Floats{}, log[c]) : load_first(log + c, left)) * rate);
      } else if (decay == Decay::channel) {
        factor = by_rows ? load_first(decays + i, left) : constant(Floats{}, decays[i]);
      } else {
        factor = constant(Floats{}, decays[0]);
      }
      const Floats key = by_rows ? load_first(k + i, left) : constant(Floats{}, k[i]);
      value = updated_state(factor * value, key, by_rows ? constant(Floats{}, u[c]) : load_first(u + c, left));
    }
    store_strided(at, value, distance, left);
  };
  if (by_rows)
    for (int64_t c = 0; c < dv; ++c)
      for (int64_t i = begin; i < end; i += Floats::width) replay(i, c, end - i);
  else
    for (int64_t i = begin; i < end; ++i)
      for (int64_t c = 0; c < dv; c += Floats::width) replay(i, c, dv - c);
}

inline void replay_path(const RecurrentState& state, int64_t slot, int64_t head, const int64_t* rows, int64_t count,
                        const float* prepared, int64_t begin, int64_t end) {
  const auto replay = [&](auto order) {
    constexpr bool by_rows = decltype(order)::value;
    switch (state.decay.kind) {
      case Decay::head: return replay_as<Decay::head, by_rows>(state, slot, head, rows, count, prepared, begin, end);
      case Decay::channel:
        return replay_as<Decay::channel, by_rows>(state, slot, head, rows, count, prepared, begin, end);
      case Decay::element:
        return replay_as<Decay::element, by_rows>(state, slot, head, rows, count, prepared, begin, end);
    }
  };
  if (state.layout.row == 1 && state.layout.column != 1)
    replay(std::true_type{});
  else
    replay(std::false_type{});
}
