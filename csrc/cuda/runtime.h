// The parts of torch's CUDA runtime that ops need: current stream, device guard, launch check, workspace sizes. No
// other file uses torch's CUDA shim.
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

// set_debug(True): every op first synchronises its stream and reports an earlier failure there. Without it a failed
// kernel of another library shows as the failure of the next op.
inline std::atomic<bool> g_checks_earlier_errors{std::getenv("PASS_EXT_DEBUG") != nullptr &&
                                                 std::string(std::getenv("PASS_EXT_DEBUG")) == "1"};

inline void check_earlier_errors(cudaStream_t stream) {
  if (!g_checks_earlier_errors) return;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error == cudaSuccess && status != cudaStreamCaptureStatusNone)
    return;  // during a capture nothing runs and no call may synchronise
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("pass_ext: CUDA had already failed before this op was called: ") +
                           cudaGetErrorString(error) +
                           ". Some earlier kernel did; CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer finds it");
}

// Makes a tensor's device current for this scope and reads torch's current stream on it. The device index comes from
// the tensor, because this library has its own CUDA runtime, whose current device may be another.
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

  // Multiprocessors of the tensor's device, asked once per process and device.
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

// The blocks of one kernel that run at once on one multiprocessor of a device, at least 1; asked once per device.
class ResidentBlocks {
 public:
  template <typename Kernel>
  int count(int device, Kernel* kernel, int threads, size_t dynamic_shared_bytes) {
    int count = counts_[device % kMostDevices];
    if (count == 0) {
      gpu::allow_dynamic_shared(reinterpret_cast<const void*>(kernel), dynamic_shared_bytes);
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads, dynamic_shared_bytes);
      if (count < 1) count = 1;  // the launch reports the error
      counts_[device % kMostDevices] = count;
    }
    return count;
  }

 private:
  std::atomic<int> counts_[kMostDevices] = {};
};

// Raises the errors of launches since the last check. It does not synchronise.
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
