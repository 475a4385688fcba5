// A stand-in for torch's guard, which makes a device current for a scope.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace torch::stable::accelerator {

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : before_(std::exchange(runtime.device, device)) {}
  ~DeviceGuard() { runtime.device = before_; }

 private:
  int before_;
};

}  // namespace torch::stable::accelerator
