// Launches of planted_faults.cuh by name: 64 threads, one block, two for the device fences.
#include "planted_faults.cuh"

#include <map>
#include <stdexcept>

#include "launches.h"

namespace emulator {

using namespace pass_ext::gpu;

void run_planted_fault(const std::string& name, Address in, Address out, bool broken) {
  static const std::map<std::string, void (*)(const int*, int*, bool)> kKernels = {
      {"block_barrier", block_barrier_kernel},
      {"warp_barrier", warp_barrier_kernel},
      {"shared_bounds", shared_bounds_kernel},
      {"dynamic_bounds", dynamic_bounds_kernel},
      {"uninitialised", uninitialised_kernel},
      {"unwritten_half", unwritten_half_kernel},
      {"half_of_a_word", half_of_a_word_kernel},
      {"one_word", one_word_kernel},
      {"shared_word", shared_word_kernel},
      {"overwrite", overwrite_kernel},
      {"global_bounds", global_bounds_kernel},
      {"read_only", read_only_kernel},
      {"misaligned", misaligned_kernel},
      {"device_fence", device_fence_kernel},
      {"device_fence_order", device_fence_order_kernel},
      {"device_late_write", device_late_write_kernel},
      {"device_warp_release", device_warp_release_kernel},
      {"device_warp_acquire", device_warp_acquire_kernel},
      {"device_sum", device_sum_kernel},
      {"endless", endless_kernel},
      {"copy_bounds", copy_bounds_kernel},
      {"fill", fill_kernel},
      {"async_source", async_source_kernel},
      {"async_target", async_target_kernel},
      {"different_masks", different_masks_kernel},
      {"own_lane", own_lane_kernel},
      {"async_wait", async_wait_kernel},
      {"async_commit", async_commit_kernel},
      {"async_barrier", async_barrier_kernel},
      {"divergent_barrier", divergent_barrier_kernel},
      {"divergent_shuffle", divergent_shuffle_kernel},
      {"absent_lane", absent_lane_kernel},
      {"streaming", streaming_kernel},
      {"global_store", global_store_kernel},
  };
  const auto found = kKernels.find(name);
  if (found == kKernels.end()) throw std::invalid_argument("no planted fault is called " + name);
  const unsigned blocks = name.rfind("device_", 0) == 0 ? 2 : 1;
  launch(found->first.c_str(), found->second, {{blocks}, {64}, 256}, {}, as<int>(in), as<int>(out), broken);
}

}  // namespace emulator
