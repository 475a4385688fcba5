// The kernel of csrc/cuda/next.cuh through its own launch function, as next.cu calls it.
#include "cuda/next.cuh"

#include "launches.h"

namespace emulator {
namespace {

void next_rows(const Arguments& given) {
  const auto count = [&](const char* name) { return static_cast<int32_t>(given(name)); };
  const pass_ext::NextProblem problem{
      given.at<int64_t>("emitted"),
      given.at<int32_t>("path"),
      given.at<int32_t>("num_accepted"),
      given.at<int32_t>("status"),
      given.at<int32_t>("groups"),
      count("width"),
      count("judged_nodes"),
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
      given.at<int32_t>("parents"),
      count("nodes"),
      count("row_count"),
      given.at<int64_t>("limits"),
      given.at<int64_t>("rows"),
      given.at<int64_t>("lengths"),
      given.at<int32_t>("prefix_lens"),
      given.at<int64_t>("report"),
      given("requests"),
      count("report_width")};
  pass_ext::gpu::launch_next_rows(problem, {});
}

const Registration kLaunch{"next_rows", next_rows};

}  // namespace
}  // namespace emulator
