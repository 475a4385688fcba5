// The critical path of a launch: what its slowest threads do and wait for, one thing after the other.
//   path(thread) grows by what the thread does, each event by its cycles;
//   where threads wait for each other (barrier, warp operation, an atomic on the same address) all go on with the
//   longest of their paths; a launch's path is the longest of all threads'.
// All blocks begin at once. Lanes that take different branches run side by side here, in turn on a GPU. A load waits
// unless it is issued in a round with loads before it: kLeast, since threads last waited for each other; kMost, in the
// same basic block, or in up to four turns of a loop, which is how far compilers unroll; of loads of 16 bytes, which
// kernels write for that, up to eight.
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
  memory_load,  // rounds of loads, by the farthest of their addresses: of a line nobody has read on the device,
  l2_load,      // of one that an earlier launch has read, or blocks that have handed over, or that kernels write,
  l1_load,      // of one that the same block has read
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
  std::array<double, kEvents> cycles{};             // of one event: they say which path is the longest
  bool most = false;                                // rounds of loads: kMost
  std::unordered_map<uintptr_t, uint32_t> weights;  // return address of a basic block's hook -> its instructions
};

// What is known of one launch. Marks: the longest path up to a thread's first matrix product, and up to its first
// atomic on global memory, by which blocks hand over.
struct LaunchPath {
  std::string name;
  uint32_t blocks = 0, threads = 0;
  Path whole, to_product, to_atomic;
  uint64_t code = 0;   // instructions of all basic blocks that ran
  uint64_t lines = 0;  // of 128 bytes that were read from global memory
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
  // Threads [first, first + 32) of `mask`, or the first `count` of the block, wait for each other. Event::count: for
  // nothing.
  void join_warp(unsigned first, unsigned mask, Event event);
  void join_block(unsigned count);
  void load_shared(unsigned rank, bool is_wide);
  void load_global(unsigned rank, const void* address, bool is_written, bool is_wide);
  void update_global(unsigned rank, const void* address);
  double begin_copy(unsigned rank, const void* address, bool is_written);  // when it will have arrived
  void wait_for_copy(unsigned rank, double arrival);

 private:
  // Loads under way: of which event, and where the last of them stands in the code.
  struct Round {
    int event = -1;
    uintptr_t place = 0;
    uint64_t turn = 0;
    int turns = 0;
  };
  struct Thread {
    Path path;
    Round global, shared;
    uintptr_t place = 0;  // basic block
    uint64_t turn = 0;    // basic blocks so far
    bool has_product = false, has_atomic = false;
  };

  void load(Thread& thread, Round& round, Event event, bool is_wide);
  void count(Path& path, Event event, uint32_t times = 1);
  void mark(bool& done, Path& mark, const Path& path);
  Event level_of(const Thread& thread, const void* address, bool is_written);

  PathSettings settings_;
  std::vector<LaunchPath> launches_;
  std::vector<Thread> threads_;
  std::map<const void*, Path> published_;
  std::unordered_set<uintptr_t> block_lines_, launch_lines_, earlier_lines_, code_;
};

}  // namespace emulator
