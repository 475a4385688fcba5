// The kernels of csrc/cuda/convolution.cuh through their own launch function, as convolution.cu calls it.
#include "cuda/convolution.cuh"

#include <stdexcept>

#include "launches.h"

namespace emulator {
namespace {

template <typename T>
void launch_as(const Arguments& given) {
  pass_ext::ConvolutionTree<T> problem{};
  problem.x = given.at<T>("x");
  problem.row_distance = given("row_distance");
  problem.weight = given.at<T>("weight");
  problem.bias = given.at<T>("bias");
  problem.states = given.at<T>("states");
  problem.slots = given("slots");
  problem.slot_distance = given("slot_distance");
  problem.channel_distance = given("channel_distance");
  problem.tap_distance = given("tap_distance");
  problem.state_index = given.at<int32_t>("state_index");
  problem.parents = given.at<int32_t>("parents");
  problem.cu_nodes = given.at<int32_t>("cu_nodes");
  problem.out = given.at<T>("out");
  problem.rows = given("rows");
  problem.requests = given("requests");
  problem.channels = given("channels");
  problem.taps = given("taps");
  problem.has_silu = given("silu") != 0;
  pass_ext::gpu::launch_convolution_tree(problem, {});
}

void convolution_tree(const Arguments& given) {
  const std::string dtype = given.text("dtype");
  if (dtype == "bfloat16") return launch_as<pass_ext::bfloat16>(given);
  if (dtype == "float16") return launch_as<pass_ext::float16>(given);
  if (dtype == "float32") return launch_as<float>(given);
  throw std::invalid_argument("the emulator has no convolution_tree for dtype " + dtype);
}

const Registration kLaunch{"convolution_tree", convolution_tree};

}  // namespace
}  // namespace emulator
