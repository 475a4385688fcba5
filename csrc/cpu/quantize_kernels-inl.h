// Rows of numbers as rows in 8 bits on the CPU, at one instruction set (see each_isa.h): core/quantize.h.

// A row as codes of one type, behind their header.
template <CodeType type, typename T>
void quantize_row(const T* row, uint8_t* to, int64_t dim) {
  const float most = most_of_codes(type);
  uint32_t highest = 0;  // of sizes as bits
  for (int64_t d = 0; d < dim; ++d) {
    const uint32_t size = bits_of(to_float(row[d])) & 0x7fffffffu;
    highest = size > highest ? size : highest;
  }
  const float scale = scale_for(highest, most);
  memset(to, 0, kCodeHeader);
  memcpy(to, &scale, sizeof scale);
  uint8_t* const codes = to + kCodeHeader;
  constexpr int64_t kAtOnce = 128;
  const Floats whole = constant(Floats{}, scale);
  float numbers[kAtOnce];
  for (int64_t begin = 0; begin < dim; begin += kAtOnce) {
    const int64_t count = dim - begin < kAtOnce ? dim - begin : kAtOnce;
    int64_t d = 0;
    for (; d + Floats::width <= count; d += Floats::width) store(numbers + d, load(row + begin + d) / whole);
    for (; d < count; ++d) numbers[d] = to_float(row[begin + d]) / scale;
    for (d = 0; d < count; ++d) codes[begin + d] = code_of(type, numbers[d], most);
  }
}

template <typename T>
void quantize_rows(const QuantizeRows<T>& problem, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* const from = problem.from[row];
    uint8_t* const to = problem.to + row * (kCodeHeader + problem.dim);
    if (problem.codes == CodeType::int8)
      quantize_row<CodeType::int8>(from, to, problem.dim);
    else if (problem.codes == CodeType::float8_e4m3)
      quantize_row<CodeType::float8_e4m3>(from, to, problem.dim);
    else
      quantize_row<CodeType::float8_e5m2>(from, to, problem.dim);
  }
}
