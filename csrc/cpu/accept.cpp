// torch.ops.pass_ext.accept_tree and accept_chain on the CPU: parallel split and registration. The rules:
// core/accept.h, the rows they work on: cpu/rows.h. Called by torch's dispatcher.
#include <torch/csrc/stable/library.h>

#include "cpu/rows.h"
#include "cpu/threads.h"
#include "host/accept.h"

namespace pass_ext {
namespace {

void accept_all(const AcceptProblem& problem) {
  for_each_request(problem.requests, [&](int64_t index, bool alone) {
    AcceptWalk<CpuRows>(thread_rows(alone), request_of(problem, index)).run();
  });
}

// On a GPU a tree that branches sets its status; here it can be told at once.
void check_is_chain(const AcceptProblem& problem) {
  for (int64_t request = 0; request < problem.requests; ++request)
    for (int64_t node = problem.cu_nodes[request]; node < problem.cu_nodes[request + 1]; ++node) {
      if (node < 0 || node >= problem.nodes) return;
      const int64_t own = node - problem.cu_nodes[request], parent = problem.parents[node];
      if (parent >= 0 && parent < own && parent != own - 1)
        refuse("accept_tree", "rule 'block' fits chains only, but in request ", request, " node ", own,
               " hangs below node ", parent, " (traversal is its form for trees)");
    }
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
  if (problem.rule == Rule::block) check_is_chain(problem);
  accept_all(problem);
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
  accept_all(problem);
  return result;
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CPU, library) {
  library.impl("accept_tree", TORCH_BOX(&pass_ext::accept_tree));
  library.impl("accept_chain", TORCH_BOX(&pass_ext::accept_chain));
}
