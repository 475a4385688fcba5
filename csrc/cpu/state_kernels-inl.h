// Committing a path to recurrent states on the CPU, at one instruction set (see each_isa.h). Each element is read once,
// updated by every node of the path in order, and written once. The problem: core/state.h.

constexpr int kVectors = 8;   // of a state, which are updated together
constexpr int kAhead = 1024;  // numbers between an update and the line that it fetches: while nodes are computed

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

// The nodes of a path, at one head.
struct HeadPath {
  const int64_t* rows;
  int64_t count;
  const float* prepared;
};

// Neighbouring vectors of neighbouring lines of a head's state: read, updated by every node, written. by_rows: a line
// is a value column and its vectors are rows of the state; else the reverse, whichever lie side by side in memory. They
// begin `along` the lines, of which `left` numbers are left. is_whole: they do lie so, and are whole vectors.
template <Decay decay, bool by_rows, bool is_whole, int lines, int vectors>
inline void replay_vectors(const RecurrentState& state, const HeadPath path, int64_t head, float* at, int64_t line,
                           int64_t along, int64_t left) {
  constexpr int width = Floats::width;
  const int64_t dk = state.dk, dv = state.dv;
  const int64_t distance = by_rows ? state.layout.row : state.layout.column;
  const int64_t line_distance = by_rows ? state.layout.column : state.layout.row;
  const auto load_part = [&](const float* from, int j) {
    return is_whole ? load(from + j * width) : load_first(from + j * width, left);
  };
  Floats value[lines][vectors], rate[lines][vectors];
  for (int l = 0; l < lines; ++l)
    for (int j = 0; j < vectors; ++j) {
      float* const from = at + l * line_distance + j * width;
      __builtin_prefetch(from + kAhead, 0, 2);
      value[l][j] = is_whole ? load(from) : load_strided(from, distance, left);
      if (decay != Decay::element) continue;
      const int64_t i = along + j * width;
      rate[l][j] =
          load_strided(state.decay.rates + head * dk * dv + (by_rows ? i * dv + line + l : (line + l) * dv + i),
                       by_rows ? dv : 1, left);
    }
  for (int64_t n = 0; n < path.count; ++n) {
    const float *k = path.prepared + n * 2 * dk, *decays = k + dk;
    const float* const u = state.u + (path.rows[n] * state.heads + head) * dv;
    const float* log = decay == Decay::element ? state.decay.of_row(path.rows[n], head, state.heads, dk, dv) : nullptr;
    for (int l = 0; l < lines; ++l) {
      const Floats of_line = constant(Floats{}, (by_rows ? u : k)[line + l]);
      Floats shared = zeros();  // what the factors of a line have in common
      if (decay == Decay::head) shared = constant(Floats{}, decays[0]);
      if (decay == Decay::channel && !by_rows) shared = constant(Floats{}, decays[line + l]);
      if (decay == Decay::element && by_rows) shared = constant(Floats{}, log[line + l]);
      for (int j = 0; j < vectors; ++j) {
        Floats factor = shared;
        if (decay == Decay::channel && by_rows) factor = load_part(decays + along, j);
        if (decay == Decay::element) factor = decay_of((by_rows ? shared : load_part(log + along, j)) * rate[l][j]);
        value[l][j] = updated_state(factor * value[l][j], of_line, load_part((by_rows ? k : u) + along, j));
      }
    }
  }
  for (int l = 0; l < lines; ++l)
    for (int j = 0; j < vectors; ++j) {
      float* const to = at + l * line_distance + j * width;
      if (is_whole)
        store(to, value[l][j]);
      else
        store_strided(to, value[l][j], distance, left);
    }
}

// In memory's order, if the lines lie side by side: a long one after the other, or two short ones together.
template <Decay decay, bool by_rows, int together>
inline void replay_as(const RecurrentState& state, int64_t slot, int64_t head, const HeadPath path) {
  constexpr int vectors = kVectors / together;
  constexpr int64_t block = vectors * Floats::width;
  const StateLayout& layout = state.layout;
  const int64_t lines = by_rows ? state.dv : state.dk, length = by_rows ? state.dk : state.dv;
  const int64_t line_distance = by_rows ? layout.column : layout.row, distance = by_rows ? layout.row : layout.column;
  const int64_t blocks = distance == 1 ? length / block * block : 0;
  for (int64_t line = 0; line < lines; line += together) {
    float* const at = state.data + layout.offset(slot, head) + line * line_distance;
    const bool has_all_lines = line + together <= lines;
    for (int64_t i = has_all_lines ? 0 : blocks; i < blocks; i += block)
      replay_vectors<decay, by_rows, true, together, vectors>(state, path, head, at + i, line, i, block);
    for (int64_t l = line; l < line + together && l < lines; ++l)
      for (int64_t i = has_all_lines ? blocks : 0; i < length; i += Floats::width)
        replay_vectors<decay, by_rows, false, 1, 1>(state, path, head, at + (l - line) * line_distance + i * distance,
                                                    l, i, length - i);
  }
}

inline void replay_path(const RecurrentState& state, int64_t slot, int64_t head, const int64_t* rows, int64_t count,
                        const float* prepared) {
  const HeadPath path{rows, count, prepared};
  const auto replay_lines = [&](auto order, auto lines) {
    constexpr bool by_rows = decltype(order)::value;
    constexpr int together = decltype(lines)::value;
    switch (state.decay.kind) {
      case Decay::head: return replay_as<Decay::head, by_rows, together>(state, slot, head, path);
      case Decay::channel: return replay_as<Decay::channel, by_rows, together>(state, slot, head, path);
      case Decay::element: return replay_as<Decay::element, by_rows, together>(state, slot, head, path);
    }
  };
  const auto replay = [&](auto order) {
    if ((decltype(order)::value ? state.dk : state.dv) % (kVectors * Floats::width) == 0)
      replay_lines(order, std::integral_constant<int, 1>{});
    else
      replay_lines(order, std::integral_constant<int, 2>{});
  };
  if (state.layout.row == 1 && state.layout.column != 1)
    replay(std::true_type{});
  else
    replay(std::false_type{});
}
