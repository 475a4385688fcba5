// The refusal of csrc/host/checks.h, without torch.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <sstream>
#include <stdexcept>

namespace pass_ext {

using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] void refuse(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace pass_ext
