// The tasks of attention in one order: which places of which row a block adds up at a time. A row of q with a tile of
// its heads is an item; its shares are those of cuda/attention_places.cuh.
//   length = places of all items / blocks that run at once
//   item:  its first shares, up to `length` places, are one task: a block adds them one after the other
//          each share behind them is a task, whose sums are a part; a second launch adds the parts, in their order
// So an item that is no longer than a block's part of the work has no parts, and of a longer one many blocks take
// shares. Texts decide, not the slots of the cache: there is no task without places. A block takes the task that has
// its index, and then the next that nobody has. The sums are the same, whatever the length.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "core/attention_lists.h"
#include "cuda/attention_places.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kTaskThreads = 128;  // of a block
constexpr int32_t kEndless = INT32_MAX;

// Parts for each block that runs at once. n equal items of which a block's part of the work is the x-th, n <= x blocks,
// have 16 log2(1 / x) + 2 parts each, at most 9.3 for each block; unequal ones have fewer, as the logarithm is concave.
constexpr int64_t kPartsOfBlock = 10;

// The host's plan.
struct TaskGrid {
  int32_t tiles;             // of the heads of a row
  int32_t unit;              // a share is so many of attention_places.cuh
  bool is_split;             // else a row has one share at most, and is a task
  int64_t blocks, resident;  // of the grid; those that run at once
  int64_t most_parts;        // of whole rows, all heads

  int64_t header_floats(int64_t requests) const { return is_split ? (2 * (1 + requests) + 3) / 4 * 4 : 0; }
};

// `resident`: blocks that run at once.
inline TaskGrid plan_tasks(const AttentionProblem& problem, const KeyLists& lists, int32_t tiles, int32_t unit,
                           int64_t resident) {
  const int64_t places = lists.keys ? lists.size : problem.slots + (problem.k_new.data ? problem.max_nodes : 0);
  const int64_t shares = shares_of((places + unit - 1) / unit), items = problem.rows * tiles;
  TaskGrid grid{tiles, unit, shares > 1};
  grid.resident = resident < 1 ? 1 : resident;
  grid.blocks = between(items * (shares < 1 ? 1 : shares), 1, grid.resident);
  if (grid.is_split)
    grid.most_parts = between((kPartsOfBlock * grid.resident + tiles - 1) / tiles, 1, problem.rows * shares);
  return grid;
}

PASS_EXT_HOST_DEVICE int64_t first_place_of_share(const TaskGrid& grid, int32_t share) {
  return grid.unit * first_place_of_share(share);
}

// The shares of a request's rows: [first, last). One task has those before `cut`.
struct RequestTasks {
  int32_t first, cut, last;

  PASS_EXT_HOST_DEVICE bool is_whole() const { return cut >= last; }
  PASS_EXT_HOST_DEVICE bool has_first_part() const { return cut > first && cut < last; }
  PASS_EXT_HOST_DEVICE int32_t parts() const { return last - cut + (has_first_part() ? 1 : 0); }
};

// The places of a request's rows that any of them may see.
struct PlaceRange {
  int64_t begin, end;
};

PASS_EXT_HOST_DEVICE PlaceRange places_of_request(const AttentionRequest& request, const KeyLists& lists) {
  if (lists.keys) return {0, lists.size};
  return {first_place_in_reach(request, lists), request.nodes == 0 ? 0 : request.keys()};
}

// `length`: of a task with the first shares; 0: there is none.
PASS_EXT_HOST_DEVICE RequestTasks tasks_of(const TaskGrid& grid, const AttentionRequest& request, const KeyLists& lists,
                                           int64_t length) {
  const PlaceRange range = places_of_request(request, lists);
  if (range.end <= range.begin) return {0, 0, 0};
  const int32_t first = share_with(range.begin / grid.unit), last = share_with((range.end - 1) / grid.unit) + 1;
  if (length >= range.end - range.begin) return {first, last, last};
  return {first, length == 0 ? first : share_with((range.begin + length) / grid.unit), last};
}

struct TaskPlan {
  int64_t length, first_tasks, tasks;  // first_tasks: those with the first shares of an item, before all others
};

struct Task {
  int64_t owner;        // the request; -1: none
  int64_t row;          // of q
  int32_t tile;         // of the row's heads; -1: no task is left
  int32_t first, last;  // shares
  bool is_nothing;      // the second launch writes the row
  int64_t part;         // of the row; -1: the sums are the result
};

