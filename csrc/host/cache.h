// Checks cache_commit_'s arguments, the same on every device, and packs them into the structs of core/cache.h. Tensors
// of the same layout make a group, which takes one launch.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "core/cache.h"
#include "core/tree.h"
#include "host/packed.h"

namespace pass_ext {

using TensorList = std::vector<Tensor>;

// The layout of a cache tensor and of its new rows: everything that decides whether they are valid and how rows move.
struct TensorLayout {
  int64_t device, dtype, sizes[4], strides[4];
  int64_t new_device, new_dtype, new_sizes[3], new_strides[3];

  bool operator==(const TensorLayout& other) const { return std::memcmp(this, &other, sizeof other) == 0; }
};

struct CommitGroup {
  TensorLayout layout;
  CacheShape shape;
  int64_t example;  // the index in `caches` of a tensor of the group
  std::vector<void*> caches;
  std::vector<const void*> fresh;  // empty in place
};

struct CommitProblem {
  CommitStep step;
  std::vector<CommitGroup> groups;
};

// Tensors of equal layout as a list, or as one tensor with a dimension in front.
struct TensorStack {
  const TensorList& list;
  bool is_stacked;

  // dims: of one of them
  TensorStack(const TensorList& list, int64_t dims)
      : list(list), is_stacked(list.size() == 1 && list[0].dim() == dims + 1) {}

  size_t size() const { return is_stacked ? static_cast<size_t>(list[0].size(0)) : list.size(); }
  const Tensor& tensor(size_t index) const { return list[is_stacked ? 0 : index]; }
  // The address of an item's first element, items in order. T: void, or const void for reading only.
  template <typename T>
  T* address(const char* op, const char* name, size_t index) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    const int64_t item = static_cast<int64_t>(index);
    if (!is_stacked) return address_of<T>(op, ItemName{name, item}, list[index]);
    if (index == 0 || front_ == nullptr)
      front_ = const_cast<void*>(static_cast<const void*>(address_of<T>(op, ItemName{name, 0}, list[0])));
    return static_cast<Byte*>(front_) + item * list[0].stride(0) * static_cast<int64_t>(list[0].element_size());
  }

 private:
  mutable void* front_ = nullptr;  // checked
};

// The layout of an item of a stack.
template <int dims>
void read_layout(const Tensor& tensor, int64_t& device, int64_t& dtype, int64_t (&sizes)[dims],
                 int64_t (&strides)[dims]) {
  int32_t type;  // torch's number: not every dtype has a name in the stable ABI
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &type));
  dtype = type;
  device = int64_t{device_type_of(tensor)} << 32 | static_cast<uint32_t>(tensor.get_device_index());
  const int64_t front = tensor.dim() - dims;
  std::copy_n(tensor.sizes().data() + front, dims, sizes);
  std::copy_n(tensor.strides().data() + front, dims, strides);
}

// Refuses a cache tensor to which rows cannot be committed, and new rows that do not fit it.
inline void check_commit_tensors(const CommitStep& step, int64_t index, const TensorLayout& layout, const Tensor& cache,
                                 const Tensor* fresh, const Tensor& first) {
  constexpr const char* op = "cache_commit_";
  const std::string cache_name = "caches[" + std::to_string(index) + "]";
  const std::string fresh_name = "new[" + std::to_string(index) + "]";
  const char *argument = cache_name.c_str(), *fresh_argument = fresh_name.c_str();
  check_same_device(op, argument, cache, "caches[0]", first);
  check_contiguous_rows(op, argument, cache);
  for (int i = 0; i < 4; ++i) {
    if (layout.sizes[i] > 1 && layout.strides[i] == 0 && cache.numel() > 0)
      refuse(op, argument, " must not be expanded, got ", describe(cache), " with stride 0 in dimension ", i);
    if (layout.sizes[i] > INT32_MAX)
      refuse(op, argument, " must have less than 2^31 elements in every dimension, got ", describe(cache));
  }
  const int64_t front = cache.dim() - 4;
  if (!step.block_table)
    check_size(op, argument, cache, front, step.requests, "the requests of cu_nodes; no block_table was given");
  else if (layout.sizes[1] < 1)
    refuse(op, argument, " must have pages of at least 1 slot, got ", describe(cache));
  else if (step.table_width > INT32_MAX / layout.sizes[1])
    refuse(op, argument, " must have less than 2^31 slots in block_table's ", step.table_width, " pages, got ",
           describe(cache));
  if (!fresh) return;
  check_same_device(op, fresh_argument, *fresh, "caches[0]", first);
  if (layout.dtype != layout.new_dtype)
    refuse(op, fresh_argument, " must have the dtype of ", argument, " (", describe(cache), "), got ",
           describe(*fresh));
  const int64_t new_front = fresh->dim() - 3;
  check_size(op, fresh_argument, *fresh, new_front, step.new_rows, "the packed nodes of new[0]");
  check_size(op, fresh_argument, *fresh, new_front + 1, layout.sizes[2], "the heads of the cache");
  check_size(op, fresh_argument, *fresh, new_front + 2, layout.sizes[3], "the head size D of the cache");
  check_contiguous_rows(op, fresh_argument, *fresh);
}

