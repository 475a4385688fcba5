// torch.ops.pass_ext.linear_rows and linear_packed on the CPU: checks, parallel split, registration. The inner loops:
// cpu/linear_kernels-inl.h.
#include "cpu/linear.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>

#include "cpu/adapter.h"
#include "cpu/buffer.h"
#include "cpu/linear_packed.h"
#include "cpu/linear_tiles.h"
#include "cpu/tiles.h"
#include "cpu/unit.h"
#include "cpu/workers.h"
#include "host/linear.h"

#define PASS_EXT_KERNELS "cpu/linear_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

constexpr int64_t kArrangedBytes = 512 * 1024;  // of rows at a time: a part of a core's own cache
constexpr int64_t kFewestRows = 24;             // least rows at a time, whatever their bytes
constexpr int64_t kGroupBytes = 16 * 1024;      // least weights for a thread to take at once
constexpr int64_t kGroupsOfThread = 3;          // the fewest for larger groups, whose runs of memory are longer

// The rows of x in the order of multiplication, what rows of slots add, and work space. Each thread has its own: rows
// that another thread has just arranged would come from that thread's cache, more slowly than it takes to arrange them
// again.
struct ThreadMemory {
  Buffer rows, digits, hidden, scratch;
  uint64_t job = 0;   // the products whose rows are arranged
  int64_t asked = 0;  // lines of NextAdapters, in this job

  static ThreadMemory& get() {
    thread_local ThreadMemory memory;
    return memory;
  }
};

uint64_t next_job() {
  static std::atomic<uint64_t> jobs{0};
  return jobs.fetch_add(1, std::memory_order_relaxed) + 1;
}

constexpr int64_t kMostRanksFetched = 64;       // of all adapters; more would take longer than they save
constexpr int64_t kMostLinesFetched = 2 << 10;  // of the next adapters: a part of a core's own cache

// Asks for what rows of slots add to the outputs [begin, end), so that it is there when the products are.
template <typename T>
void prefetch(const AddedRows<T>& added, int64_t begin, int64_t end) {
  const int64_t ranks = added.hidden == nullptr ? 0 : added.adapters * added.rank;
  if (ranks > kMostRanksFetched) return;
  for (int64_t j = 0; j < ranks; ++j)
    for (int64_t o = begin; o < end; o += 64 / int64_t{sizeof(T)}) __builtin_prefetch(added.up + j * added.outputs + o);
}

// Asks for this thread's next part of what is multiplied behind this job, of which it does one of `pieces` pieces now.
void prefetch(const NextAdapters& next, int64_t pieces) {
  int64_t total = 0;
  for (const int64_t lines : next.lines) total += lines;
  if (total == 0 || total > kMostLinesFetched) return;
  int64_t& asked = ThreadMemory::get().asked;
  const int64_t part = (total * thread_count() + pieces - 1) / pieces, end = std::min(total, asked + part);
  int64_t first = 0;
  for (int i = 0; i < kMostProducts; first += next.lines[i++])
    for (; asked < end && asked - first < next.lines[i]; ++asked)
      __builtin_prefetch(next.from[i] + (asked - first) * 64, 0, 2);
}

// Rows [first, first + rows) of x in the order in which the unit in use multiplies them.
template <typename T>
void arrange(const LinearRows<T>& product, int64_t first, int64_t rows, float* to) {
  if constexpr (std::is_same_v<T, bfloat16>)
    if (product_unit() >= ProductUnit::amx) return arrange_for_tiles(product, first, rows, to);
  PASS_EXT_AT_LEVEL(product_isa(), arrange_rows(product, first, rows, to));
}

// The sums of rows in that order for outputs [begin, end) of a product.
template <typename T>
void multiply_arranged(const LinearRows<T>& product, int64_t rows, const float* arranged, const LinearScratch& scratch,
                       float* sums, int64_t begin, int64_t end) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    const ProductUnit unit = product_unit();
    if (unit == ProductUnit::amx_emulated)
      return multiply_by_tiles<EmulatedTiles>(product, rows, arranged, scratch, sums, begin, end);
#if defined(__x86_64__)
    if (unit == ProductUnit::amx)
      return multiply_by_tiles<ProcessorTiles>(product, rows, arranged, scratch, sums, begin, end);
