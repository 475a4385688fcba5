// 16 neighbouring numbers as vectors, for the kernels of layers with a state. The text belongs inside a level's
// namespace (cpu/each_isa.h).

constexpr int kStateVectors = static_cast<int>(kStateColumns) / Floats::width;

// A row of a slice, or a row of 16 values.
struct SliceRow {
  Floats part[kStateVectors];
};

template <typename T>
inline SliceRow load_row(const T* from, int64_t count = kStateColumns) {
  SliceRow row;
  for (int p = 0; p < kStateVectors; ++p) {
    const int64_t left = count - p * Floats::width;
    row.part[p] = left > 0 ? load_first(from + p * Floats::width, left) : zeros();
  }
  return row;
}
template <typename T>
inline void store_row(T* to, const SliceRow& row, int64_t count = kStateColumns) {
  for (int p = 0; p < kStateVectors; ++p) {
    const int64_t left = count - p * Floats::width;
    if (left > 0) store_first(to + p * Floats::width, row.part[p], left);
  }
}
