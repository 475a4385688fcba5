// Recall: tokens that earlier in the text came behind the same tokens score higher.
//   recall(v) = 2 · sum over n = 1, 2, 3 of  followed_n(v) / places_n
//   places_n      places of the text, but its last one, where its last n tokens are those of the path
//   followed_n(v) those of them behind which v comes
// The path is the text and perhaps candidates behind it. Places are looked for in the last 4,096 tokens of the text.
// n without a place adds nothing, so the score of a token rises by 6 at most.
#pragma once

#include <cstdint>

#include "core/platform.h"

namespace pass_ext {

constexpr int32_t kRecallTokens = 3;      // the most tokens that are compared
constexpr float kRecallWeight = 2.0f;     // a power of two, so that fused sums have the same bits
constexpr int64_t kRecallWindow = 4096;   // tokens of the text, its last ones
constexpr int32_t kMostRecallRow = 1024;  // tokens that are scored behind one path

struct RecallProblem {
  const int64_t* tokens;    // [rows, count], the tokens to score
  const int64_t* contexts;  // [rows, 3], the last tokens of each path in the order of the text; -1: there is none
  const int32_t* requests;  // [rows]
  const int64_t* text;      // [request_count, room]
  const int64_t* lengths;   // [request_count]
  float* scores;            // [rows, count]
  int64_t rows, request_count, room;
  int32_t count;
};

// The part of a text where places are looked for.
struct RecallText {
  const int64_t* tokens;
  int64_t begin, end;
};

PASS_EXT_HOST_DEVICE RecallText recall_text(const int64_t* tokens, int64_t length, int64_t room) {
  const int64_t end = length < 0 ? 0 : length < room ? length : room;
  return {tokens, end > kRecallWindow ? end - kRecallWindow : 0, end};
}

// The last tokens of a path, the last one first; -1: there is none.
struct RecallContext {
  int64_t last[kRecallTokens];
};

PASS_EXT_HOST_DEVICE RecallContext recall_context(const RecallProblem& problem, int64_t row) {
  RecallContext context;
  for (int32_t n = 0; n < kRecallTokens; ++n)
    context.last[n] = problem.contexts[row * kRecallTokens + kRecallTokens - 1 - n];
  return context;
}

// How many tokens up to a place are those of the path, counted back from it.
PASS_EXT_HOST_DEVICE int32_t recalled_at(const RecallText& text, const RecallContext& context, int64_t place) {
  bool is_same = true;
  int32_t count = 0;
  for (int32_t n = 0; n < kRecallTokens; ++n) {  // no early end: the context stays in registers
    is_same = is_same && place - n >= text.begin && context.last[n] >= 0 && text.tokens[place - n] == context.last[n];
    count += is_same;
  }
  return count;
}

// The recall of one token. places[n - 1]: places with n such tokens and no more; followed[(n - 1) stride]: those of
// them behind which the token comes.
PASS_EXT_HOST_DEVICE float recall_of(const int32_t* places, const int32_t* followed, int64_t stride) {
  float share = 0.0f;
  int32_t of_places = 0, of_followed = 0;
  for (int32_t n = kRecallTokens - 1; n >= 0; --n) {
    of_places += places[n];
    of_followed += followed[n * stride];
    if (of_followed > 0) share += static_cast<float>(of_followed) / static_cast<float>(of_places);
  }
  return kRecallWeight * share;
}

}  // namespace pass_ext
