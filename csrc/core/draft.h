// Drawing candidates from rows of logits. p: core/distribution.h; E: core/noise.h.
//   coupled  the k largest of ln p(v) - ln E_v, E the target's own noise of seed and position: the first is the token
//            that the target itself would draw
//   without  the same with the draft's own noise: k draws without replacement, in the order of drawing
//   with     k independent draws
//   top      the k most probable
// At temperature 0 every mode gives the limit: tokens in the order of their logits, the first has all the probability.
// `Rows` as in core/accept_walk.h.
#pragma once

#include <cstdint>

#include "core/distribution.h"
#include "core/noise.h"
#include "core/platform.h"

namespace pass_ext {

// The order of pass_ext.ops.draft.MODES.
enum class DraftMode : int32_t { coupled, without, with, top };

struct DraftProblem {
  LogitRows logits;
  SamplingParameterArrays sampling;
  const int64_t* seeds;      // [rows] or null: 0
  const int64_t* positions;  // [rows] or null: 0
  const int32_t* nodes;      // [rows] or null: 0
  int64_t rows;
  int32_t count;
  DraftMode mode;
  int64_t* tokens;  // [rows, count]
  float* logprobs;  // [rows, count]
};

PASS_EXT_HOST_DEVICE bool is_greedy_draft(const DraftProblem& problem, int64_t index) {
  if (problem.sampling.temperature == nullptr) return problem.mode == DraftMode::coupled;
  return is_greedy(problem.sampling.temperature[index]);
}

// At temperature 0 all tokens are ranked, unfiltered.
PASS_EXT_HOST_DEVICE SamplingParameters draft_parameters(const DraftProblem& problem, int64_t index) {
  const float default_temperature = problem.mode == DraftMode::coupled ? 0.0f : 1.0f;
  SamplingParameters parameters =
      parameters_of(problem.sampling, index, problem.logits.vocabulary, default_temperature);
  if (is_greedy_draft(problem, index)) parameters.top_k = 0;
  return parameters;
}

// Whether tokens race; else they are ranked without noise.
PASS_EXT_HOST_DEVICE bool is_race(DraftMode mode, bool greedy) { return mode != DraftMode::top && !greedy; }

// The noise of a row's first race. Each race that is drawn anew has the next `draw`.
PASS_EXT_HOST_DEVICE Noise draft_noise(const DraftProblem& problem, int64_t index) {
  const bool is_coupled = problem.mode == DraftMode::coupled;
  const NoiseKey key = noise_key(problem.seeds, problem.positions, index);
  return {key.seed, static_cast<int64_t>(key.position), is_coupled ? Purpose::coupled : Purpose::draft,
          is_coupled || problem.nodes == nullptr ? 0u : static_cast<uint32_t>(problem.nodes[index]), 0};
}

template <typename Rows>
PASS_EXT_HOST_DEVICE void draft_row(Rows& rows, const DraftProblem& problem, int64_t index) {
  const LogitRow row = row_at(problem.logits, index * problem.logits.stride, index, index);
  const bool greedy = is_greedy_draft(problem, index);
  const Distribution distribution = rows.describe(row, draft_parameters(problem, index), true);
  int64_t* tokens = problem.tokens + index * problem.count;
  float* logprobs = problem.logprobs + index * problem.count;
  Noise noise = draft_noise(problem, index);
  const bool races = is_race(problem.mode, greedy);
  if (distribution.status != 0) {
    rows.fill(tokens, logprobs, 0, problem.count);
  } else if (problem.mode == DraftMode::with) {
    for (; noise.draw < static_cast<uint32_t>(problem.count); ++noise.draw)
      rows.best(row, distribution, races ? &noise : nullptr, 1, tokens + noise.draw, logprobs + noise.draw);
  } else {
    rows.best(row, distribution, races ? &noise : nullptr, problem.count, tokens, logprobs);
  }
  if (greedy && distribution.status == 0) rows.concentrate(logprobs, problem.count, problem.mode == DraftMode::with);
}

}  // namespace pass_ext
