// The kernels of csrc/cuda/recurrent.cuh through their own launch function, as recurrent.cu calls it.
#include "cuda/recurrent.cuh"

#include <stdexcept>

#include "launches.h"

namespace emulator {
namespace {

template <typename T>
void launch_as(const Arguments& given) {
  const auto heads_of = [&](const std::string& name) {
    return pass_ext::HeadRows<T>{given.at<T>(name), given(name + "_row_distance"), given(name + "_head_distance")};
  };
  pass_ext::RecurrentTree<T> problem{};
  problem.q = heads_of("q");
  problem.k = heads_of("k");
  problem.v = heads_of("v");
  problem.decay = {given.at<float>("log_decay"), given.at<float>("decay_rates"),
                   static_cast<pass_ext::Decay>(given("decay"))};
  problem.beta = given.at<float>("beta");
  problem.states = given.at<float>("states");
  problem.layout = {given("slots"), given("slot"), given("head"), given("row"), given("column")};
  problem.state_index = given.at<int32_t>("state_index");
  problem.parents = given.at<int32_t>("parents");
  problem.cu_nodes = given.at<int32_t>("cu_nodes");
  problem.out = given.at<T>("out");
  problem.u = given.at<float>("u");
  problem.rows = given("rows");
  problem.requests = given("requests");
  problem.heads = given("heads");
  problem.key_heads = given("key_heads");
  problem.dk = given("dk");
  problem.dv = given("dv");
  problem.scale = static_cast<float>(given.number("scale"));
  problem.form = static_cast<pass_ext::RecurrentForm>(given("form"));
  pass_ext::gpu::launch_recurrent_tree(problem, {});
}

void recurrent_tree(const Arguments& given) {
  const std::string dtype = given.text("dtype");
  if (dtype == "bfloat16") return launch_as<pass_ext::bfloat16>(given);
  if (dtype == "float16") return launch_as<pass_ext::float16>(given);
  if (dtype == "float32") return launch_as<float>(given);
  throw std::invalid_argument("the emulator has no recurrent_tree for dtype " + dtype);
}

const Registration kLaunch{"recurrent_tree", recurrent_tree};

}  // namespace
}  // namespace emulator
