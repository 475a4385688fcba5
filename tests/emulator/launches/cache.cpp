// The kernels of csrc/cuda/cache.cuh through their own launch function, as cache.cu calls it.
#include "cuda/cache.cuh"

#include "launches.h"

namespace emulator {
namespace {

void cache_commit(const Arguments& given) {
  const std::vector<void*> caches = given.list<void>("caches");
  const std::vector<const void*> fresh = given.list<const void>("new");  // empty in place
  const pass_ext::CommitStep step{given.at<int32_t>("prefix_lens"),
                                  given.at<int32_t>("cu_nodes"),
                                  given.at<int32_t>("path"),
                                  given.at<int32_t>("num_accepted"),
                                  given.at<int32_t>("block_table"),
                                  given("path_stride"),
                                  given("table_stride"),
                                  given("requests"),
                                  given("table_width"),
                                  given("new_rows"),
                                  static_cast<int32_t>(given("width")),
                                  fresh.empty()};
  const pass_ext::CacheShape shape{given("outer"),
                                   given("slot"),
                                   given("head"),
                                   given("fresh_row"),
                                   given("fresh_head"),
                                   static_cast<int32_t>(given("outers")),
                                   static_cast<int32_t>(given("slots")),
                                   given("heads"),
                                   given("head_bytes")};
  pass_ext::gpu::launch_cache_commit(step, shape, caches.data(), fresh.empty() ? nullptr : fresh.data(),
                                     static_cast<int64_t>(caches.size()), {});
}

const Registration kLaunch{"cache_commit", cache_commit};

}  // namespace
}  // namespace emulator
