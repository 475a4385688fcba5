// torch.ops.pass_ext.accept_tree and accept_chain on CUDA: checks, workspace, launch, registration. The kernels:
// cuda/accept.cuh. Called by torch's dispatcher.
#include "cuda/accept.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/runtime.h"
#include "host/accept.h"

namespace pass_ext {
namespace {

void launch_all(const char* op, const AcceptProblem& problem, const Tensor& like, const CudaScope& scope) {
  const gpu::RowsPlan plan = gpu::plan_accept(problem, scope.multiprocessors());
  const Tensor workspace = empty_of_shape(like, {plan.bytes()}, ScalarType::Byte);
  gpu::launch_accept(problem, plan.carve(workspace.mutable_data_ptr()), scope.stream());
  check_launch(op);
}

AcceptResult accept_tree(const Tensor& target_logits, const Tensor& tokens, const Tensor& parents,
                         const Tensor& cu_nodes, int64_t max_depth, int64_t rule, const OptionalTensor& draft_logits,
                         const OptionalTensor& draft_rows, const OptionalTensor& temperature,
                         const OptionalTensor& top_k, const OptionalTensor& top_p, const OptionalTensor& min_p,
                         const OptionalTensor& draft_temperature, const OptionalTensor& draft_top_k,
                         const OptionalTensor& draft_top_p, const OptionalTensor& draft_min_p,
                         const OptionalTensor& allowed, const OptionalTensor& draft_allowed,
                         const OptionalTensor& seeds, const OptionalTensor& positions, double threshold, double alpha) {
  AcceptProblem problem{};
  const CudaScope scope(target_logits);
  const AcceptResult result = prepare_accept_tree({"accept_tree",
                                                   target_logits,
                                                   rule,
                                                   draft_logits,
                                                   {temperature, top_k, top_p, min_p},
                                                   {draft_temperature, draft_top_k, draft_top_p, draft_min_p},
                                                   allowed,
                                                   draft_allowed,
                                                   seeds,
                                                   positions,
                                                   threshold,
                                                   alpha},
                                                  tokens, parents, cu_nodes, max_depth, draft_rows, problem);
  launch_all("accept_tree", problem, target_logits, scope);
  return result;
}

AcceptResult accept_chain(const Tensor& target_logits, const Tensor& draft_tokens, int64_t rule,
                          const OptionalTensor& draft_logits, const OptionalTensor& temperature,
                          const OptionalTensor& top_k, const OptionalTensor& top_p, const OptionalTensor& min_p,
                          const OptionalTensor& draft_temperature, const OptionalTensor& draft_top_k,
                          const OptionalTensor& draft_top_p, const OptionalTensor& draft_min_p,
                          const OptionalTensor& allowed, const OptionalTensor& draft_allowed,
                          const OptionalTensor& seeds, const OptionalTensor& positions, double threshold,
                          double alpha) {
  AcceptProblem problem{};
  const CudaScope scope(target_logits);
  const AcceptResult result = prepare_accept_chain({"accept_chain",
                                                    target_logits,
                                                    rule,
                                                    draft_logits,
                                                    {temperature, top_k, top_p, min_p},
                                                    {draft_temperature, draft_top_k, draft_top_p, draft_min_p},
                                                    allowed,
                                                    draft_allowed,
                                                    seeds,
                                                    positions,
                                                    threshold,
                                                    alpha},
                                                   draft_tokens, problem);
  launch_all("accept_chain", problem, target_logits, scope);
  return result;
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CUDA, library) {
  library.impl("accept_tree", TORCH_BOX(&pass_ext::accept_tree));
  library.impl("accept_chain", TORCH_BOX(&pass_ext::accept_chain));
}
