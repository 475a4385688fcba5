// Shares requests among torch's threads: one task per request if there are enough of them, else one request after the
// other, each with all threads for its rows.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace pass_ext {

// function(index, alone). alone: the request has all threads for itself.
template <typename Function>
void for_each_request(int64_t count, Function&& function) {
  const bool alone = count < static_cast<int64_t>(torch::stable::get_num_threads());
  if (alone || count <= 1) {
    for (int64_t index = 0; index < count; ++index) function(index, alone);
    return;
  }
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) function(index, false);
  });
}

}  // namespace pass_ext
