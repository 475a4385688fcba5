// torch.ops.pass_ext.attention_tree and attention_merge on the CPU: checks, tasks and their threads, registration. The
// sums: cpu/attention_kernels-inl.h.
#include "host/attention.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "cpu/attention.h"
#include "cpu/buffer.h"
#include "cpu/unit.h"
#include "cpu/workers.h"

#define PASS_EXT_KERNELS "cpu/attention_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

constexpr double kAloneBelow = 4e6;       // multiplications; below, one thread ends before others have woken up
constexpr double kReadyAloneBelow = 2e4;  // if others need not wake up

// Rows of one request and key head. The chunks of their keys are tasks; the last task to end merges them. Where the
// keys are cut depends on their columns alone, so neither the batch around a request, nor the other rows of its step,
// nor the number of threads changes a bit of a row's result.
struct Unit {
  AttentionTask task;  // with all its keys
  int32_t chunk_tiles, chunks;
  std::atomic<int32_t> unfinished;
  Buffer* memory = nullptr;

  explicit Unit(const AttentionTask& task)
      : task(task),
        chunk_tiles(pass_ext::chunk_tiles(task.problem->kv_heads, task.tiles->is_listed() ? 1 : task.request.nodes,
                                          task.end_tile)),
        chunks((task.end_tile + chunk_tiles - 1) / chunk_tiles - task.first_tile / chunk_tiles),
        unfinished(chunks) {}

  int32_t padded_rows() const { return (task.rows + kMostBlockRows - 1) / kMostBlockRows * kMostBlockRows; }
  size_t chunk_floats() const { return size_t(padded_rows()) * (task.problem->value_dim + 3); }

  AttentionTask chunk(int32_t index) const {
    AttentionTask part = task;
    const int32_t first = (task.first_tile / chunk_tiles + index) * chunk_tiles;
    part.first_tile = std::max(task.first_tile, first);
    part.end_tile = std::min(task.end_tile, first + chunk_tiles);
    return part;
  }

  PartialRows result(float* data, int32_t index) const {
    float* values = data + index * chunk_floats();
    float* rest = values + size_t(padded_rows()) * task.problem->value_dim;
    return {values, rest, rest + padded_rows(), rest + 2 * padded_rows()};
  }
};

// Memory for units in progress. Tasks are handed out in the order of units, so never more than threads + 1 are in
// progress.
class Pool {
 public:
  // The unit's memory, taken by the first of its tasks.
  float* memory_of(Unit& unit) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!unit.memory) {
      if (free_.empty()) {
        all_.push_back(std::make_unique<Buffer>());
        unit.memory = all_.back().get();
      } else {
        unit.memory = free_.back();
        free_.pop_back();
      }
    }
    return unit.memory->at_least(unit.chunks * unit.chunk_floats());
  }
  void give_back(Buffer* buffer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(buffer);
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Buffer>> all_;
  std::vector<Buffer*> free_;
};

ProductUnit unit_for(const AttentionProblem& problem) {
  return problem.type == FloatType::bfloat16 ? product_unit() : ProductUnit::fp32;
}

// Work space of one thread for one call.
class Worker {
 public:
  Worker(size_t key_dim, size_t value_dim, bool has_codes, bool has_tiles) {
    thread_local Buffer buffer;
    const size_t sizes[] = {key_dim * kTaskRows,
                            key_dim * kTileKeys,
                            value_dim * kTileKeys,
                            kTileKeys * kMostBlockRows,
                            has_tiles ? size_t{kTileKeys * kMostBlockRows} : 0,
                            kMostBlockRows,
                            has_tiles ? value_dim * 48 : 0,
                            value_dim * 2,
                            has_codes ? kTileKeys * (key_dim + value_dim) : 0};
    constexpr int kParts = sizeof sizes / sizeof sizes[0];
    size_t total = 0;
    for (size_t size : sizes) total += size;
    float* parts[kParts] = {buffer.at_least(total)};
    for (int i = 1; i < kParts; ++i) parts[i] = parts[i - 1] + sizes[i - 1];
    const auto words = [](float* part) { return reinterpret_cast<uint32_t*>(part); };
    scratch_ = {words(parts[0]), words(parts[1]), words(parts[2]), words(parts[3]), words(parts[4]),
                parts[5],        parts[6],        parts[7],        parts[8]};
  }

