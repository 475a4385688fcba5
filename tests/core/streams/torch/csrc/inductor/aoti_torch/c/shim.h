// A stand-in for torch's current streams.
#pragma once

#include <cuda_runtime.h>

constexpr int AOTI_TORCH_SUCCESS = 0;
inline int aoti_torch_get_current_cuda_stream(int device, void** stream) {
  *stream = runtime.devices[device].current;
  return AOTI_TORCH_SUCCESS;
}
