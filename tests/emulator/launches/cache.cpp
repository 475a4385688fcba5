// The kernels of csrc/cuda/cache.cuh through their own launch function, as cache.cu calls it.
#include "cuda/cache.cuh"

#include "launches.h"

namespace emulator {

// `fresh` is empty in place.
void cache_commit(const Numbers& numbers, const std::vector<Address>& caches, const std::vector<Address>& fresh) {
  const Arguments of{numbers};
  const pass_ext::CommitStep step{of.at<int32_t>("prefix_lens"),
                                  of.at<int32_t>("cu_nodes"),
                                  of.at<int32_t>("path"),
                                  of.at<int32_t>("num_accepted"),
                                  of.at<int32_t>("block_table"),
                                  of("path_stride"),
                                  of("table_stride"),
                                  of("requests"),
                                  of("table_width"),
                                  of("new_rows"),
                                  static_cast<int32_t>(of("width")),
                                  fresh.empty()};
  const pass_ext::CacheShape shape{of("outer"),
                                   of("slot"),
                                   of("head"),
                                   of("fresh_row"),
                                   of("fresh_head"),
                                   static_cast<int32_t>(of("outers")),
                                   static_cast<int32_t>(of("slots")),
                                   of("heads"),
                                   of("head_bytes")};
  std::vector<void*> targets;
  std::vector<const void*> sources;
  for (const Address address : caches) targets.push_back(as<void>(address));
  for (const Address address : fresh) sources.push_back(as<void>(address));
  pass_ext::gpu::launch_cache_commit(step, shape, targets.data(), fresh.empty() ? nullptr : sources.data(),
                                     static_cast<int64_t>(targets.size()), {});
}

}  // namespace emulator
