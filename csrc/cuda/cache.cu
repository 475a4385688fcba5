// torch.ops.pass_ext.cache_commit_ on CUDA: checks, launches, registration. The kernel: cuda/cache.cuh.
#include "cuda/cache.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/cache.h"

namespace pass_ext {
namespace {

void cache_commit(const TensorList& caches, const Tensor& prefix_lens, const Tensor& cu_nodes, const Tensor& path,
                  const Tensor& num_accepted, const TensorList& fresh, const OptionalTensor& block_table) {
  const CommitProblem problem = prepare_commit(caches, prefix_lens, cu_nodes, path, num_accepted, fresh, block_table);
  if (problem.groups.empty()) return;
  const CudaScope scope(caches[0]);
  for (const CommitGroup& group : problem.groups)
    gpu::launch_cache_commit(problem.step, group.shape, group.caches.data(),
                             group.fresh.empty() ? nullptr : group.fresh.data(),
                             static_cast<int64_t>(group.caches.size()), scope.stream());
  check_launch("cache_commit_");
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("cache_commit_", TORCH_BOX(&pass_ext::cache_commit));
}
