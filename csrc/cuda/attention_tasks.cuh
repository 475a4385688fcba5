// The tasks of attention in one order: which places of which row a block adds up at a time. A row of q with a tile of
// its heads is an item; its shares are those of cuda/attention_places.cuh.
//   length = places of all items / blocks that run at once
//   item:  its first shares, up to `length` places, are one task: a block adds them one after the other
//          each share behind them is a task, whose sums are a part; a second launch adds the parts, in their order
// So an item that is no longer than a block's part of the work has no parts, and of a longer one many blocks take
// shares. Texts decide, not the slots of the cache: there is no task without places. A block takes the task that has
// its index, and then the next that nobody has. The sums are the same, whatever the length. Who finds the tasks is
// attention_tasks_plan.cuh, in a launch of its own: its code in each kernel that attends was half of theirs.
#pragma once

#include <cstdint>

#include "cuda/attention_places.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// A row of q and its tasks.
struct alignas(16) RowTasks {
  int32_t owner, node;  // the request, -1: none, and which of its nodes
  PlaceRange seen;
  int32_t first, cut, last;  // shares [first, last) that it sees; one task has those before `cut`
  int32_t part;              // its first one, for the second launch, which writes the row; -1: the task writes it

  PASS_EXT_DEVICE bool is_left() const { return part >= 0; }
  PASS_EXT_DEVICE bool has_first_part() const { return cut > first; }
};

// A row's share that is a task for each of its tiles.
struct ShareTask {
  int32_t row, share;
};

struct TaskCounts {
  uint32_t first_tasks, tasks;  // first_tasks: those with the first shares of an item, before all others
};

// A problem's tasks, in global memory. `counter`: zero before and after.
struct AttentionTasks {
  int32_t tiles;  // of the heads of a row
  int32_t unit;   // a share is so many of attention_places.cuh
  TaskCounts* counts;
  RowTasks* rows;     // [rows]
  ShareTask* shares;  // [most_parts], in the order in which blocks take them
  int32_t* counter;

  // The places of a share that a row sees.
  PASS_EXT_DEVICE PlaceRange places_of_share(const PlaceRange& seen, int32_t share) const {
    const uint32_t begin = unit * first_place_of_share(share), end = unit * first_place_of_share(share + 1);
    const uint32_t first = static_cast<uint32_t>(seen.begin), last = static_cast<uint32_t>(seen.end);
    return {static_cast<int32_t>(begin > first ? begin : first), static_cast<int32_t>(end < last ? end : last)};
  }
};

struct Task {
  int32_t row;          // of q
  int32_t tile;         // of the row's heads; -1: no task is left
  int32_t first, last;  // shares
  int32_t part;         // of the row; -1: the sums are the result
  bool is_nothing;      // the second launch writes the row
  uint32_t next;        // the index of the block's next one
};

// The task with index `i`.
PASS_EXT_DEVICE Task find_task(const AttentionTasks& tasks, const TaskCounts& counts, uint32_t i) {
  if (i >= counts.tasks) return {0, -1, 0, 0, -1, true, 0};
  const uint32_t tiles = static_cast<uint32_t>(tasks.tiles);
  const bool is_first = i < counts.first_tasks;
  if (!is_first) i -= counts.first_tasks;
  const int32_t place = static_cast<int32_t>(i / tiles), tile = static_cast<int32_t>(i % tiles);
  if (is_first) {
    const RowTasks& row = tasks.rows[place];
    return {place, tile, row.first, row.cut, row.part, row.is_left() && !row.has_first_part(), 0};
  }
  const ShareTask& task = tasks.shares[place];
  const RowTasks& row = tasks.rows[task.row];
  const int32_t part = row.part + task.share - row.cut + (row.has_first_part() ? 1 : 0);
  return {task.row, tile, task.share, task.share + 1, part, task.share >= row.last, 0};
}

// run(task) for each task of the block, `task` in shared memory: registers are full of sums and queries. All threads of
// the block call it.
template <typename Run>
PASS_EXT_DEVICE void for_each_task(const AttentionTasks& tasks, Task& task, const Run& run) {
  if (thread_rank() == 0) task.next = block_index().x;
#pragma unroll 1
  for (;;) {
    if (thread_rank() == 0) {
      const TaskCounts counts = *tasks.counts;
      task = find_task(tasks, counts, task.next);
      const bool has_more = counts.tasks > grid_size().x;  // then every block counts once in vain, the last to zero
      if (task.tile >= 0)
        task.next = has_more ? grid_size().x + count_arrival(tasks.counter, static_cast<int32_t>(counts.tasks)) : ~0u;
    }
    sync_block();  // the task is there
    if (task.tile < 0) return;
    if (!task.is_nothing) run(task);
    sync_block();  // shared memory is free again
  }
}

}  // namespace pass_ext::gpu
