// Recall of the tokens of one row on the CPU, at one instruction set (see each_isa.h).

#include "cpu/recall-inl.h"

void recall_row(const RecallProblem& problem, int64_t row, int32_t* followed) {
  const int64_t request = problem.requests[row];
  const RecallText text = recall_text(problem.text + request * problem.room, problem.lengths[request], problem.room);
  float* const scores = problem.scores + row * problem.count;
  memset(scores, 0, sizeof(float) * problem.count);
  recall_below(text, recall_context(problem, row), problem.tokens + row * problem.count, problem.count, followed,
               scores);
}
