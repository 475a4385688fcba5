// torch.ops.pass_ext.shard_local, shard_combine and shard_best on CUDA: workspace, launch, registration. The kernels:
// cuda/shard.cuh.
#include "cuda/shard.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/shard.h"

namespace pass_ext {
namespace {

void shard_local_on_cuda(const ShardProblem& shard, const Tensor& logits) {
  const CudaScope scope(logits);
  gpu::launch_shard_local(shard, scope.stream());
  check_launch("shard_local");
}

void shard_combine_on_cuda(const ShardCombination& combination, const Tensor& logits) {
  const CudaScope scope(logits);
  const Tensor workspace =
      empty_of_shape("shard_combine", logits, {gpu::shard_combine_workspace(combination)}, ScalarType::Byte);
  gpu::launch_shard_combine(combination, output_of<void>(workspace), scope.stream());
  check_launch("shard_combine");
}

void shard_best_on_cuda(const ShardBest& best, const Tensor& logits) {
  const CudaScope scope(logits);
  gpu::launch_shard_best(best, scope.stream());
  check_launch("shard_best");
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("shard_local", TORCH_BOX(&pass_ext::shard_local<pass_ext::shard_local_on_cuda>));
  library.impl("shard_combine", TORCH_BOX(&pass_ext::shard_combine<pass_ext::shard_combine_on_cuda>));
  library.impl("shard_best", TORCH_BOX(&pass_ext::shard_best<pass_ext::shard_best_on_cuda>));
}
