// torch.ops.pass_ext.accept_tree and accept_chain on CUDA: workspace, launch, registration. The kernels:
// cuda/accept.cuh, cuda/logprobs.cuh, cuda/support.cuh.
#include "cuda/accept.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/counters.h"
#include "cuda/logprobs.cuh"
#include "cuda/runtime.h"
#include "cuda/support.cuh"
#include "host/accept.h"

namespace pass_ext {
namespace {

static_assert(gpu::kMaxRowsBeforehand <= kCountersOfSlot, "each row has a counter; of fewer rows the step has one too");

#ifdef PASS_EXT_STAMPS
constexpr size_t kStamps = gpu::kStampedBlocks * static_cast<size_t>(gpu::Phase::count);

gpu::Stamp* stamps() {
  static gpu::Stamp* const memory = [] {
    void* allocated = nullptr;
    cudaMalloc(&allocated, kStamps * sizeof(gpu::Stamp));
    cudaMemset(allocated, 0, kStamps * sizeof(gpu::Stamp));
    return static_cast<gpu::Stamp*>(allocated);
  }();
  return memory;
}
#endif

void accept_on_cuda(const char* op, const AcceptProblem& problem, const LogprobArrays& logprobs,
                    const SupportArrays& supports, const Tensor& target_logits) {
  if (problem.requests == 0) return;
  const CudaScope scope(target_logits);
  const gpu::RowsPlan plan = gpu::plan_accept(problem, scope.multiprocessors());
  const Tensor workspace = empty_of_shape(op, target_logits, {kSlotBytes + plan.bytes()}, ScalarType::Byte);
  char* const memory = output_of<char>(workspace);
  int32_t* const counters =
      plan.rows > 0 ? CounterSlots::of_device(scope.device()).slot_for(op, scope.stream(), memory) : nullptr;
  gpu::RowsWorkspace rows = plan.carve(memory + kSlotBytes, counters);
#ifdef PASS_EXT_STAMPS
  rows.stamps = stamps();
#endif
  gpu::launch_accept(problem, plan, rows, scope.stream());
  gpu::launch_logprobs(problem, logprobs, scope.stream());
  gpu::launch_supports(problem, supports, scope.stream());
  check_launch(op);
}

}  // namespace
}  // namespace pass_ext

#ifdef PASS_EXT_STAMPS
// Copies the stamps [blocks, phases] and clears them.
extern "C" __attribute__((visibility("default"))) int pass_ext_take_stamps(void* to) {
  constexpr size_t kBytes = pass_ext::kStamps * sizeof(pass_ext::gpu::Stamp);
  const cudaError_t error = cudaMemcpy(to, pass_ext::stamps(), kBytes, cudaMemcpyDeviceToHost);
  return error != cudaSuccess ? error : cudaMemset(pass_ext::stamps(), 0, kBytes);
}
#endif

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("accept_tree", TORCH_BOX(&pass_ext::accept_tree<pass_ext::accept_on_cuda>));
  library.impl("accept_chain", TORCH_BOX(&pass_ext::accept_chain<pass_ext::accept_on_cuda>));
}
