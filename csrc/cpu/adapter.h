// Gated adapters on the CPU, by raw pointers: the rows of slots grouped by adapter, and the products that are added to
// them. The formula: core/adapter.h.
#pragma once

#include <vector>

#include "core/adapter.h"
#include "cpu/linear.h"
#include "host/checks.h"

namespace pass_ext {

// The rows of slots, grouped by adapter and in order within a group: those of adapter k have the places start[k] …
// start[k + 1] - 1. Without such rows all are empty.
struct RowsByAdapter {
  std::vector<int64_t> start;
  std::vector<int64_t> rows;     // of each place
  std::vector<int64_t> place;    // of each row; -1: a token's
  std::vector<int64_t> adapter;  // of each place
};

// Refuses a slot without an adapter, before anything is written.
template <typename Id>
RowsByAdapter rows_by_adapter(const char* op, const Id* ids, int64_t count, int64_t adapters) {
  RowsByAdapter groups;
  int64_t slots = 0;
  for (int64_t n = 0; n < count; ++n) {
    if (ids[n] >= 0) continue;
    if (adapter_of_id(ids[n], adapters) < 0)
      refuse(op, "ids must be at least ", -adapters, " (", adapters, " adapters), got ", static_cast<int64_t>(ids[n]),
             " at index ", n);
    ++slots;
  }
  if (slots == 0) return groups;
  groups.start.assign(adapters + 1, 0);
  groups.rows.resize(slots);
  groups.adapter.resize(slots);
  groups.place.assign(count, -1);
  const auto each = [&](auto&& function) {
    for (int64_t n = 0; n < count; ++n)
      if (ids[n] < 0) function(adapter_of_id(ids[n], adapters), n);
  };
  each([&](int64_t k, int64_t) { ++groups.start[k + 1]; });
  for (int64_t k = 0; k < adapters; ++k) groups.start[k + 1] += groups.start[k];
  std::vector<int64_t> next(groups.start.begin(), groups.start.end() - 1);
  each([&](int64_t k, int64_t n) {
    groups.place[n] = next[k];
    groups.adapter[next[k]] = k;
    groups.rows[next[k]++] = n;
  });
  return groups;
}

// problem.ids is not read: `groups` has the rows.
template <typename T>
void adapter_rows_on_cpu(const AdapterRows<T, int64_t>& problem, const RowsByAdapter& groups);

// The adapter of a linear layer, for these rows of slots; down null: it has none.
template <typename T>
struct SlotAdapter {
  const T *down = nullptr, *up = nullptr;  // [adapters, rank, in], [adapters, rank, outputs]
  int64_t rank = 0;
  const RowsByAdapter* slots = nullptr;
  float scale = 1.0f;

  explicit operator bool() const { return down != nullptr; }
};

template <typename T>
void NextAdapters::add(int place, const SlotAdapter<T>& adapter, int64_t in) {
  if (!adapter) return;
  const int64_t count = static_cast<int64_t>(adapter.slots->start.size()) - 1;
  from[place] = reinterpret_cast<const char*>(adapter.down);
  lines[place] = count * adapter.rank * in * int64_t{sizeof(T)} / 64;
}

// hidden [places, rank] = down x, on this thread alone. x: all rows, `row` elements apart.
template <typename T>
void multiply_down_on_cpu(const SlotAdapter<T>& adapter, const T* x, int64_t in, int64_t row, float* hidden);

}  // namespace pass_ext