inline CacheShape shape_of(const TensorLayout& layout, int64_t bytes) {
  return {layout.strides[0] * bytes,
          layout.strides[1] * bytes,
          layout.strides[2] * bytes,
          layout.new_strides[0] * bytes,
          layout.new_strides[1] * bytes,
          static_cast<int32_t>(layout.sizes[0]),
          static_cast<int32_t>(layout.sizes[1]),
          layout.sizes[2],
          layout.sizes[3] * bytes};
}

// Refuses the same memory twice: its rows would move twice, in an undefined order.
inline void check_all_differ(const std::vector<CommitGroup>& groups, size_t count) {
  std::vector<void*> all;
  all.reserve(count);
  for (const CommitGroup& group : groups)
    if (group.shape.outers > 0 && group.shape.slots > 0 && group.shape.heads > 0 && group.shape.head_bytes > 0)
      all.insert(all.end(), group.caches.begin(), group.caches.end());
  std::sort(all.begin(), all.end());
  if (std::adjacent_find(all.begin(), all.end()) != all.end())
    refuse("cache_commit_", "caches must be different tensors, got the same memory twice (pass a cache that layers ",
           "share, or one that is a part of another, once)");
}

inline CommitProblem prepare_commit(const TensorList& cache_list, const Tensor& prefix_lens, const Tensor& cu_nodes,
                                    const Tensor& path, const Tensor& num_accepted, const TensorList& new_list,
                                    const OptionalTensor& block_table) {
  constexpr const char* op = "cache_commit_";
  const TensorStack caches(cache_list, 4), fresh(new_list, 3);
  if (!new_list.empty() && fresh.size() != caches.size())
    refuse(op, "new must have one tensor for each of the ", caches.size(), " caches, got ", fresh.size());
  CommitProblem problem{};
  if (caches.size() == 0) return problem;
  const Tensor& first = caches.tensor(0);
  CommitStep& step = problem.step;
  const Bounds bounds = check_cu_nodes(op, cu_nodes, "caches[0]", first);
  step.cu_nodes = bounds.cu_nodes;
  step.requests = bounds.requests;
  step.prefix_lens = check_integers(op, "prefix_lens", prefix_lens, "caches[0]", first);
  check_size(op, "prefix_lens", prefix_lens, 0, step.requests, "the requests of cu_nodes");
  step.num_accepted = check_integers(op, "num_accepted", num_accepted, "caches[0]", first);
  check_size(op, "num_accepted", num_accepted, 0, step.requests, "the requests of cu_nodes");
  check_dtype(op, "path", path, {ScalarType::Int});
  check_dim(op, "path", path, 2, "[B, A]");
  check_size(op, "path", path, 0, step.requests, "the requests of cu_nodes");
  check_same_device(op, "path", path, "caches[0]", first);
  check_contiguous_rows(op, "path", path);
  if (path.size(1) > kMaxTreeNodes)
    refuse(op, "path must have at most ", kMaxTreeNodes, " columns, got ", describe(path));
  step.path = data_of<int32_t>(op, "path", path);
  step.path_stride = path.stride(0);
  step.width = static_cast<int32_t>(path.size(1));
  step.in_place = new_list.empty();
  if (block_table) {
    step.block_table = check_block_table(op, *block_table, step.requests, "caches[0]", first);
    step.table_stride = block_table->stride(0);
    step.table_width = block_table->size(1);
  }

  for (size_t i = 0; i < caches.size(); ++i) {
    const Tensor& cache = caches.tensor(i);
    const Tensor* rows = step.in_place ? nullptr : &fresh.tensor(i);
    if (!caches.is_stacked && cache.dim() != 4)
      refuse(op, "caches[", i, "] must have shape ", block_table ? "[pages, page, Hkv, D]" : "[B, S, Hkv, D]", ", got ",
             describe(cache));
    if (rows && !fresh.is_stacked && rows->dim() != 3)
      refuse(op, "new[", i, "] must have shape [N, Hkv, D], got ", describe(*rows));
    const bool is_new = i == 0 || !caches.is_stacked || (rows && !fresh.is_stacked);  // else as the item before
    auto group = is_new ? problem.groups.begin() : problem.groups.end() - 1;
    if (is_new) {
      TensorLayout layout{};
      read_layout(cache, layout.device, layout.dtype, layout.sizes, layout.strides);
      if (rows) {
        read_layout(*rows, layout.new_device, layout.new_dtype, layout.new_sizes, layout.new_strides);
        if (i == 0) step.new_rows = layout.new_sizes[0];
      }
      while (group != problem.groups.end() && !(group->layout == layout)) ++group;
      if (group == problem.groups.end()) {
        check_commit_tensors(step, static_cast<int64_t>(i), layout, cache, rows, first);
        const int64_t bytes = static_cast<int64_t>(cache.element_size());
        problem.groups.push_back({layout, shape_of(layout, bytes), static_cast<int64_t>(i), {}, {}});
        group = problem.groups.end() - 1;
        group->caches.reserve(caches.size() - i);
        if (rows) group->fresh.reserve(caches.size() - i);
      }
    }
    group->caches.push_back(caches.address<void>(op, "caches", i));
    if (rows) group->fresh.push_back(fresh.address<const void>(op, "new", i));
  }
  check_all_differ(problem.groups, caches.size());
  return problem;
}

}  // namespace pass_ext
