// The plan of attention's tasks: a launch before those that attend, whose blocks all add up the requests' work, and
// write a part each of the rows' and the shares' tasks (attention_tasks.cuh).
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "core/attention_lists.h"
#include "cuda/attention_places.cuh"
#include "cuda/attention_tasks.cuh"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kPlanThreads = 128;

// Parts for each block that runs at once. n equal items of which a block's part of the work is the x-th, n <= x blocks,
// have 16 log2(1 / x) + 2 parts each, at most 9.3 for each block; unequal ones have fewer, as the logarithm is concave.
constexpr int64_t kPartsOfBlock = 10;

struct TaskGrid {
  int32_t tiles, unit;       // as AttentionTasks has them
  bool is_split;             // else a row has one share at most, and is a task
  int64_t blocks, resident;  // of the grid; those that run at once
  int64_t most_parts;        // of whole rows, all heads

  // Floats of memory for the tasks of so many rows, whole units of 16 bytes.
  int64_t floats(int64_t rows) const {
    return (sizeof(TaskCounts) + rows * sizeof(RowTasks) + most_parts * sizeof(ShareTask) + 15) / 16 * 4;
  }

  AttentionTasks tasks_in(float* memory, int64_t count, int32_t* counter) const {
    RowTasks* const rows = reinterpret_cast<RowTasks*>(memory);
    ShareTask* const shares = reinterpret_cast<ShareTask*>(rows + count);
    return {tiles, unit, reinterpret_cast<TaskCounts*>(shares + most_parts), rows, shares, counter};
  }
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

// The shares of a request's rows: [first, last). One task has those before `cut`.
struct RequestTasks {
  int32_t first, cut, last;

  PASS_EXT_DEVICE bool is_whole() const { return cut >= last; }
  PASS_EXT_DEVICE int32_t parts() const { return is_whole() ? 0 : last - cut + (cut > first ? 1 : 0); }
};

struct TaskPlan {
  AttentionProblem problem;
  KeyLists lists;
  AttentionTasks tasks;
  int64_t resident, most_parts;
  bool is_split;

  // Those that any row of a request may see.
  PASS_EXT_DEVICE PlaceRange places_of(const AttentionRequest& request) const {
    if (lists.keys) return {0, lists.size};
    return {first_place_in_reach(request, lists), request.nodes == 0 ? 0 : request.keys()};
  }

  PASS_EXT_DEVICE int32_t share_of(uint32_t place) const {
    return share_with(place / static_cast<uint32_t>(tasks.unit));
  }

  // `length`: of a task with the first shares; 0: there is none.
  PASS_EXT_DEVICE RequestTasks tasks_of(const AttentionRequest& request, int64_t length) const {
    const PlaceRange places = places_of(request);
    if (places.end <= places.begin) return {0, 0, 0};
    const int32_t first = share_of(places.begin), last = share_of(places.end - 1) + 1;
    if (length >= places.end - places.begin) return {first, last, last};
    return {first, length == 0 ? first : share_of(places.begin + static_cast<uint32_t>(length)), last};
  }
};

// Shared memory of a block.
struct PlanScratch {
  int64_t share_ends[kPlanThreads], part_ends[kPlanThreads];  // of a thread's requests, after all before
  int64_t sums[kPlanThreads / 32];
};

// The sum of the values of all threads before this one and its own, and of all threads.
struct RunningSum {
  int64_t own, total;
};

PASS_EXT_DEVICE RunningSum sum_up(PlanScratch& scratch, int64_t value) {
  const int lane = static_cast<int>(lane_index());
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = shuffle(value, lane < step ? lane : lane - step);
    if (lane >= step) value += other;
  }
  sync_block();  // the sums before are read
  if (lane == 31) scratch.sums[warp_index()] = value;
  sync_block();
  RunningSum sum{value, 0};
#pragma unroll
  for (unsigned warp = 0; warp < kPlanThreads / 32; ++warp) {
    if (warp < warp_index()) sum.own += scratch.sums[warp];
    sum.total += scratch.sums[warp];
  }
  return sum;
}

// The request that owns a row of q, or -1: the last that begins at or before it, if it reaches so far.
PASS_EXT_DEVICE int64_t owner_of(const AttentionProblem& problem, int64_t row) {
  int64_t low = 0, high = problem.requests;
  if (high == 0) return -1;
#pragma unroll 1
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (problem.cu_nodes[middle] <= row ? low : high) = middle;
  }
  const AttentionRequest request = request_of<true>(problem, low);
  return row >= request.first && row < int64_t{request.first} + request.nodes ? low : -1;
}

