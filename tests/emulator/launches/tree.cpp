// The kernels of csrc/cuda/tree.cuh through their own launch functions, as tree.cu calls them.
#include "cuda/tree.cuh"

#include <stdexcept>

#include "launches.h"

namespace emulator {
namespace {

void tree_prepare(const Arguments& given) {
  pass_ext::TreePrepare problem{};
  problem.parents = given.at<int32_t>("parents");
  problem.cu_nodes = given.at<int32_t>("cu_nodes");
  problem.visible = given.at<int64_t>("visible");
  problem.depths = given.at<int32_t>("depths");
  problem.requests = given("requests");
  problem.rows = given("rows");
  problem.max_nodes = static_cast<int32_t>(given("max_nodes"));
  problem.words = static_cast<int32_t>(given("words"));
  pass_ext::gpu::launch_tree_prepare(problem, {});
}

template <typename T>
void tree_mask_of(const Arguments& given) {
  pass_ext::TreeMask<T> problem{};
  problem.visible = given.at<int64_t>("visible");
  problem.cu_nodes = given.at<int32_t>("cu_nodes");
  problem.prefix_lens = given.at<int32_t>("prefix_lens");
  problem.out = given.at<T>("out");
  problem.requests = given("requests");
  problem.rows = given("rows");
  problem.kv_len = given("kv_len");
  problem.max_nodes = static_cast<int32_t>(given("max_nodes"));
  problem.visible_stride = given("visible_stride");
  pass_ext::gpu::launch_tree_mask(problem, {});
}

void tree_mask(const Arguments& given) {
  const std::string dtype = given.text("dtype");
  if (dtype == "bfloat16") return tree_mask_of<pass_ext::bfloat16>(given);
  if (dtype == "float16") return tree_mask_of<pass_ext::float16>(given);
  if (dtype == "float32") return tree_mask_of<float>(given);
  throw std::invalid_argument("the emulator has no tree_mask for dtype " + dtype);
}

const Registration kLaunches[] = {{"tree_prepare", tree_prepare}, {"tree_mask", tree_mask}};

}  // namespace
}  // namespace emulator
