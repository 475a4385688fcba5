// The kernel of csrc/cuda/recall.cuh through its own launch function, as recall.cu calls it.
#include "cuda/recall.cuh"

#include "launches.h"

namespace emulator {
namespace {

void recall_scores(const Arguments& given) {
  const pass_ext::RecallProblem problem{given.at<int64_t>("tokens"),
                                        given.at<int64_t>("contexts"),
                                        given.at<int32_t>("requests"),
                                        given.at<int64_t>("text"),
                                        given.at<int64_t>("lengths"),
                                        given.at<float>("scores"),
                                        given("rows"),
                                        given("request_count"),
                                        given("room"),
                                        static_cast<int32_t>(given("count"))};
  pass_ext::gpu::launch_recall_scores(problem, {});
}

const Registration kRecall{"recall_scores", recall_scores};

}  // namespace
}  // namespace emulator
