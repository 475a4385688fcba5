// csrc/cuda/runtime.h for the emulator: one stream, a GPU of a size that tests choose, and ops of a namespace of their
// own, for CPU tensors.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "cuda/primitives.cuh"
#include "engine.h"
#include "host/checks.h"

#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(name, device, library) _STABLE_TORCH_LIBRARY_IMPL(name, CPU, library, C10_UID)

namespace pass_ext {

class CudaScope {
 public:
  explicit CudaScope(const Tensor&) {}
  gpu::Stream stream() const { return {}; }
  int device() const { return 0; }
  int multiprocessors() const { return emulator::multiprocessors(); }
};

struct ResidentBlocks {
  template <typename Kernel>
  int count(int, Kernel*, int, size_t) {
    return emulator::resident_blocks();
  }
};

inline void check_launch(const char*) {}  // a launch throws

}  // namespace pass_ext