  void run(Unit& unit, int32_t chunk, Pool& pool);

 private:
  AttentionScratch scratch_;
  const Unit* arranged_ = nullptr;  // the unit whose queries are in the scratch
};

struct Units {
  std::vector<std::unique_ptr<AttentionTiles>> tiles;  // of each request that has nodes, or of each row with a list
  std::vector<std::unique_ptr<Unit>> all;
};

// Rows that belong to no request or see nothing: out 0, lse -inf.
void clear_rows(const AttentionProblem& problem, int64_t begin, int64_t end) {
  const int64_t row_bytes = int64_t{problem.heads} * problem.value_dim * (problem.type == FloatType::float32 ? 4 : 2);
  std::memset(static_cast<char*>(problem.out) + begin * row_bytes, 0, (end - begin) * row_bytes);
  std::fill(problem.lse + begin * problem.heads, problem.lse + end * problem.heads, -kInfinity);
}

Units units_of(const AttentionProblem& problem, CodeType codes, const KeyLists& lists) {
  Units units;
  const auto add = [&](const AttentionRequest& request, const AttentionTiles* tiles, int32_t begin, int32_t end) {
    for (int32_t head = 0; head < problem.kv_heads; ++head)
      for (int32_t first = begin; first < end; first += kTaskRows)
        units.all.push_back(std::make_unique<Unit>(AttentionTask{&problem, codes, request, tiles, head, first,
                                                                 std::min(kTaskRows, end - first), tiles->first_tile(),
                                                                 tiles->end_tile()}));
  };
  for (int64_t b = 0; b < problem.requests; ++b) {
    const AttentionRequest request = request_of<true>(problem, b);
    if (request.nodes == 0) continue;
    if (!lists.keys) {
      units.tiles.push_back(std::make_unique<AttentionTiles>(problem, request));
      add(request, units.tiles.back().get(), 0, request.nodes * problem.group);
    }
    for (int32_t node = 0; lists.keys && node < request.nodes; ++node) {
      auto tiles = std::make_unique<AttentionTiles>(problem, request, lists, node);
      if (tiles->end_tile() == 0) {  // the row sees nothing
        clear_rows(problem, request.first + node, request.first + node + 1);
        continue;
      }
      add(request, tiles.get(), node * problem.group, (node + 1) * problem.group);
      units.tiles.push_back(std::move(tiles));
    }
  }
  return units;
}

// By the unit that multiplies numbers of the problem's type.
void attend_at_level(const AttentionTask& task, const AttentionScratch& scratch, const PartialRows& result) {
  switch (unit_for(*task.problem)) {
#if defined(__x86_64__)
    case ProductUnit::amx:
      PASS_EXT_AT_LEVEL(product_isa(), attend_by_tiles<ProcessorTiles>(task, scratch, result));
      return;
#endif
    case ProductUnit::amx_emulated:
      PASS_EXT_AT_LEVEL(product_isa(), attend_by_tiles<EmulatedTiles>(task, scratch, result));
      return;
    default: PASS_EXT_AT_LEVEL(product_isa(), attend(task, scratch, result));
  }
}

void Worker::run(Unit& unit, int32_t chunk, Pool& pool) {
  float* const memory = pool.memory_of(unit);
  AttentionTask task = unit.chunk(chunk);
  task.has_queries = arranged_ == &unit;
  arranged_ = &unit;
  const PartialRows result = unit.result(memory, chunk);
  attend_at_level(task, scratch_, result);
  if (unit.unfinished.fetch_sub(1) != 1) return;
  std::vector<PartialRows> parts(unit.chunks);
  for (int32_t i = 0; i < unit.chunks; ++i) parts[i] = unit.result(memory, i);
  PASS_EXT_AT_ISA(finish_rows(task, parts.data(), unit.chunks));
  pool.give_back(unit.memory);
}

}  // namespace

