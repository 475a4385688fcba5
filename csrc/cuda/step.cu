// torch.ops.pass_ext.step_rms_norm, step_rotary and step_gate on CUDA: launch, registration. The kernels:
// cuda/step.cuh.
#include "cuda/step.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/step.h"

namespace pass_ext {
namespace {

struct OnCuda {
  template <typename Problem>
  static void run(const Problem& problem, const Tensor& like) {
    const CudaScope scope(like);
    gpu::launch_step(problem, scope.stream());
    check_launch(Problem::op);
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("step_rms_norm", TORCH_BOX(&pass_ext::step_rms_norm<pass_ext::OnCuda>));
  library.impl("step_rotary", TORCH_BOX(&pass_ext::step_rotary<pass_ext::OnCuda>));
  library.impl("step_gate", TORCH_BOX(&pass_ext::step_gate<pass_ext::OnCuda>));
}
