// The critical path of a launch: the work and the waits of its slowest threads, in sequence.
//   path(thread) += cycles(event) for each event of the thread;
//   where threads wait for each other (barrier, warp operation, an atomic on the same address), all continue with the
//   longest of their paths; a launch's path is the longest path of its threads.
// All blocks begin at once. Lanes that take different branches run side by side here; on a GPU they take turns.
// Loads since threads last waited for each other are one round, which takes as long as the farthest of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace emulator {

enum class Event {
  instruction,  // of one warp, by the weights of its basic blocks
  memory_load,  // rounds of loads, by their farthest address: memory_load for a line not yet read on the device,
  l2_load,      // l2_load for one read by earlier launches or by blocks that handed over, or written by kernels,
  l1_load,      // l1_load for one that the same block has read
  shared_load,
  shared_atomic,
  warp_operation,
  block_barrier,
  fence,
  atomic,          // on global memory
  matrix_product,  // m16n8k16
  count
};
constexpr size_t kEvents = static_cast<size_t>(Event::count);
extern const char* const kEventNames[kEvents];

using EventCounts = std::array<uint32_t, kEvents>;

struct Path {
  double cycles = 0.0;
  EventCounts counts{};
};

struct PathSettings {
  std::array<double, kEvents> cycles{};             // per event: they decide which path is the longest
  std::unordered_map<uintptr_t, uint32_t> weights;  // return address of a basic block's hook -> its instructions
};

// The record of one launch.
struct LaunchPath {
  std::string name;
  uint32_t blocks = 0, threads = 0;
  Path path;
  uint64_t lines = 0;  // of 128 bytes, read from global memory, that no kernel wrote
};

class PathRecorder {
 public:
  bool is_on = false;

  void start(PathSettings settings);
  std::vector<LaunchPath> stop();

  void begin_launch(const char* name, uint32_t blocks, uint32_t threads);
  void begin_block(uint32_t threads);
  void end_thread(unsigned rank);
  void end_launch();

  void run_code(unsigned rank, const void* address);
  void add(unsigned rank, Event event);
  // Threads of a group wait for each other: join_warp, those of [first, first + 32) in `mask`; join_block, the first
  // `count` of the block. Event::count: the wait itself costs nothing.
  void join_warp(unsigned first, unsigned mask, Event event);
  void join_block(unsigned count);
  void load_shared(unsigned rank);
  void load_global(unsigned rank, const void* address, bool is_written);
  void update_global(unsigned rank, const void* address);
  double begin_copy(unsigned rank, const void* address, bool is_written);  // returns the copy's arrival, in cycles
  void wait_for_copy(unsigned rank, double arrival);

 private:
  static constexpr int kNoRound = -1;
  struct Thread {
    Path path;
    int global = kNoRound, shared = kNoRound;  // the rounds under way: the event of the farthest of their loads
  };

  void load(Thread& thread, int& round, Event event);
  void count(Path& path, Event event, uint32_t times = 1);
  Event level_of(const Thread& thread, const void* address, bool is_written);

  PathSettings settings_;
  std::vector<LaunchPath> launches_;
  std::vector<Thread> threads_;
  std::map<const void*, Path> published_;
  std::unordered_set<uintptr_t> block_lines_, launch_lines_, earlier_lines_;
};

}  // namespace emulator
