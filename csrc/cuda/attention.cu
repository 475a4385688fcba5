// torch.ops.pass_ext.attention_tree and attention_merge on CUDA: checks, grid, workspace, launch, registration. The
// kernels: cuda/attention.cuh and attention_group.cuh, compiled by the other attention_*.cu, attention_combine.cuh,
// attention_plain.cuh and attention_merge.cuh.
#include <torch/csrc/stable/library.h>

#include "cuda/attention_group_plan.cuh"
#include "cuda/attention_merge.cuh"
#include "cuda/attention_plain.cuh"
#include "cuda/attention_plan.cuh"
#include "cuda/counters.h"
#include "cuda/runtime.h"
#include "host/attention.h"

namespace pass_ext {
namespace {

// Refuses K and V in 16 or 8 bits whose rows do not lie at multiples of 16 bytes, so many `elements`: kernels copy 16
// bytes at a time. A dimension of size 1 may have any stride.
void check_aligned_rows(const char* argument, const KeyRows& rows, int64_t outers, int64_t slots, int64_t heads,
                        int64_t elements) {
  constexpr const char* op = "attention_tree";
  if (reinterpret_cast<uintptr_t>(rows.data) % 16 != 0)
    refuse(op, argument, " must start at a multiple of 16 bytes on CUDA, got an address ",
           reinterpret_cast<uintptr_t>(rows.data) % 16, " beyond one (call .clone() once, outside the decoding loop)");
  const struct {
    const char* name;
    int64_t size, stride;
  } dims[] = {{"first", outers, rows.outer}, {"slot", slots, rows.slot}, {"head", heads, rows.head}};
  for (const auto& dim : dims)
    if (dim.size > 1 && dim.stride % elements != 0)
      refuse(op, argument, " must have strides that are multiples of ", elements, " elements (16 bytes) on CUDA, got ",
             dim.stride, " in the ", dim.name, " dimension (call .contiguous() once, outside the decoding loop)");
}

void check_alignment(const AttentionProblem& problem, CodeType codes) {
  const int64_t elements = codes == CodeType::none ? 8 : 16;
  if (reinterpret_cast<uintptr_t>(problem.q) % 16 != 0)
    refuse("attention_tree", "q must start at a multiple of 16 bytes on CUDA, got an address ",
           reinterpret_cast<uintptr_t>(problem.q) % 16, " beyond one (call .clone())");
  check_aligned_rows("k_cache", problem.k_cache, problem.pages, problem.page_size, problem.kv_heads, elements);
  check_aligned_rows("v_cache", problem.v_cache, problem.pages, problem.page_size, problem.kv_heads, elements);
  if (!problem.k_new.data) return;
  check_aligned_rows("k_new", problem.k_new, 1, problem.rows, problem.kv_heads, elements);
  check_aligned_rows("v_new", problem.v_new, 1, problem.rows, problem.kv_heads, elements);
}

// The blocks of a kernel that run at once; asked once per kernel and device.
template <typename Shape, typename Kernel>
int64_t resident_blocks(const CudaScope& scope, Kernel* kernel, int threads) {
  static ResidentBlocks resident;
  return int64_t{scope.multiprocessors()} * resident.count(scope.device(), kernel, threads, Shape::kSharedBytes);
}

void attention_on_cuda(const AttentionProblem& problem, CodeType codes, const KeyLists& lists, bool batch_invariant,
                       const Tensor& q) {
  const bool is_plain = gpu::is_plain(problem, codes, lists, batch_invariant);
  const bool is_group = is_plain && gpu::has_group_kernel(problem, codes);
  if (!is_plain || is_group) check_alignment(problem, codes);
  if (problem.rows == 0 || problem.heads == 0) return;
  const CudaScope scope(q);
  // Memory of so many floats behind a spare counter slot, and the counter of tasks.
  const auto with_workspace = [&](int64_t floats, const auto& run) {
    constexpr int64_t kSlotFloats = kSlotBytes / sizeof(float);
    const Tensor workspace = empty_of_shape("attention_tree", q, {kSlotFloats + floats}, ScalarType::Float);
    float* const memory = output_of<float>(workspace);
    run(memory + kSlotFloats,
        CounterSlots::of_device(scope.device()).slot_for("attention_tree", scope.stream(), memory));
  };
  if (is_group) {
    const int64_t resident = gpu::with_group_shape(problem, codes, [&](auto shape) {
      using Shape = decltype(shape);
      return resident_blocks<Shape>(scope, gpu::group_kernel_of<Shape>(), gpu::kGroupThreads);
    });
    const gpu::GroupPlan plan = gpu::plan_group_attention(problem, codes, lists, resident);
    with_workspace(plan.workspace, [&](float* memory, int32_t* counter) {
      gpu::launch_group_attention(problem, codes, lists, plan, memory, counter, scope.stream());
    });
  } else if (is_plain) {
    const gpu::PlainPlan plan = gpu::plan_plain_attention(problem, lists, scope.multiprocessors());
    with_workspace(plan.workspace, [&](float* memory, int32_t* counter) {
      gpu::launch_plain_attention(problem, codes, lists, plan, memory, counter, scope.stream());
    });
  } else {
    const int64_t resident = gpu::with_attention_shape(problem, codes, [&](auto shape) {
      using Shape = decltype(shape);
      return resident_blocks<Shape>(scope, gpu::attention_kernel_of<Shape>(), gpu::kAttentionThreads);
    });
    const gpu::AttentionPlan plan =
        gpu::plan_attention(problem, codes, between(resident, 1, gpu::kMostBlocks), scope.multiprocessors());
    const Tensor workspace = empty_of_shape("attention_tree", q, {plan.workspace}, ScalarType::Float);
    gpu::launch_attention(problem, codes, plan, output_of<float>(workspace), scope.stream());
  }
  check_launch("attention_tree");
}

void merge_on_cuda(const MergeProblem& problem, const Tensor& out) {
  const CudaScope scope(out);
  gpu::launch_merge(problem, scope.stream());
  check_launch("attention_merge");
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("attention_tree", TORCH_BOX(&pass_ext::attention_tree<pass_ext::attention_on_cuda>));
  library.impl("attention_merge", TORCH_BOX(&pass_ext::attention_merge<pass_ext::merge_on_cuda>));
}
