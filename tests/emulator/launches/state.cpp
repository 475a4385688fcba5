// The kernels of csrc/cuda/state.cuh through their own launch function, as state.cu calls it. Numbers of a state have
// its place in the list of its kind behind their name.
#include "cuda/state.cuh"

#include "launches.h"

namespace emulator {
namespace {

pass_ext::RecurrentState recurrent_state(const Arguments& given, const std::string& place) {
  const auto number = [&](const char* name) { return given(name + place); };
  pass_ext::RecurrentState state{};
  state.data = given.at<float>("recurrent" + place);
  state.layout = {number("slots"), number("slot"), number("head"), number("row"), number("column")};
  state.heads = number("heads");
  state.key_heads = number("key_heads");
  state.dk = number("dk");
  state.dv = number("dv");
  state.k = given.at<void>("k" + place);
  state.key_row = number("key_row");
  state.key_head = number("key_head");
  state.key_type = static_cast<pass_ext::RowType>(number("key_type"));
  state.u = given.at<float>("u" + place);
  state.decay = {given.at<float>("log_decay" + place), given.at<float>("decay_rates" + place),
                 static_cast<pass_ext::Decay>(number("decay"))};
  return state;
}

pass_ext::ConvolutionState convolution_state(const Arguments& given, const std::string& place) {
  const auto number = [&](const char* name) { return given(name + place); };
  return {given.at<char>("window" + place),
          number("window_slots"),
          number("window_slot"),
          number("channel"),
          number("tap"),
          number("channels"),
          number("inputs"),
          given.at<char>("x" + place),
          number("x_row"),
          number("bytes")};
}

void state_commit(const Arguments& given) {
  const pass_ext::StateStep step{given.at<int32_t>("cu_nodes"),
                                 given.at<int32_t>("path"),
                                 given.at<int32_t>("num_accepted"),
                                 given.at<int32_t>("state_index"),
                                 given("path_stride"),
                                 given("requests"),
                                 given("rows"),
                                 static_cast<int32_t>(given("width"))};
  std::vector<pass_ext::RecurrentState> recurrent;
  std::vector<pass_ext::ConvolutionState> convolutions;
  for (int64_t i = 0; i < given("recurrents"); ++i)
    recurrent.push_back(recurrent_state(given, " " + std::to_string(i)));
  for (int64_t i = 0; i < given("convolutions"); ++i)
    convolutions.push_back(convolution_state(given, " " + std::to_string(i)));
  pass_ext::gpu::launch_state_commit(step, recurrent, convolutions, {});
}

const Registration kLaunch{"state_commit", state_commit};

}  // namespace
}  // namespace emulator