// Writes the tasks. A thread adds up some requests, and then writes some rows and some shares.
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kPlanThreads) plan_tasks_kernel(PASS_EXT_PARAMETER TaskPlan plan) {
  begin_kernel(plan);
  PASS_EXT_SHARED(PlanScratch, scratches, 1);
  PlanScratch& scratch = scratches[0];
  const AttentionProblem& problem = plan.problem;
  const int64_t count = (problem.requests + kPlanThreads - 1) / kPlanThreads, first = count * thread_rank();
  const auto sum_of = [&](const auto& of_request) {
    int64_t sum = 0;
#pragma unroll 1
    for (int64_t b = first; b < first + count && b < problem.requests; ++b)
      sum += of_request(request_of<true>(problem, b));
    return sum;
  };
  const int64_t items = problem.rows * plan.tasks.tiles;
  int64_t length = INT64_MAX, shares = 0;
  if (plan.is_split) {
    const int64_t work = sum_of([&](const AttentionRequest& request) {
      const PlaceRange places = plan.places_of(request);
      return places.end > places.begin ? int64_t{request.nodes} * (places.end - places.begin) : 0;
    });
    const int64_t least = int64_t{kPlacesOfStep} * plan.tasks.unit;
    length = sum_up(scratch, work).total * plan.tasks.tiles / plan.resident;
#pragma unroll 1
    for (;;) {
      if (length < least) length = 0;
      int64_t own_shares = 0;
      const int64_t own_parts = sum_of([&](const AttentionRequest& request) {
        const RequestTasks own = plan.tasks_of(request, length);
        own_shares += int64_t{request.nodes} * (own.last - own.cut);
        return int64_t{request.nodes} * own.parts();
      });
      const RunningSum parts = sum_up(scratch, own_parts), all = sum_up(scratch, own_shares);
      scratch.part_ends[thread_rank()] = parts.own;
      scratch.share_ends[thread_rank()] = all.own;
      shares = all.total;
      if (parts.total <= plan.most_parts) break;
      length += length / 4 + least;
    }
  }
  sync_block();  // the ends are there
  const int64_t first_tasks = length == 0 ? 0 : items;
  const int64_t thread = int64_t{block_index().x} * kPlanThreads + thread_rank();
  const int64_t threads = int64_t{grid_size().x} * kPlanThreads;
  if (thread == 0)
    *plan.tasks.counts = {static_cast<uint32_t>(first_tasks),
                          static_cast<uint32_t>(first_tasks + shares * plan.tasks.tiles)};
#pragma unroll 1
  for (int64_t row = thread; row < problem.rows; row += threads) {
    const int64_t owner = owner_of(problem, row);
    const int32_t unwritten = length == 0 ? 0 : -1;  // then no task has a row without places
    RowTasks found{-1, 0, {0, 0}, 0, 0, 0, unwritten};
    if (owner >= 0) {
      const AttentionRequest request = request_of<true>(problem, owner);
      const RequestTasks own = plan.tasks_of(request, length);
      const int32_t node = static_cast<int32_t>(row - request.first);
      const PlaceRange seen{first_place_in_reach(request, plan.lists), places_of(problem, request, plan.lists, node)};
      int32_t last = seen.begin < seen.end ? plan.share_of(seen.end - 1) + 1 : own.first;
      if (last > own.last) last = own.last;
      const int32_t cut = last < own.cut ? last : own.cut;
      found = {static_cast<int32_t>(owner), node, seen, own.first, cut, last, unwritten};
      if (!own.is_whole()) {
        const int64_t chunk = owner / count;
        int64_t part = chunk == 0 ? 0 : scratch.part_ends[chunk - 1];
#pragma unroll 1
        for (int64_t b = chunk * count; b < owner; ++b) {
          const AttentionRequest other = request_of<true>(problem, b);
          part += int64_t{other.nodes} * plan.tasks_of(other, length).parts();
        }
        found.part = static_cast<int32_t>(part + node * own.parts());
      }
    }
    plan.tasks.rows[row] = found;
  }
#pragma unroll 1
  for (int64_t index = thread; index < shares; index += threads) {
    int chunk = 0;  // the first whose end is above
#pragma unroll
    for (int step = kPlanThreads / 2; step > 0; step /= 2)
      if (scratch.share_ends[chunk + step - 1] <= index) chunk += step;
    int64_t i = chunk == 0 ? index : index - scratch.share_ends[chunk - 1];
#pragma unroll 1
    for (int64_t b = chunk * count;; ++b) {
      const AttentionRequest request = request_of<true>(problem, b);
      const RequestTasks own = plan.tasks_of(request, length);
      const int64_t all = int64_t{request.nodes} * (own.last - own.cut);
      if (i >= all) {
        i -= all;
        continue;
      }
      // The last shares are the longest, and begin first.
      plan.tasks.shares[index] = {request.first + static_cast<int32_t>(i % request.nodes),
                                  own.last - 1 - static_cast<int32_t>(i / request.nodes)};
      break;
    }
  }
}

inline void launch_plan(const AttentionProblem& problem, const KeyLists& lists, const TaskGrid& grid,
                        const AttentionTasks& tasks, Stream stream) {
  const int64_t threads = problem.rows > grid.most_parts ? problem.rows : grid.most_parts;
  const int64_t blocks = between((threads + kPlanThreads - 1) / kPlanThreads, 1, grid.resident);
  launch("attention_tree (plan)", plan_tasks_kernel, LaunchShape{{blocks}, {kPlanThreads}}, stream,
         TaskPlan{problem, lists, tasks, grid.resident, grid.most_parts, grid.is_split});
}

}  // namespace pass_ext::gpu
