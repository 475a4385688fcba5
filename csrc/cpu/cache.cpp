// torch.ops.pass_ext.cache_commit_ on the CPU: checks of the values, then a memcpy per tensor, request, head and row.
// Which row goes where: core/cache.h. Called by torch's dispatcher.
#include "host/cache.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

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

// Refuses what does not fit the tree or the path, which is the same for all tensors.
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
    refuse(kOp, "request ", request, " needs slot ", slot, " (prefix_lens ", step.prefix_lens[request], "), caches[",
           group.example, "] has ", slots);
  const int64_t place = slot / group.shape.slots;
  refuse(kOp, "block_table must name pages below ", group.shape.outers, " (those of caches[", group.example, "]), got ",
         step.block_table[request * step.table_stride + place], " at [", request, ", ", place, "]");
}

GroupMoves find_moves(const CommitStep& step, const CommitGroup& group) {
  GroupMoves found;
  for (int64_t b = 0; b < step.requests; ++b) {
    const RequestCommit request = commit_of(step, b);
    RequestMoves own{found.moves.size(), 0, false};
    for (int32_t j = 0; j < request.rows; ++j) {
      const int64_t node = node_of(step, request, j);
      if (node < 0) continue;
      check_slot(step, group, b, request.prefix + j);
      if (step.in_place) check_slot(step, group, b, request.prefix + node);
      const RowMove move = move_of(step, group.shape, request, j);
      if (move.from < 0) continue;
      found.moves.push_back(move);
      own.goes_back |= step.in_place && node < j;
    }
    own.end = found.moves.size();
    if (own.end > own.begin) found.requests.push_back(own);
  }
  return found;
}

// The rows of one request in one head of one tensor, which lie close together; all heads at once where they touch.
struct Strip {
  char* to;
  const char* from;
  const RowMove* moves;
  size_t count;
  bool goes_back;
};

// The strips of a group, numbered request by request within a tensor.
class Strips {
 public:
  Strips(const CommitGroup& group, const GroupMoves& found, bool in_place)
      : group_(group), found_(found), in_place_(in_place) {
    const CacheShape& shape = group.shape;
    source_head_ = in_place ? shape.head : shape.fresh_head;
    const bool merged = shape.head == shape.head_bytes && source_head_ == shape.head_bytes;
    heads_ = merged ? 1 : shape.heads;
    bytes_ = static_cast<size_t>(merged ? shape.heads * shape.head_bytes : shape.head_bytes);
  }

  size_t bytes() const { return bytes_; }  // of one row
  int64_t count() const { return static_cast<int64_t>(group_.caches.size() * found_.requests.size()) * heads_; }

  Strip operator[](int64_t index) const {
    const int64_t requests = static_cast<int64_t>(found_.requests.size());
    const int64_t head = index % heads_, tensor = index / heads_ / requests;
    const RequestMoves& own = found_.requests[index / heads_ % requests];
    char* const cache = static_cast<char*>(group_.caches[tensor]);
    const char* const source = in_place_ ? cache : static_cast<const char*>(group_.fresh[tensor]);
    return {cache + head * group_.shape.head, source + head * source_head_, found_.moves.data() + own.begin,
            own.end - own.begin, own.goes_back};
  }

 private:
  const CommitGroup& group_;
  const GroupMoves& found_;
  bool in_place_;
  int64_t source_head_, heads_;
  size_t bytes_;
};

// Rows that nobody has touched since the last step come from memory; what follows in a row the processor sees coming.
void prefetch(const Strip& strip, size_t bytes) {
  constexpr size_t kMostBytes = 256, kLine = 64;
  for (size_t i = 0; i < strip.count; ++i)
    for (size_t byte = 0; byte < std::min(bytes, kMostBytes); byte += kLine) {
      __builtin_prefetch(strip.from + strip.moves[i].from + byte);
      __builtin_prefetch(strip.to + strip.moves[i].to + byte, 1);
    }
}

void move_rows(const Strip& strip, size_t bytes) {
  if (!strip.goes_back) {
    for (size_t i = 0; i < strip.count; ++i)
      std::memcpy(strip.to + strip.moves[i].to, strip.from + strip.moves[i].from, bytes);
    return;
  }
  std::vector<char> staged(strip.count * bytes);
  for (size_t i = 0; i < strip.count; ++i)
    std::memcpy(staged.data() + i * bytes, strip.from + strip.moves[i].from, bytes);
  for (size_t i = 0; i < strip.count; ++i) std::memcpy(strip.to + strip.moves[i].to, staged.data() + i * bytes, bytes);
}

void commit_group(const CommitGroup& group, const GroupMoves& found, bool in_place) {
  const Strips strips(group, found, in_place);
  const int64_t count = strips.count();
  if (count == 0 || strips.bytes() == 0) return;
  const auto run = [&](int64_t begin, int64_t end) {
    Strip strip = strips[begin];
    for (int64_t i = begin; i < end; ++i) {
      const Strip next = i + 1 < end ? strips[i + 1] : Strip{};
      prefetch(next, strips.bytes());
      move_rows(strip, strips.bytes());
      strip = next;
    }
  };
  const int64_t strip_bytes = static_cast<int64_t>(found.moves.size() * strips.bytes() / found.requests.size());
  const int64_t strips_per_task = std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, strip_bytes));
  if (count <= strips_per_task)
    run(0, count);
  else
    torch::stable::parallel_for(0, count, strips_per_task, run);
}

void cache_commit(const TensorList& caches, const Tensor& prefix_lens, const Tensor& cu_nodes, const Tensor& path,
                  const Tensor& num_accepted, const std::optional<TensorList>& fresh,
                  const OptionalTensor& block_table) {
  const CommitProblem problem = prepare_commit(caches, prefix_lens, cu_nodes, path, num_accepted, fresh, block_table);
  if (problem.groups.empty()) return;
  check_path(problem.step);
  std::vector<GroupMoves> found;  // all of them, and with that all checks, before anything is written
  for (const CommitGroup& group : problem.groups) found.push_back(find_moves(problem.step, group));
  for (size_t i = 0; i < found.size(); ++i) commit_group(problem.groups[i], found[i], problem.step.in_place);
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(pass_ext, CPU, library) { library.impl("cache_commit_", TORCH_BOX(&pass_ext::cache_commit)); }
