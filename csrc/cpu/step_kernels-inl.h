// Norm, rotary embedding and gate on the CPU, at one instruction set (see each_isa.h). The problems and the order of
// sums: core/step.h; the formulas: core/step-inl.h.

// ---- norm ----

template <typename T>
void add_rows(T* sum, const T* a, const T* b, int64_t dim) {
  for (int64_t i = 0; i < dim; i += Floats::width)
    store_first(sum + i, load_first(a + i, dim - i) + load_first(b + i, dim - i), dim - i);
}

// In the order that core/step.h defines. Partial sums without a number are 0, and adding them would change nothing.
template <typename T>
float sum_of_squares(const T* x, int64_t dim) {
  alignas(64) float partial[kPartialSums];
  const int64_t padded = (dim + Floats::width - 1) / Floats::width * Floats::width;
  const int64_t used = padded < kPartialSums ? padded : kPartialSums;
  for (int64_t i = 0; i < dim; i += Floats::width) {
    const Floats value = load_first(x + i, dim - i);
    float* const place = partial + i % kPartialSums;
    store(place, fused(value, value, i < kPartialSums ? zeros() : load(place)));
  }
  for (int64_t half = kPartialSums / 2; half >= Floats::width; half /= 2)
    for (int64_t j = 0; j < half && j + half < used; j += Floats::width)
      store(partial + j, load(partial + j) + load(partial + j + half));
  return sum_lanes(load(partial));
}

template <NormForm form, typename T>
void multiply_row(T* out, const T* x, Floats inverse, const T* weight, int64_t dim) {
  for (int64_t i = 0; i < dim; i += Floats::width) {
    const Floats normal = load_first(x + i, dim - i) * inverse;
    store_first(out + i, weighted<T, form>(normal, load_first(weight + i, dim - i)), dim - i);
  }
}

template <typename T>
void norm_rows(const StepNorm<T>& problem, int64_t begin, int64_t end) {
  const int64_t dim = problem.dim;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = problem.x[row];
    if (problem.sum) {
      T* const sum = problem.sum + row * dim;
      add_rows(sum, x, problem.residual[row], dim);
      x = sum;
    }
    const Floats inverse = constant(Floats{}, inverse_rms(sum_of_squares(x, dim), dim, problem.eps));
    T* const out = problem.out + row * dim;
    switch (problem.form) {
      case NormForm::llama: multiply_row<NormForm::llama>(out, x, inverse, problem.weight, dim); break;
      case NormForm::olmo2: multiply_row<NormForm::olmo2>(out, x, inverse, problem.weight, dim); break;
      case NormForm::gemma: multiply_row<NormForm::gemma>(out, x, inverse, problem.weight, dim); break;
    }
  }
}

// ---- rotary embedding ----

template <typename T, typename S>
void rotate_head(T* out, const T* head, const S* cos, const S* sin, int64_t rotated, int64_t dim) {
  constexpr bool in_fp32 = sizeof(S) == sizeof(float);
  const int64_t half = rotated / 2;
  for (int64_t i = 0; i < half; i += Floats::width) {
    const int64_t j = i + half, count = half - i;
    const Floats first = load_first(head + i, count), second = load_first(head + j, count);
    store_first(out + i,
                rotated_first<T, in_fp32>(first, second, load_first(cos + i, count), load_first(sin + i, count)),
                count);
    store_first(out + j,
                rotated_second<T, in_fp32>(first, second, load_first(cos + j, count), load_first(sin + j, count)),
                count);
  }
  if (dim > rotated) memcpy(out + rotated, head + rotated, (dim - rotated) * sizeof(T));
}

template <typename T, typename S>
void rotate_rows(const StepRotary<T, S>& problem, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const S *cos = problem.cos + row * problem.cos_distance, *sin = problem.sin + row * problem.sin_distance;
    for (const RotaryHeads<T>* heads : {&problem.q, &problem.k})
      for (int64_t head = 0; head < heads->heads; ++head)
        rotate_head(heads->out + (row * heads->heads + head) * problem.dim,
                    heads->data + row * heads->row_distance + head * heads->head_distance, cos, sin, problem.rotated,
                    problem.dim);
  }
}

// ---- gate ----

template <Activation activation, typename T>
void gate_row(T* out, const T* gate, const T* up, int64_t dim) {
  for (int64_t i = 0; i < dim; i += Floats::width)
    store_first(out + i, gated<T, activation>(load_first(gate + i, dim - i), load_first(up + i, dim - i)), dim - i);
}

template <typename T>
void gate_rows(const StepGate<T>& problem, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* const out = problem.out + row * problem.dim;
    switch (problem.activation) {
      case Activation::silu: gate_row<Activation::silu>(out, problem.gate[row], problem.up[row], problem.dim); break;
      case Activation::gelu_tanh:
        gate_row<Activation::gelu_tanh>(out, problem.gate[row], problem.up[row], problem.dim);
        break;
    }
  }
}
