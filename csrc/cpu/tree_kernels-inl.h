// Trees and masks on the CPU, at one instruction set (see each_isa.h). The problems: core/tree.h.

template <typename T>
inline void fill(T* to, T value, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = value;
}

// 0 where a bit is set, else `hidden`; count <= 64.
template <typename T>
inline void expand_bits(T* to, uint64_t bits, int64_t count, T hidden) {
  const Floats seen = zeros(), unseen = constant(Floats{}, to_float(hidden));
  int64_t i = 0;
  for (; i + Floats::width <= count; i += Floats::width)
    store(to + i, select(mask_of_bits(static_cast<uint32_t>(bits >> i)), seen, unseen));
  for (; i < count; ++i) to[i] = bits >> i & 1 ? T{} : hidden;
}

// Rows [begin, end) of the mask.
template <typename T>
void mask_rows(const TreeMask<T>& problem, int64_t begin, int64_t end) {
  const T hidden = lowest_finite<T>();
  for (int64_t r = begin; r < end; ++r) {
    const MaskRow row = mask_row(problem, r);
    T* to = problem.out + r * problem.kv_len;
    if (row.prefix > 0) memset(static_cast<void*>(to), 0, row.prefix * sizeof(T));  // `to` is null without columns
    for (int64_t j = 0; j < row.nodes; j += 64)
      expand_bits(to + row.prefix + j, static_cast<uint64_t>(row.words[j / 64]),
                  row.nodes - j < 64 ? row.nodes - j : 64, hidden);
    fill(to + row.prefix + row.nodes, hidden, problem.kv_len - row.prefix - row.nodes);
  }
}
