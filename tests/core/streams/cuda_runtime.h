// A stand-in for the CUDA runtime: devices, each with streams of its own and a current one of torch's, captures, graphs
// that own user objects, memory that is counted, and launches, which are refused where a GPU would refuse them.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#define CUDART_VERSION 13000

enum cudaError_t {
  cudaSuccess,
  cudaErrorMemoryAllocation,
  cudaErrorInvalidValue,
  cudaErrorInvalidResourceHandle,
  cudaErrorNoKernelImageForDevice,
  cudaErrorUnsupportedPtxVersion,
  cudaErrorInvalidDeviceFunction,
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
constexpr unsigned cudaStreamNonBlocking = 1, cudaUserObjectNoDestructorSync = 1, cudaGraphUserObjectMove = 1;

using cudaHostFn_t = void (*)(void*);
struct UserObject {
  void* data;
  cudaHostFn_t release;
};
struct Graph {
  std::vector<UserObject> objects;
};
struct Stream {
  unsigned long long id;
  int device;
  Graph* captures = nullptr;
  unsigned long long capture = 0;
};
using cudaUserObject_t = UserObject*;
using cudaGraph_t = Graph*;
using cudaStream_t = Stream*;

struct Device {
  int multiprocessors, resident, ptx;
  Stream* current = nullptr;          // torch's
  std::map<const void*, int> shared;  // bytes that a kernel is allowed
};
struct Launch {
  int device;
  unsigned long long stream;
  bool is_early;
};

struct Runtime {
  unsigned long long streams = 0, captures = 0;
  int device = 0;  // the current one
  Device devices[2] = {{108, 3, 80}, {132, 2, 90}};
  int questions = 0;  // of attributes and occupancy
  cudaError_t error = cudaSuccess;
  std::vector<Launch> launches;
  std::vector<void*> memory;
  std::map<void*, int> device_of;
  int clears = 0;        // cudaMemsetAsync
  bool is_full = false;  // cudaMalloc fails
};
inline Runtime runtime;

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "invalid";
}
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* capture, cudaGraph_t* graph) {
  *status = stream->captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *capture = stream->capture;
  *graph = stream->captures;
  return cudaSuccess;
}
inline cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = stream->id;
  return cudaSuccess;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (runtime.is_full) return cudaErrorMemoryAllocation;
  runtime.memory.push_back(*memory = std::malloc(bytes));
  runtime.device_of[*memory] = runtime.device;
  return cudaSuccess;
}
inline cudaError_t cudaFree(void*) { return cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new Stream{++runtime.streams, runtime.device};
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  if (stream->device != runtime.device) return cudaErrorInvalidResourceHandle;
  std::memset(memory, value, bytes);
  ++runtime.clears;
  return cudaSuccess;
}
inline cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t release, unsigned,
                                        unsigned) {
  *object = new UserObject{data, release};
  return cudaSuccess;
}
inline cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned, unsigned) {
  graph->objects.push_back(*object);
  delete object;
  return cudaSuccess;
}

// ---- devices and launches ----

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
};
constexpr int cudaSharedmemCarveoutMaxShared = 100;
struct cudaFuncAttributes {
  int ptxVersion;
};
struct dim3 {
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline Device& current_device() { return runtime.devices[runtime.device]; }

inline cudaError_t cudaGetDevice(int* device) {
  *device = runtime.device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  ++runtime.questions;
  const Device& asked = runtime.devices[device];
  *value = attribute == cudaDevAttrMultiProcessorCount      ? asked.multiprocessors
           : attribute == cudaDevAttrComputeCapabilityMajor ? asked.ptx / 10
                                                            : asked.ptx % 10;
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  ++runtime.questions;
  attributes->ptxVersion = current_device().ptx;
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  ++runtime.questions;
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) current_device().shared[kernel] = value;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, Kernel*, int, size_t) {
  ++runtime.questions;
  *count = current_device().resident;
  return cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream->captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return std::exchange(runtime.error, cudaSuccess); }

inline void record_launch(const void* kernel, size_t shared_bytes, cudaStream_t stream, bool is_early) {
  const auto allowed = current_device().shared.find(kernel);
  const size_t most = allowed == current_device().shared.end() ? 48 * 1024 : static_cast<size_t>(allowed->second);
  if (stream->device != runtime.device)
    runtime.error = cudaErrorInvalidResourceHandle;
  else if (shared_bytes > most || (is_early && current_device().ptx < 90))
    runtime.error = cudaErrorInvalidValue;
  else
    runtime.launches.push_back({runtime.device, stream->id, is_early});
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments...) {
  record_launch(reinterpret_cast<const void*>(kernel), config->dynamicSmemBytes, config->stream, config->numAttrs > 0);
  return cudaSuccess;
}
// kernel<<<grid, block, shared_bytes, stream>>>(arguments...)
template <typename Kernel, typename... Arguments>
void launch_plainly(Kernel* kernel, const dim3&, unsigned, size_t shared_bytes, cudaStream_t stream, Arguments...) {
  record_launch(reinterpret_cast<const void*>(kernel), shared_bytes, stream, false);
}