void check_attention_values(const char* op, const AttentionProblem& problem, const KeyLists& lists) {
  check_bounds(op, problem.cu_nodes, problem.requests, problem.rows, problem.max_nodes);
  for (int64_t b = 0; b < problem.requests; ++b) {
    const int64_t first = problem.cu_nodes[b], nodes = problem.cu_nodes[b + 1] - first;
    if (nodes == 0) continue;
    const int64_t prefix = problem.prefix_lens[b], needed = prefix + (problem.k_new.data ? 0 : nodes);
    if (prefix < 0 || needed > problem.slots)
      refuse(op, problem.block_table ? "block_table" : "k_cache", " must have room for the prefix",
             problem.k_new.data ? "" : " and the nodes", " of every request, got ", problem.slots,
             " slots, but request ", b, " has prefix_lens ", prefix, " and ", nodes, " nodes");
    if (problem.block_table)
      for (int64_t i = request_of<true>(problem, b).begin / problem.page_size; i * problem.page_size < needed; ++i) {
        const int32_t page = problem.block_table[b * problem.table_stride + i];
        if (page < 0 || page >= problem.pages)
          refuse(op, "block_table must name pages in [0, ", problem.pages, ") for the ", needed, " slots of request ",
                 b, ", got ", page, " at ", i);
      }
    if (problem.depths)
      for (int64_t i = first; i < first + nodes; ++i)
        if (problem.depths[i] < 0 || problem.depths[i] >= nodes)
          refuse(op, "depths must be in [0, ", nodes, ") (the nodes of request ", b, "), got ", problem.depths[i],
                 " at ", i);
    for (int64_t row = first; lists.keys && row < first + nodes; ++row) {
      const int32_t* const list = lists.keys + row * lists.stride;
      for (int32_t i = 0; i < lists.size; ++i) {
        const bool has_ended = i > 0 && list[i - 1] == -1;
        if (list[i] == -1 ||
            (list[i] >= 0 && list[i] < prefix + nodes && !has_ended && (i == 0 || list[i] > list[i - 1])))
          continue;
        refuse(op, "key_lists must name keys in [0, ", prefix + nodes, ") (prefix and nodes of request ", b,
               ") in ascending order and then be -1, got ", list[i],
               i > 0 ? " after " + std::to_string(list[i - 1]) : "", " at row ", row, ", ", i);
      }
    }
  }
}

void attend_on_cpu(const AttentionProblem& problem, CodeType codes, const KeyLists& lists) {
  if (problem.rows == 0 || problem.heads == 0) return;  // the outputs are null
  clear_rows(problem, 0, problem.requests ? problem.cu_nodes[0] : problem.rows);
  if (problem.requests) clear_rows(problem, problem.cu_nodes[problem.requests], problem.rows);

  const Units units = units_of(problem, codes, lists);
  std::vector<std::pair<Unit*, int32_t>> tasks;
  double work = 0.0;
  for (const auto& unit : units.all) {
    for (int32_t chunk = 0; chunk < unit->chunks; ++chunk) tasks.emplace_back(unit.get(), chunk);
    const AttentionTask& task = unit->task;
    const int32_t keys = task.tiles->first_place(task.end_tile) - task.tiles->first_place(task.first_tile);
    work += double(task.rows) * keys * (problem.head_dim + problem.value_dim);
  }
  static Pool pool;
  std::atomic<size_t> next{0};
  const auto run = [&](int64_t) {
    Worker worker(problem.head_dim, problem.value_dim, codes != CodeType::none, unit_for(problem) >= ProductUnit::amx);
    for (size_t i = next++; i < tasks.size(); i = next++) worker.run(*tasks[i].first, tasks[i].second, pool);
  };
  const int64_t threads = work < (threads_are_ready() ? kReadyAloneBelow : kAloneBelow)
                              ? 1
                              : std::min<int64_t>(tasks.size(), thread_count());
  for_each_piece(std::max<int64_t>(1, threads), run);
}

namespace {

void check_and_attend(const AttentionProblem& problem, CodeType codes, const KeyLists& lists, bool, const Tensor&) {
  check_attention_values("attention_tree", problem, lists);
  attend_on_cpu(problem, codes, lists);
}

void merge(const MergeProblem& problem, const Tensor&) {
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max(1, problem.head_dim));
  for_ranges(problem.rows, grain,
             [&](int64_t begin, int64_t end) { PASS_EXT_AT_ISA(merge_results(problem, begin, end)); });
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("attention_tree", TORCH_BOX(&pass_ext::attention_tree<pass_ext::check_and_attend>));
  library.impl("attention_merge", TORCH_BOX(&pass_ext::attention_merge<pass_ext::merge>));
}
