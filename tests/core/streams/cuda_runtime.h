// A stand-in for the CUDA runtime: streams with an id, captures, graphs that own user objects, memory that is counted.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <vector>

#define CUDART_VERSION 13000

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation };
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
  Graph* captures = nullptr;
  unsigned long long capture = 0;
};
using cudaUserObject_t = UserObject*;
using cudaGraph_t = Graph*;
using cudaStream_t = Stream*;

struct Runtime {
  unsigned long long streams = 0, captures = 0;
  std::vector<void*> memory;
  int clears = 0;        // cudaMemsetAsync
  bool is_full = false;  // cudaMalloc fails
};
inline Runtime runtime;

inline const char* cudaGetErrorString(cudaError_t) { return "out of memory"; }
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
  return cudaSuccess;
}
inline cudaError_t cudaFree(void*) { return cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new Stream{++runtime.streams};
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
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
