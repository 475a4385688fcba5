// torch.ops.pass_ext.tree_prepare and tree_mask on the CPU: values checked, parallel split, registration. The mask's
// inner loops: cpu/tree_kernels-inl.h.
#include "host/tree.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>

#include "cpu/workers.h"

#define PASS_EXT_KERNELS "cpu/tree_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

// Below this many bytes a second thread costs more than it saves.
constexpr int64_t kBytesPerTask = 128 * 1024;

// A request's bits and depths in one loop, because parents come first. It stops at the first malformed parent and
// returns its flat index, else -1.
template <int known_words>
int64_t prepare_request(const TreePrepare& problem, int64_t request) {
  const int64_t words = known_words > 0 ? known_words : problem.words;
  const int64_t first = problem.cu_nodes[request];
  const int32_t nodes = problem.cu_nodes[request + 1] - problem.cu_nodes[request];
  const int32_t* parents = problem.parents + first;
  int64_t* visible = problem.visible + first * words;
  int32_t* depths = problem.depths + first;
  for (int32_t i = 0; i < nodes; ++i) {
    const int32_t parent = parents[i];
    int64_t* row = visible + i * words;
    if (parent >= i || parent < -1) return first + i;
    for (int64_t word = 0; word < words; ++word) row[word] = parent < 0 ? 0 : visible[parent * words + word];
    row[i / 64] |= static_cast<int64_t>(uint64_t{1} << (i % 64));
    depths[i] = parent < 0 ? 0 : depths[parent] + 1;
  }
  return -1;
}

int64_t prepare_requests(const TreePrepare& problem, int64_t begin, int64_t end) {
  for (int64_t request = begin; request < end; ++request) {
    const int64_t bad =
        problem.words == 1 ? prepare_request<1>(problem, request) : prepare_request<0>(problem, request);
    if (bad >= 0) return bad;
  }
  return -1;
}

void clear_rows(const TreePrepare& problem, int64_t begin, int64_t end) {
  if (begin >= end) return;
  std::fill(problem.visible + begin * problem.words, problem.visible + end * problem.words, 0);
  std::fill(problem.depths + begin, problem.depths + end, 0);
}

[[noreturn]] void refuse_parent(const TreePrepare& problem, int64_t index) {
  const int64_t request =
      std::upper_bound(problem.cu_nodes, problem.cu_nodes + problem.requests + 1, index) - problem.cu_nodes - 1;
  refuse("tree_prepare", "parents must be -1 or an earlier node of the same request, got ", problem.parents[index],
         " at flat index ", index, ", node ", index - problem.cu_nodes[request], " of request ", request);
}

void prepare_on_cpu(const TreePrepare& problem, const Tensor&) {
  check_bounds("tree_prepare", problem.cu_nodes, problem.requests, problem.rows, problem.max_nodes);
  clear_rows(problem, 0, problem.requests > 0 ? problem.cu_nodes[0] : problem.rows);
  const int64_t row_bytes = problem.words * 8 + 4, average = problem.rows / std::max<int64_t>(1, problem.requests);
  const int64_t requests_per_task = std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, row_bytes * average));
  std::atomic<int64_t> bad{INT64_MAX};
  const auto run = [&](int64_t begin, int64_t end) {
    const int64_t malformed = prepare_requests(problem, begin, end);
    int64_t former = bad;
    while (malformed >= 0 && malformed < former && !bad.compare_exchange_weak(former, malformed)) {
    }
  };
  for_ranges(problem.requests, requests_per_task, run);
  if (bad != INT64_MAX) refuse_parent(problem, bad);
  if (problem.requests > 0) clear_rows(problem, problem.cu_nodes[problem.requests], problem.rows);
}

void check_columns(const int32_t* cu_nodes, const int32_t* prefix_lens, int64_t requests, int64_t kv_len) {
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t nodes = cu_nodes[b + 1] - cu_nodes[b], prefix = prefix_lens[b];
    if (nodes == 0) continue;
    if (prefix < 0) refuse("tree_mask", "prefix_lens must not be negative, got ", prefix, " at ", b);
    if (prefix + nodes > kv_len)
      refuse("tree_mask", "kv_len must be at least prefix_lens + nodes of every request, got ", kv_len,
             ", but request ", b, " has ", prefix, " + ", nodes);
  }
}

struct MaskOnCpu {
  template <typename T>
  static void run(const TreeMask<T>& problem, const Tensor&) {
    check_bounds("tree_mask", problem.cu_nodes, problem.requests, problem.rows, problem.max_nodes);
    check_columns(problem.cu_nodes, problem.prefix_lens, problem.requests, problem.kv_len);
    const int64_t rows = problem.requests * problem.max_nodes;
    const int64_t row_bytes = std::max<int64_t>(1, problem.kv_len * sizeof(T));
    const int64_t rows_per_task = std::max<int64_t>(1, kBytesPerTask / row_bytes);
    for_ranges(rows, rows_per_task,
               [&](int64_t begin, int64_t end) { PASS_EXT_AT_ISA(mask_rows(problem, begin, end)); });
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("tree_prepare", TORCH_BOX(&pass_ext::tree_prepare<pass_ext::prepare_on_cpu>));
  library.impl("tree_mask", TORCH_BOX(&pass_ext::tree_mask<pass_ext::MaskOnCpu>));
}
