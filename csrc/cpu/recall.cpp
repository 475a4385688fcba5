// torch.ops.pass_ext.recall_scores on the CPU: values checked, parallel split, registration. The inner loop:
// cpu/recall-inl.h.
#include "host/recall.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "cpu/workers.h"

#define PASS_EXT_KERNELS "cpu/recall_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

// Below this many comparisons a second thread costs more than it saves.
constexpr int64_t kComparisonsPerTask = 64 * 1024;

void check_values(const RecallProblem& problem) {
  constexpr const char* kOp = "recall_scores";
  for (int64_t b = 0; b < problem.request_count; ++b)
    if (problem.lengths[b] < 0 || problem.lengths[b] > problem.room)
      refuse(kOp, "lengths must be in [0, ", problem.room, "] (the columns of text), got ", problem.lengths[b], " at ",
             b);
  for (int64_t row = 0; row < problem.rows; ++row)
    if (problem.requests[row] < 0 || problem.requests[row] >= problem.request_count)
      refuse(kOp, "requests must be in [0, ", problem.request_count, ") (the rows of text), got ",
             problem.requests[row], " at ", row);
}

void recall_on_cpu(const RecallProblem& problem, const Tensor&) {
  check_values(problem);
  if (problem.count == 0) return;
  const int64_t each = std::min(problem.room, kRecallWindow) + problem.count;
  for_ranges(problem.rows, std::max<int64_t>(1, kComparisonsPerTask / std::max<int64_t>(1, each)),
             [&](int64_t begin, int64_t end) {
               std::vector<int32_t> followed(int64_t{kRecallTokens} * problem.count);
               for (int64_t row = begin; row < end; ++row) PASS_EXT_AT_ISA(recall_row(problem, row, followed.data()));
             });
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("recall_scores", TORCH_BOX(&pass_ext::recall_scores<pass_ext::recall_on_cpu>));
}