#endif
  }
  PASS_EXT_AT_LEVEL(product_isa(), multiply_group(product, rows, arranged, scratch, sums, begin, end));
}

// The rows of a job as its weights need them: in the order of multiplication for dense ones, as digits for packed ones.
struct ReadyRows {
  float *arranged, *digits;
};

// Products of the same rows: how their outputs are cut, and which rows are arranged.
template <typename T>
struct Job {
  const AdaptedRows<T>* const* products;
  int count;
  int64_t outputs;      // that the groups divide
  int64_t first, rows;  // of x; few enough to stay arranged while all weights are read
  uint64_t number = next_job();
  int64_t group = group_outputs();
  bool crosses = packed() && crosses_codes();

  int64_t group_outputs() const {
    for (const int64_t large : {kGroupOutputs, kGroupOutputs / 2})
      if (outputs >= large * kGroupsOfThread * thread_count()) return large;
    // Whole blocks; else whole tiles, and vectors: parts of them are slow.
    const int64_t unit = packed() || product_isa() >= Isa::avx512 ? kPackedOutputs : 24;
    const int64_t row_bytes = products[0]->packed ? products[0]->in : products[0]->in * int64_t{sizeof(T)};
    const int64_t unit_bytes = unit * std::max<int64_t>(1, row_bytes);
    return std::min(kGroupOutputs / 2, unit * ((kGroupBytes + unit_bytes - 1) / unit_bytes));
  }
  // How many of the products have packed weights.
  int packed() const {
    int found = 0;
    for (int i = 0; i < count; ++i) found += products[i]->packed != nullptr;
    return found;
  }
  int64_t groups(int64_t outputs) const { return (outputs + group - 1) / group; }

  // function(rows, scratch, what each product's rows add) with this thread's memory.
  template <typename Function>
  void with_memory(Function&& function) const {
    ThreadMemory& memory = ThreadMemory::get();
    const LinearRows<T>& product = *products[0];
    const int64_t numbers_of_rows = arranged_bytes(rows, product.in) / sizeof(float);
    const ReadyRows ready{packed() < count ? memory.rows.at_least(numbers_of_rows) : nullptr,
                          packed() ? memory.digits.at_least(numbers_of_rows) : nullptr};
    AddedRows<T> added[kMostProducts]{};
    int64_t numbers[kMostProducts + 1]{};
    for (int i = 0; i < count; ++i) {
      const SlotAdapter<T>* const adapter = products[i]->adapter;
      numbers[i + 1] = numbers[i] + (adapter ? static_cast<int64_t>(adapter->slots->rows.size()) * adapter->rank : 0);
    }
    float* const hidden = numbers[count] ? memory.hidden.at_least(numbers[count]) : nullptr;
    const bool is_new = memory.job != number;
    if (is_new && ready.arranged) arrange(product, first, rows, ready.arranged);
    if (is_new && ready.digits) write_digits(product, first, rows, crosses, ready.digits);
    for (int i = 0; i < count && hidden != nullptr; ++i) {
      const SlotAdapter<T>* const adapter = products[i]->adapter;
      if (!adapter) continue;
      if (is_new) multiply_down_on_cpu(*adapter, product.x, product.in, product.x_row, hidden + numbers[i]);
      added[i] = {hidden + numbers[i],
                  adapter->up,
                  adapter->slots->place.data(),
                  adapter->slots->rows.data(),
                  adapter->slots->adapter.data(),
                  static_cast<int64_t>(adapter->slots->rows.size()),
                  static_cast<int64_t>(adapter->slots->start.size()) - 1,
                  adapter->rank,
                  products[i]->outputs,
                  adapter->scale};
    }
    if (is_new) memory.asked = 0;
    memory.job = number;
    const bool has_adapters = hidden != nullptr;
    float* const numbers_of_thread = memory.scratch.at_least(LinearScratch::floats(rows, has_adapters));
    function(ready, LinearScratch(numbers_of_thread, rows, has_adapters), added);
  }
};

