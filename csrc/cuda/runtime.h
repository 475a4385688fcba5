// Everything an op's .cu needs of torch's CUDA runtime: current stream, device guard, launch check, workspace sizes.
// The only user of torch's CUDA shim.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "cuda/primitives.cuh"
#include "host/checks.h"

#ifndef PASS_EXT_CUDA_ARCHITECTURES
#define PASS_EXT_CUDA_ARCHITECTURES "unknown"  // setup.py passes the list it built
#endif

namespace pass_ext {

constexpr int kMostDevices = 64;

// Whether every op first waits for what its stream has to do, and says what failed there: set_debug(True). A failed
// kernel of another library otherwise shows as the failure of whichever op comes next.
inline std::atomic<bool> g_checks_earlier_errors{std::getenv("PASS_EXT_DEBUG") != nullptr &&
                                                 std::string(std::getenv("PASS_EXT_DEBUG")) == "1"};

inline void check_earlier_errors(cudaStream_t stream) {
  if (!g_checks_earlier_errors) return;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error == cudaSuccess && status != cudaStreamCaptureStatusNone) return;  // nothing runs, and nobody may wait
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("pass_ext: CUDA had already failed before this op was called: ") +
                           cudaGetErrorString(error) +
                           ". Some earlier kernel did; CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer finds it");
}

// Makes a tensor's device current for this scope and knows torch's current stream on it. The device is the tensor's own
// index: this library has a CUDA runtime of its own, whose idea of the current device is not asked.
class CudaScope {
 public:
  explicit CudaScope(const Tensor& tensor) : device_(tensor.get_device_index()), guard_(device_) {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(device_, &stream) != AOTI_TORCH_SUCCESS)
      throw std::runtime_error("pass_ext: torch gave no current CUDA stream");
    stream_ = static_cast<cudaStream_t>(stream);
    check_earlier_errors(stream_);
  }

  cudaStream_t stream() const { return stream_; }

  int device() const { return device_; }

  // Of the tensor's device, asked once per process and device.
  int multiprocessors() const {
    static std::atomic<int> counts[kMostDevices] = {};
    int count = counts[device_ % kMostDevices];
    if (count == 0) {
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device_);
      counts[device_ % kMostDevices] = count;
    }
    return count;
  }

 private:
  int device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

// How many blocks of one kernel run at once on one multiprocessor of a device, at least 1; asked once per device.
class ResidentBlocks {
 public:
  template <typename Kernel>
  int count(int device, Kernel* kernel, int threads, size_t dynamic_shared_bytes) {
    int count = counts_[device % kMostDevices];
    if (count == 0) {
      gpu::allow_dynamic_shared(reinterpret_cast<const void*>(kernel), dynamic_shared_bytes);
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads, dynamic_shared_bytes);
      if (count < 1) count = 1;  // the launch will say what is wrong
      counts_[device % kMostDevices] = count;
    }
    return count;
  }

 private:
  std::atomic<int> counts_[kMostDevices] = {};
};

// Raises what the launches since the last check left behind. Does not wait for them.
inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion ||
      error == cudaErrorInvalidDeviceFunction) {
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    refuse(op, "this pass_ext was built for the GPU architectures ", PASS_EXT_CUDA_ARCHITECTURES, ", but this GPU is ",
           major, ".", minor, ". Rebuild it: TORCH_CUDA_ARCH_LIST=", major, ".", minor,
           " pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps pass_ext (",
           cudaGetErrorString(error), ")");
  }
  refuse(op, "kernel launch failed: ", cudaGetErrorString(error));
}

}  // namespace pass_ext
