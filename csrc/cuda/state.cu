// torch.ops.pass_ext.state_commit_ on CUDA: checks, launches, registration. The kernels: cuda/state.cuh.
#include "cuda/state.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/state.h"

namespace pass_ext {
namespace {

void state_commit_on_cuda(const TensorList& states, const TensorList& updates, const std::vector<int64_t>& parts,
                          const Tensor& cu_nodes, const Tensor& path, const Tensor& num_accepted,
                          const OptionalTensor& state_index) {
  const StateProblem problem = prepare_state_commit(states, updates, parts, cu_nodes, path, num_accepted, state_index);
  if (states.empty()) return;
  const CudaScope scope(states[0]);
  gpu::launch_state_commit(problem.step, problem.recurrent, problem.convolutions, scope.stream());
  check_launch("state_commit_");
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("state_commit_", TORCH_BOX(&pass_ext::state_commit_on_cuda));
}