// The sums of a job's rows for outputs [begin, end) of one of its products.
template <typename T>
void multiply_outputs(const LinearRows<T>& product, const Job<T>& job, const ReadyRows& ready,
                      const LinearScratch& scratch, float* sums, int64_t begin, int64_t end) {
  if (product.packed)
    multiply_packed(product.packed, product.form, product.in, job.rows, ready.digits, job.crosses, sums, begin, end);
  else
    multiply_arranged(product, job.rows, ready.arranged, scratch, sums, begin, end);
}

// function(job) for sets of rows that may stay arranged.
template <typename T, typename Function>
void for_sets_of_rows(const AdaptedRows<T>* const* products, int count, int64_t outputs, Function&& function) {
  const int64_t row_bytes = std::max<int64_t>(1, arranged_bytes(1, products[0]->in));
  const int64_t at_once = std::max(kFewestRows, kArrangedBytes / row_bytes), rows = products[0]->rows;
  for (int64_t first = 0; first < rows; first += at_once)
    function(Job<T>{products, count, outputs, first, std::min(at_once, rows - first)});
}

}  // namespace

template <typename T>
void multiply(const AdaptedRows<T>* products, int count, const NextAdapters& next) {
  const AdaptedRows<T>* each[kMostProducts];
  int64_t outputs = 0;
  for (int i = 0; i < count; ++i) {
    each[i] = products + i;
    outputs += products[i].outputs;
  }
  for_sets_of_rows(each, count, outputs, [&](const Job<T>& job) {
    int64_t pieces = 0;
    for (int i = 0; i < count; ++i) pieces += job.groups(products[i].outputs);
    for_each_piece(pieces, [&](int64_t piece) {
      int i = 0;
      for (; piece >= job.groups(products[i].outputs); ++i) piece -= job.groups(products[i].outputs);
      const LinearRows<T>& product = products[i];
      const int64_t begin = piece * job.group, end = std::min(begin + job.group, product.outputs);
      job.with_memory([&](const ReadyRows& ready, const LinearScratch& scratch, const AddedRows<T>* added) {
        prefetch(added[i], begin, end);
        prefetch(next, pieces);
        multiply_outputs(product, job, ready, scratch, scratch.sums, begin, end);
        PASS_EXT_AT_LEVEL(product_isa(), finish_group(product, added[i], job.first, job.rows, scratch, begin, end));
      });
    });
  });
}

template <typename T>
void multiply(const GatedRows<T>& product, const NextAdapters& next) {
  const AdaptedRows<T>* const each[] = {&product.gate, &product.up};
  for_sets_of_rows(each, 2, product.gate.outputs, [&](const Job<T>& job) {
    const int64_t pieces = job.groups(product.gate.outputs);
    for_each_piece(pieces, [&](int64_t piece) {
      const int64_t begin = piece * job.group, end = std::min(begin + job.group, product.gate.outputs);
      job.with_memory([&](const ReadyRows& ready, const LinearScratch& scratch, const AddedRows<T>* added) {
        float* const up_sums = scratch.sums + job.rows * kGroupOutputs;
        for (int i = 0; i < 2; ++i) prefetch(added[i], begin, end);
        prefetch(next, pieces);
        multiply_outputs<T>(product.gate, job, ready, scratch, scratch.sums, begin, end);
        multiply_outputs<T>(product.up, job, ready, scratch, up_sums, begin, end);
        PASS_EXT_AT_LEVEL(product_isa(), finish_group(product, added, job.first, job.rows, scratch, begin, end));
      });
    });
  });
}

template void multiply(const AdaptedRows<float>*, int, const NextAdapters&);
template void multiply(const AdaptedRows<float16>*, int, const NextAdapters&);
template void multiply(const AdaptedRows<bfloat16>*, int, const NextAdapters&);
template void multiply(const GatedRows<float>&, const NextAdapters&);
template void multiply(const GatedRows<float16>&, const NextAdapters&);
template void multiply(const GatedRows<bfloat16>&, const NextAdapters&);

namespace {

struct OnCpu {
  template <typename T>
  static void run(const LinearRows<T>& problem, const Tensor&) {
    const AdaptedRows<T> product{problem};
    multiply(&product, 1);
  }
};

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("linear_rows", TORCH_BOX(&pass_ext::linear_rows<pass_ext::OnCpu>));
  library.impl("linear_packed", TORCH_BOX(&pass_ext::linear_packed<pass_ext::OnCpu>));
}
