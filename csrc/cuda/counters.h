// Counters that are zero when a kernel starts and that it leaves at zero, so that no call has to clear them.
//
// Kernels of one stream run one after another and each leaves zeros behind. So one counter slot per stream is enough.
// Two streams run at once and must not count in the same place, so each has a counter slot. Nobody tells when a stream
// is destroyed, and its last kernel may still count then, so such a slot never comes back: the first kMostEagerStreams
// streams of a device keep theirs, and a call on any later one clears memory of its own.
//
// During a capture nothing runs, and the recorded kernels will run on some other stream, perhaps beside eager kernels
// of this one or beside another graph. So every capture takes a new counter slot for each of its streams. The graph
// keeps the counter slot for as long as it or an executable of it lives (a CUDA user object); then the slot may be
// taken again. Two executables of one graph share it and must not run at once; torch makes one of each.
//
// Slots are cleared once, when their memory is allocated: the last kernel of a graph leaves zeros too, so that a graph
// needs no node that clears. A kernel that fails leaves its context without use, and with it the memory.
//
// The memory is not torch's, because a tensor that outlives its call may not be allocated inside a graph's pool:
// torch.compile(mode="reduce-overhead") counts the live tensors there, and raises.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "host/checks.h"

namespace pass_ext {

constexpr int64_t kCountersOfSlot = 4096;
constexpr int64_t kSlotBytes = kCountersOfSlot * sizeof(int32_t);
constexpr size_t kMostEagerStreams = 256;  // torch has 64 a device; a program may make some for every request

class CounterSlots {  // one per device
 public:
  // A counter slot for kernels launched on `stream`, which is on the current device, from now until the stream's
  // capture ends or begins. It may be `spare`: kSlotBytes that this call alone uses.
  int32_t* slot_for(const char* op, cudaStream_t stream, void* spare) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long stream_id = 0, capture = 0;
    cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
    check(op, cudaStreamGetCaptureInfo(stream, &status, &capture, &graph));
#else
    check(op, cudaStreamGetCaptureInfo_v2(stream, &status, &capture, &graph));
#endif
    const bool is_captured = status == cudaStreamCaptureStatusActive;
    // An id is never used again, unlike a handle. A capture refuses cudaStreamGetId, and ends if one of its streams is
    // destroyed, so there the handle is as good.
    if (is_captured)
      stream_id = reinterpret_cast<uintptr_t>(stream);
    else
      check(op, cudaStreamGetId(stream, &stream_id));
    const std::lock_guard lock(mutex_);
    const std::pair key{is_captured ? capture : kEager, stream_id};
    const auto entry = taken_.find(key);
    if (entry != taken_.end()) return entry->second;
    if (!is_captured && eager_streams_ == kMostEagerStreams) {
      check(op, cudaMemsetAsync(spare, 0, kSlotBytes, stream));
      return static_cast<int32_t*>(spare);
    }
    int32_t* const slot = take_free_slot(op);
    if (is_captured)
      lend_to(op, graph, slot);
    else
      ++eager_streams_;
    return taken_[key] = slot;
  }

  static CounterSlots& of_device(int device) {
    constexpr int kMostDevices = 64;
    static CounterSlots* const all = new CounterSlots[kMostDevices];  // never destroyed: graphs may outlive statics
    return all[device % kMostDevices];
  }

 private:
  static constexpr unsigned long long kEager = ~0ull;  // no capture's id

  struct Ownership {
    CounterSlots* slots;
    int32_t* slot;
  };

  static void check(const char* op, cudaError_t error) {
    if (error != cudaSuccess) refuse(op, "no counters on this device: ", cudaGetErrorString(error));
  }

  int32_t* take_free_slot(const char* op) {
    {
      const std::lock_guard lock(released_mutex_);
      for (int32_t* slot : released_) {
        for (auto i = taken_.begin(); i != taken_.end();) i = i->second == slot ? taken_.erase(i) : std::next(i);
        free_.push_back(slot);
      }
      released_.clear();
    }
    if (free_.empty()) {
      constexpr int64_t kSlots = 256;
      void* memory = nullptr;
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // neither of the two is part of a capture
      check(op, cudaThreadExchangeStreamCaptureMode(&mode));
      const cudaError_t error = allocate_zeros(&memory, kSlots * kSlotBytes);
      check(op, cudaThreadExchangeStreamCaptureMode(&mode));
      check(op, error);
      for (int64_t i = 0; i < kSlots; ++i) free_.push_back(static_cast<int32_t*>(memory) + i * kCountersOfSlot);
    }
    int32_t* const slot = free_.back();
    free_.pop_back();
    return slot;
  }

  // On a stream of its own, which waits for no other: the caller's may be in a capture.
  static cudaError_t allocate_zeros(void** memory, size_t bytes) {
    cudaError_t error = cudaMalloc(memory, bytes);
    if (error != cudaSuccess) return error;
    cudaStream_t stream = nullptr;
    error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) error = cudaMemsetAsync(*memory, 0, bytes, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    if (stream != nullptr) cudaStreamDestroy(stream);
    if (error != cudaSuccess) cudaFree(*memory);
    return error;
  }

  // The counter slot comes back when the graph and all its executables are gone.
  void lend_to(const char* op, cudaGraph_t graph, int32_t* slot) {
    cudaUserObject_t object = nullptr;
    const auto release = [](void* data) {
      auto* const owned = static_cast<Ownership*>(data);
      const std::lock_guard lock(owned->slots->released_mutex_);
      owned->slots->released_.push_back(owned->slot);
      delete owned;
    };
    check(op, cudaUserObjectCreate(&object, new Ownership{this, slot}, release, 1, cudaUserObjectNoDestructorSync));
    check(op, cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
  }

  std::mutex mutex_;                                                             // held across CUDA calls
  std::map<std::pair<unsigned long long, unsigned long long>, int32_t*> taken_;  // by capture and stream
  std::vector<int32_t*> free_;
  size_t eager_streams_ = 0;   // that have a slot
  std::mutex released_mutex_;  // never held across a CUDA call: graphs are destroyed inside CUDA
  std::vector<int32_t*> released_;
};

}  // namespace pass_ext
