// Counters that are zero when a kernel starts and that it leaves at zero, so that no call has to clear them.
// Called by cuda/attention.cu.
#pragma once

#include <cuda_runtime.h>

#include <deque>
#include <map>
#include <mutex>
#include <tuple>

#include "host/tensor.h"

namespace pass_ext {

// At least `count` int32 zeros on the device of `like`, to be used by kernels of one stream only.
//
// Kernels of one stream run one after another and each leaves zeros behind: one buffer per device and stream is enough,
// cleared when it is made. Two streams run at once and must not count in the same place, hence one for each.
//
// Under capture nothing runs, and what is recorded will run on some other stream, perhaps beside eager kernels of this
// one or beside another graph. So every capture gets a buffer of its own per stream, cleared inside the capture: once
// per graph, not per launch, and each replay starts from zeros even after one that was aborted. The buffer lies in the
// graph's memory pool, and must not go back there before the capture ends, lest a later tensor of the same graph take
// its place; hence the latest few of a stream are kept, among them any that is still being captured. After that the
// pool may give it to another graph, as with any tensor that was freed during a capture.
inline Tensor zeroed_counters(const Tensor& like, cudaStream_t stream, int64_t count) {
  constexpr size_t kKeptCaptures = 4;
  struct Captured {
    unsigned long long capture;
    Tensor counters;
  };
  struct Cache {
    std::mutex mutex;
    std::map<std::pair<int32_t, unsigned long long>, Tensor> eager;  // by device and stream
    std::map<std::pair<int32_t, unsigned long long>, std::deque<Captured>> captured;
  };
  static Cache& cache = *new Cache;  // never destroyed: torch may be gone by then

  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0, stream_id = 0;
  if (cudaStreamGetCaptureInfo(stream, &status, &capture) != cudaSuccess ||
      cudaStreamGetId(stream, &stream_id) != cudaSuccess)
    throw std::runtime_error("pass_ext: CUDA does not know torch's current stream");
  const auto make = [&] { return torch::stable::new_zeros(like, {count}, ScalarType::Int); };
  const std::pair key{like.get_device_index(), stream_id};
  const std::lock_guard lock(cache.mutex);
  if (status == cudaStreamCaptureStatusNone) {
    const auto found = cache.eager.find(key);
    if (found != cache.eager.end() && found->second.numel() >= count) return found->second;
    return cache.eager.insert_or_assign(key, make()).first->second;
  }
  std::deque<Captured>& kept = cache.captured[key];
  for (const Captured& known : kept)
    if (known.capture == capture && known.counters.numel() >= count) return known.counters;
  kept.push_front({capture, make()});
  if (kept.size() > kKeptCaptures) kept.pop_back();
  return kept.front().counters;
}

}  // namespace pass_ext
