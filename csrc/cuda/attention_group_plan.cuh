// The host's plan and launch of attention by the heads of a group, attention_group.cuh: for which problems there is a
// kernel, how many blocks run, and the memory that they share.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/attention.h"
#include "core/attention_lists.h"
#include "core/quantize.h"
#include "cuda/attention_group_tile.cuh"
#include "cuda/attention_places.cuh"
#include "cuda/attention_shares.cuh"
#include "cuda/attention_tasks_plan.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// True if there is a kernel for the type and the widths: the batch does not decide. A tile of fragments has 16 rows;
// even one head alone has its keys from memory no sooner than their products are done. For codes there are those of
// the latents that models store in 8 bits, and of heads of 128.
inline bool has_group_kernel(const AttentionProblem& problem, CodeType codes) {
  const auto has = [&](int32_t key_dim, int32_t value_dim) {
    return problem.head_dim == key_dim && problem.value_dim == value_dim;
  };
  if (codes != CodeType::none)
    return (problem.type == FloatType::bfloat16 && (has(576, 512) || has(128, 128))) ||
           (problem.type == FloatType::float16 && has(576, 512));
  return problem.type != FloatType::float32 &&
         (has(576, 512) || has(512, 512) || has(256, 256) || has(192, 128) || has(128, 128) || has(64, 64));
}

// use(GroupShape), for problems that have one.
template <typename Use>
decltype(auto) with_group_shape(const AttentionProblem& problem, CodeType codes, const Use& use) {
  const auto with_widths = [&](auto element, auto key_dim, auto value_dim, auto stored) -> decltype(auto) {
    using T = decltype(element);
    using Stored = decltype(stored);
    constexpr int kKeyDim = decltype(key_dim)::value, kValueDim = decltype(value_dim)::value;
    if constexpr (kValueDim == 512)  // 128 heads of a latent; others have more than 16 heads a key only rarely
      if (problem.group > 16) return use(GroupShape<T, kKeyDim, kValueDim, 2, Stored>{});
    return use(GroupShape<T, kKeyDim, kValueDim, 1, Stored>{});
  };
  const auto with_type = [&](auto element) -> decltype(auto) {
    using std::integral_constant;
    using std::is_same_v;
    using T = decltype(element);
    if (codes != CodeType::none) {
      if constexpr (is_same_v<T, bfloat16>)
        if (problem.head_dim == 128)
          return with_widths(element, integral_constant<int, 128>{}, integral_constant<int, 128>{}, uint8_t{});
      return with_widths(element, integral_constant<int, 576>{}, integral_constant<int, 512>{}, uint8_t{});
    }
    switch (problem.head_dim) {
      case 576: return with_widths(element, integral_constant<int, 576>{}, integral_constant<int, 512>{}, element);
      case 512: return with_widths(element, integral_constant<int, 512>{}, integral_constant<int, 512>{}, element);
      case 256: return with_widths(element, integral_constant<int, 256>{}, integral_constant<int, 256>{}, element);
      case 192: return with_widths(element, integral_constant<int, 192>{}, integral_constant<int, 128>{}, element);
      case 128: return with_widths(element, integral_constant<int, 128>{}, integral_constant<int, 128>{}, element);
      default: return with_widths(element, integral_constant<int, 64>{}, integral_constant<int, 64>{}, element);
    }
  };
  return problem.type == FloatType::bfloat16 ? with_type(bfloat16{}) : with_type(float16{});
}

struct GroupPlan {
  TaskGrid grid;
  int64_t parts, workspace;  // floats; of the parts alone
};

// `resident`: blocks of the kernel that run at once.
inline GroupPlan plan_group_attention(const AttentionProblem& problem, CodeType codes, const KeyLists& lists,
                                      int64_t resident) {
  return with_group_shape(problem, codes, [&](auto shape) {
    using Shape = decltype(shape);
    GroupPlan plan{};
    const int32_t tiles = problem.kv_heads * ((problem.group + Shape::kRows - 1) / Shape::kRows);
    plan.grid = plan_tasks(problem, lists, tiles, kGroupUnit, resident);
    plan.parts = plan.grid.most_parts * problem.heads * Shape::kPartStride;
    plan.workspace = plan.grid.floats(problem.rows) + plan.parts;
    if (plan.grid.is_split) plan.workspace += plan.grid.blocks * Shape::kRows * Shape::kValueDim;
    return plan;
  });
}

inline bool are_same_rows(const KeyRows& k, const KeyRows& v, int32_t heads) {
  return k.data == v.data && k.outer == v.outer && k.slot == v.slot && (k.head == v.head || heads == 1);
}

// `counter`: zero before and after.
inline void launch_group_attention(const AttentionProblem& problem, CodeType codes, const KeyLists& lists,
                                   const GroupPlan& plan, float* workspace, int32_t* counter, Stream stream) {
  float* const parts = workspace + plan.grid.floats(problem.rows);
  const GroupAttention group{problem,
                             lists,
                             are_same_rows(problem.k_cache, problem.v_cache, problem.kv_heads) &&
                                 are_same_rows(problem.k_new, problem.v_new, problem.kv_heads),
                             codes,
                             plan.grid.tasks_in(workspace, problem.rows, counter),
                             parts,
                             parts + plan.parts};
  launch_plan(problem, lists, plan.grid, group.tasks, stream);
  with_group_shape(problem, codes, [&](auto shape) {
    using Shape = decltype(shape);
    launch("attention_tree", group_kernel_of<Shape>(),
           LaunchShape{{plan.grid.blocks}, {kGroupThreads}, Shape::kSharedBytes}, stream, group);
  });
  if (plan.grid.is_split) launch_add_parts(problem, group.tasks, parts, stream);
}

}  // namespace pass_ext::gpu