// Shared memory of a block.
struct TaskScratch {
  int32_t task_ends[kTaskThreads], part_ends[kTaskThreads];  // of some requests each, behind all before
  int64_t sums[kTaskThreads / 32];
  TaskPlan plan;  // here, and not in registers, which sums and queries fill
  Task task;
};

// The sum of the values of all threads before this one and its own; `total`: of all threads.
PASS_EXT_DEVICE int64_t sum_up_to(TaskScratch& scratch, int64_t value, int64_t& total) {
  const int lane = static_cast<int>(lane_index());
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = shuffle(value, lane < step ? lane : lane - step);
    if (lane >= step) value += other;
  }
  sync_block();  // the sums before are read
  if (lane == 31) scratch.sums[warp_index()] = value;
  sync_block();
  total = 0;
  int64_t before = 0;
#pragma unroll
  for (unsigned warp = 0; warp < kTaskThreads / 32; ++warp) {
    if (warp < warp_index()) before += scratch.sums[warp];
    total += scratch.sums[warp];
  }
  return before + value;
}

// A problem's tasks on a grid. `header`: what the second launch reads, [1 + requests]: the length, and the first part
// of each request. `counter`: zero before and after.
struct AttentionTasks {
  TaskGrid grid;
  int64_t* header;
  int32_t* counter;
};

// Requests that one thread sums up.
PASS_EXT_DEVICE int64_t requests_of_thread(const AttentionProblem& problem) {
  return (problem.requests + kTaskThreads - 1) / kTaskThreads;
}

// The sum of of_request(request) over the thread's requests.
template <typename OfRequest>
PASS_EXT_DEVICE int64_t sum_of_requests(const AttentionProblem& problem, const OfRequest& of_request) {
  const int64_t count = requests_of_thread(problem), first = count * thread_rank();
  int64_t sum = 0;
#pragma unroll 1
  for (int64_t b = first; b < first + count && b < problem.requests; ++b)
    sum += of_request(request_of<true>(problem, b));
  return sum;
}

// Writes the plan, and the ends of all requests' tasks and parts. All threads of the block call it, and every block
// finds the same.
PASS_EXT_DEVICE_CALL void make_plan(const AttentionProblem& problem, const KeyLists& lists, const AttentionTasks& tasks,
                                    TaskScratch& scratch) {
  const TaskGrid& grid = tasks.grid;
  const int64_t items = problem.rows * grid.tiles;
  if (!grid.is_split) {
    if (thread_rank() == 0) scratch.plan = {kEndless, items, items};
    return;
  }
  int64_t total = 0, parts = 0, shares = 0;
  sum_up_to(scratch,
            sum_of_requests(problem,
                            [&](const AttentionRequest& request) {
                              const PlaceRange range = places_of_request(request, lists);
                              return range.end > range.begin ? request.nodes * (range.end - range.begin) : 0;
                            }),
            total);
  const int64_t least = int64_t{kPlacesOfStep} * grid.unit;
  int64_t length = total * grid.tiles / grid.resident, parts_up_to = 0;
#pragma unroll 1
  for (;;) {
    if (length < least) length = 0;
    parts_up_to =
        sum_up_to(scratch,
                  sum_of_requests(problem,
                                  [&](const AttentionRequest& request) {
                                    return int64_t{request.nodes} * tasks_of(grid, request, lists, length).parts();
                                  }),
                  parts);
    if (parts <= grid.most_parts) break;
    length += length / 4 + least;
  }
  const int64_t shares_up_to =
      sum_up_to(scratch,
                sum_of_requests(problem,
                                [&](const AttentionRequest& request) {
                                  const RequestTasks own = tasks_of(grid, request, lists, length);
                                  return int64_t{request.nodes} * grid.tiles * (own.last - own.cut);
                                }),
                shares);
  scratch.task_ends[thread_rank()] = static_cast<int32_t>(shares_up_to);
  scratch.part_ends[thread_rank()] = static_cast<int32_t>(parts_up_to);
  if (block_index().x == 0) {
    int64_t part = parts_up_to - sum_of_requests(problem, [&](const AttentionRequest& request) {
                     return int64_t{request.nodes} * tasks_of(grid, request, lists, length).parts();
                   });
    if (thread_rank() == 0) tasks.header[0] = length;
    sum_of_requests(problem, [&](const AttentionRequest& request) {
      tasks.header[1 + request.index] = part;
      part += int64_t{request.nodes} * tasks_of(grid, request, lists, length).parts();
      return 0;
    });
  }
  const int64_t first_tasks = length == 0 ? 0 : items;
  if (thread_rank() == 0) scratch.plan = {length, first_tasks, first_tasks + shares};
}

