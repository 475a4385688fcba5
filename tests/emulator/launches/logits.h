// Rows of logits and their sampling parameters among the arguments of a launch: of draft and of accept.
#pragma once

#include <string>

#include "core/distribution.h"
#include "launches.h"

namespace emulator {

// The arguments of a launch that reads logits. Python's side: ops/logits.py.
struct LogitArguments : Arguments {
  pass_ext::LogitRows rows(const std::string& name) const {
    return {at<void>(name), at<int32_t>(name + "_allowed"), (*this)(name + "_stride"),
            static_cast<pass_ext::LogitType>((*this)(name + "_type")), static_cast<int32_t>((*this)("vocabulary"))};
  }
  pass_ext::SamplingParameterArrays sampling(const std::string& prefix) const {
    return {at<float>(prefix + "temperature"), at<int32_t>(prefix + "top_k"), at<float>(prefix + "top_p"),
            at<float>(prefix + "min_p")};
  }
};

}  // namespace emulator
