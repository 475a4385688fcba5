// The kernel of csrc/cuda/next.cuh through its own launch function, as next.cu calls it.
#include "cuda/next.cuh"

#include "launches.h"

namespace emulator {
namespace {

pass_ext::NextProblem step_of(const Arguments& given) {
  const auto count = [&](const char* name) { return static_cast<int32_t>(given(name)); };
  return {
      given.at<int64_t>("emitted"),
      given.at<int32_t>("path"),
      given.at<int32_t>("num_accepted"),
      given.at<int32_t>("status"),
      count("width"),
      given.at<int64_t>("offered"),
      given.at<float>("scores"),
      given.at<float>("left"),
      given.at<float>("right"),
      given("left_stride"),
      given("right_stride"),
      given("vocabulary"),
      count("slots"),
      count("count"),
      count("rank"),
      {given.at<float>("temperature"), given.at<int32_t>("top_k"), given.at<float>("top_p"), given.at<float>("min_p")},
      given.at<int64_t>("seeds"),
      given.at<int64_t>("limits"),
      given.at<int64_t>("rows"),
      given.at<int64_t>("lengths"),
      given.at<int32_t>("prefix_lens"),
      given.at<int64_t>("report"),
      given.at<int64_t>("text"),
      given("requests"),
      given("text_room"),
      count("row_count"),
      count("report_width")};
}

void next_tree(const Arguments& given) {
  const pass_ext::NextTreeProblem problem{step_of(given),
                                          given.at<float>("rates"),
                                          given.at<float>("price"),
                                          given.at<int32_t>("parents"),
                                          static_cast<int32_t>(given("rate_count")),
                                          static_cast<int32_t>(given("first"))};
  pass_ext::gpu::launch_next_tree(problem, {});
}

const Registration kTree{"next_tree", next_tree};

}  // namespace
}  // namespace emulator