// Writes the task with index `i`.
PASS_EXT_DEVICE_CALL void find_task(const AttentionProblem& problem, const KeyLists& lists, const AttentionTasks& tasks,
                                    const TaskScratch& scratch, int64_t i, Task& task) {
  const TaskGrid& grid = tasks.grid;
  const TaskPlan& plan = scratch.plan;
  const int64_t count = requests_of_thread(problem);
  if (i < plan.first_tasks) {
    const int64_t row = i / grid.tiles, owner = owner_of(problem, row);
    const int32_t tile = static_cast<int32_t>(i % grid.tiles);
    task = {owner, row, tile, 0, 0, grid.is_split && owner < 0, -1};
    if (owner < 0) return;
    const AttentionRequest request = request_of<true>(problem, owner);
    const RequestTasks own = tasks_of(grid, request, lists, plan.length);
    task = {owner, row, tile, own.first, own.cut, !own.is_whole() && !own.has_first_part(), -1};
    if (own.is_whole()) return;
    const int64_t chunk = owner / count;
    int64_t part = chunk == 0 ? 0 : scratch.part_ends[chunk - 1];
#pragma unroll 1
    for (int64_t b = chunk * count; b < owner; ++b) {
      const AttentionRequest other = request_of<true>(problem, b);
      part += int64_t{other.nodes} * tasks_of(grid, other, lists, plan.length).parts();
    }
    task.part = part + (row - request.first) * own.parts();
    return;
  }
  i -= plan.first_tasks;
  int chunk = 0;  // the first whose end is above
#pragma unroll
  for (int step = kTaskThreads / 2; step > 0; step /= 2)
    if (scratch.task_ends[chunk + step - 1] <= i) chunk += step;
  int64_t part = chunk == 0 ? 0 : scratch.part_ends[chunk - 1];
  if (chunk > 0) i -= scratch.task_ends[chunk - 1];
#pragma unroll 1
  for (int64_t b = chunk * count;; ++b) {
    const AttentionRequest request = request_of<true>(problem, b);
    const RequestTasks own = tasks_of(grid, request, lists, plan.length);
    const int64_t side_by_side = int64_t{request.nodes} * grid.tiles, all = side_by_side * (own.last - own.cut);
    if (i >= all) {
      i -= all;
      part += int64_t{request.nodes} * own.parts();
      continue;
    }
    // The last shares are the longest, and begin first.
    const int32_t share = own.last - 1 - static_cast<int32_t>(i / side_by_side);
    const int64_t node = i % side_by_side / grid.tiles;
    part += node * own.parts() + (own.has_first_part() ? 1 : 0) + share - own.cut;
    task = {b, request.first + node, static_cast<int32_t>(i % grid.tiles), share, share + 1, false, part};
    return;
  }
}

// run(task) for each task of the block, `task` in shared memory. All threads of the block call it.
template <typename Run>
PASS_EXT_DEVICE void for_each_task(const AttentionProblem& problem, const KeyLists& lists, const AttentionTasks& tasks,
                                   TaskScratch& scratch, const Run& run) {
  make_plan(problem, lists, tasks, scratch);
  sync_block();  // the plan is there
  unsigned next = block_index().x;
#pragma unroll 1
  for (;;) {
    if (thread_rank() == 0) {
      if (next < scratch.plan.tasks)
        find_task(problem, lists, tasks, scratch, next, scratch.task);
      else
        scratch.task = {-1, 0, -1, 0, 0, true, -1};
    }
    sync_block();  // the task is there
    if (scratch.task.tile < 0) return;
    const bool has_more = scratch.plan.tasks > grid_size().x;  // then every block counts once in vain, the last to zero
    if (thread_rank() == 0)
      next = has_more ? grid_size().x + count_arrival(tasks.counter, static_cast<int32_t>(scratch.plan.tasks)) : ~0u;
    if (!scratch.task.is_nothing) run(scratch.task);
    sync_block();  // shared memory is free again
  }
}

// The parts of a row, for the second launch.
struct RowParts {
  bool is_written;  // by the first launch
  RequestTasks own;
  int64_t first;
};

PASS_EXT_DEVICE RowParts parts_of(const AttentionProblem& problem, const KeyLists& lists, const AttentionTasks& tasks,
                                  int64_t owner, const PlacedRow& row) {
  if (owner < 0) return {};
  const int64_t length = tasks.header[0];
  const RequestTasks own = tasks_of(tasks.grid, row.request, lists, length);
  return {length > 0 && own.is_whole(), own, tasks.header[1 + owner] + int64_t{row.node} * own.parts()};
}

}  // namespace pass_ext::gpu
