// torch.ops.pass_ext.cache_commit_ on the CPU: checks of the values, then a memcpy per tensor, request, head and row.
// Sources and targets of rows: core/cache.h.
#include "host/cache.h"
#include "cpu/workers.h"

#include <torch/csrc/stable/library.h>

namespace pass_ext {
namespace {

constexpr const char* kOp = "cache_commit_";

// Below this many bytes a second thread costs more than it saves.
constexpr int64_t kBytesPerTask = 2 * 1024 * 1024;

// The rows of one request that move, in the order of the path: moves[begin] … moves[end - 1].
struct RequestMoves {
  size_t begin, end;
  bool goes_back;  // some source lies before its target: read all, then write
};

struct GroupMoves {
  std::vector<RowMove> moves;
  std::vector<RequestMoves> requests;
};

// Refuses lengths, counts and paths that do not fit the tree or the path. They are the same for all tensors.
void check_path(const CommitStep& step) {
  const int64_t rows = step.in_place ? INT32_MAX : step.new_rows;
  check_bounds(kOp, step.cu_nodes, step.requests, rows, rows);
  for (int64_t b = 0; b < step.requests; ++b) {
    const int64_t nodes = step.cu_nodes[b + 1] - step.cu_nodes[b], accepted = step.num_accepted[b];
    if (nodes == 0) continue;
    if (step.prefix_lens[b] < 0) refuse(kOp, "prefix_lens must not be negative, got ", step.prefix_lens[b], " at ", b);
    if (accepted < 0 || accepted >= step.width)
      refuse(kOp, "num_accepted must be in [0, ", step.width, ") (path has ", step.width, " columns), got ", accepted,
             " at ", b);
    for (int64_t j = 0; j <= accepted; ++j) {
      const int64_t node = step.path[b * step.path_stride + j];
      if (node < -1 || node >= nodes)
        refuse(kOp, "path must be in [-1, ", nodes, ") (the nodes of request ", b, "), got ", node, " at [", b, ", ", j,
               "]");
    }
  }
}

// Refuses a slot that the cache does not have.
void check_slot(const CommitStep& step, const CommitGroup& group, int64_t request, int64_t slot) {
  if (offset_of_slot(step, group.shape, request, slot) >= 0) return;
  const int64_t slots = group.shape.slots * (step.block_table ? step.table_width : 1);
  if (slot >= slots)
    refuse(kOp, "caches[", group.example, "] must have slot ", slot, " for request ", request, " (prefix_lens ",
           step.prefix_lens[request], "), got ", slots, " slots");
  const int64_t place = slot / group.shape.slots;
  refuse(kOp, "block_table must name pages below ", group.shape.outers, " (those of caches[", group.example, "]), got ",
         step.block_table[request * step.table_stride + place], " at [", request, ", ", place, "]");
}

GroupMoves find_moves(const CommitStep& step, const CommitGroup& group) {
  GroupMoves result;
  for (int64_t b = 0; b < step.requests; ++b) {
    const RequestCommit request = commit_of(step, b);
    RequestMoves request_moves{result.moves.size(), 0, false};
    for (int32_t j = 0; j < request.rows; ++j) {
      const int64_t node = node_of(step, request, j);
      if (node < 0) continue;
      check_slot(step, group, b, request.prefix + j);
      if (step.in_place) check_slot(step, group, b, request.prefix + node);
      const RowMove move = move_of(step, group.shape, request, j);
      if (move.from < 0) continue;
      result.moves.push_back(move);
      request_moves.goes_back |= step.in_place && node < j;
    }
    request_moves.end = result.moves.size();
    if (request_moves.end > request_moves.begin) result.requests.push_back(request_moves);
  }
  return result;
}

// Moves one request's rows of one tensor, head by head, so that neighbouring slots of a head are written one after the
// other.
void move_rows(char* cache, const char* source, const CacheShape& shape, const RowMove* moves, size_t count,
               bool in_place, bool goes_back) {
  const int64_t source_head = in_place ? shape.head : shape.fresh_head;
  const bool merged = shape.head == shape.head_bytes && source_head == shape.head_bytes;
  const int64_t heads = merged ? 1 : shape.heads;
  const size_t bytes = static_cast<size_t>(merged ? shape.heads * shape.head_bytes : shape.head_bytes);
  std::vector<char> staged(goes_back ? count * bytes : 0);
  for (int64_t head = 0; head < heads; ++head) {
    char* const to = cache + head * shape.head;
    const char* const from = source + head * source_head;
    if (!goes_back) {
      for (size_t i = 0; i < count; ++i) std::memcpy(to + moves[i].to, from + moves[i].from, bytes);
      continue;
    }
    for (size_t i = 0; i < count; ++i) std::memcpy(staged.data() + i * bytes, from + moves[i].from, bytes);
    for (size_t i = 0; i < count; ++i) std::memcpy(to + moves[i].to, staged.data() + i * bytes, bytes);
  }
}

void commit_group(const CommitGroup& group, const GroupMoves& group_moves, bool in_place) {
  const int64_t requests = static_cast<int64_t>(group_moves.requests.size());
  const int64_t tasks = static_cast<int64_t>(group.caches.size()) * requests;
  const int64_t row_bytes = group.shape.heads * group.shape.head_bytes;
  if (tasks == 0 || row_bytes == 0) return;
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t tensor = task / requests;
      const RequestMoves& request_moves = group_moves.requests[task % requests];
      char* const cache = static_cast<char*>(group.caches[tensor]);
      const char* const source = in_place ? cache : static_cast<const char*>(group.fresh[tensor]);
      move_rows(cache, source, group.shape, group_moves.moves.data() + request_moves.begin,
                request_moves.end - request_moves.begin, in_place, request_moves.goes_back);
    }
  };
  const int64_t task_bytes = static_cast<int64_t>(group_moves.moves.size()) * row_bytes / requests;
  const int64_t tasks_per_thread = std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, task_bytes));
  for_ranges(tasks, tasks_per_thread, run);
}

void cache_commit(const TensorList& caches, const Tensor& prefix_lens, const Tensor& cu_nodes, const Tensor& path,
                  const Tensor& num_accepted, const TensorList& fresh, const OptionalTensor& block_table) {
  const CommitProblem problem = prepare_commit(caches, prefix_lens, cu_nodes, path, num_accepted, fresh, block_table);
  if (problem.groups.empty()) return;
  check_path(problem.step);
  std::vector<GroupMoves> moves;  // complete, with all checks, before anything is written
  for (const CommitGroup& group : problem.groups) moves.push_back(find_moves(problem.step, group));
  for (size_t i = 0; i < moves.size(); ++i) commit_group(problem.groups[i], moves[i], problem.step.in_place);
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("cache_commit_", TORCH_BOX(&pass_ext::cache_commit));
}
