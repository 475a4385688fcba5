// A stand-in for torch's tensor: it lies on a device, and has nothing else.
#pragma once

namespace torch::stable {

struct Tensor {
  int device;
  int get_device_index() const { return device; }
};

}  // namespace torch::stable
