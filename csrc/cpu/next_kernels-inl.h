// Scores of offered tokens below one parent on the CPU, at one instruction set (see each_isa.h):
//   out[k] = scores[k] + left · right[tokens[k]], in the order of core/next.h; -inf for a token outside the vocabulary
// and what the text recalls (core/recall.h) on top of it.

#include "cpu/recall-inl.h"

inline Floats load_numbers(const float* from, int32_t count) {
  if (count >= Floats::width) return load(from);
  float padded[Floats::width];
  memset(padded, 0, sizeof padded);
  memcpy(padded, from, count * sizeof(float));
  return load(padded);
}

inline float product_of(const float* left, const float* right, int32_t rank) {
  alignas(64) float partial[kPartialProducts];
  memset(partial, 0, sizeof partial);
  for (int32_t i = 0; i < rank; i += Floats::width) {
    float* const place = partial + i % kPartialProducts;
    store(place, fused(load_numbers(left + i, rank - i), load_numbers(right + i, rank - i), load(place)));
  }
  for (int32_t half = kPartialProducts / 2; half >= Floats::width; half /= 2)
    for (int32_t j = 0; j < half; j += Floats::width) store(partial + j, load(partial + j) + load(partial + j + half));
  return sum_lanes(load(partial));
}

// before: the parent's token.
void score_offered(const NextProblem& problem, const int64_t* tokens, const float* scores, int64_t before, float* out) {
  const float* const left = problem.left == nullptr ? nullptr : problem.left + before * problem.left_stride;
  for (int32_t k = 0; k < problem.count; ++k) {
    out[k] = -kInfinity;
    if (!has_transition(problem, tokens[k])) continue;
    out[k] = scores[k];
    if (left != nullptr) out[k] += product_of(left, problem.right + tokens[k] * problem.right_stride, problem.rank);
  }
}

void recall_offered(const RecallText& text, const RecallContext& context, const int64_t* tokens, int32_t count,
                    int32_t* followed, float* scores) {
  recall_below(text, context, tokens, count, followed, scores);
}
