// What the emulator knows of every byte that a kernel may touch: which buffer it belongs to, whether it was ever
// written, and which threads touched it last, so that two accesses that nothing orders are found whatever order they
// ran in. Called by engine.cpp and hooks.cpp.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"

namespace emulator {

// A moment in one thread's life: bit 63 set, block 22 bits, thread 10, block barriers passed 15, warp barriers
// passed 16.
struct Stamp {
  uint64_t bits = 0;
  Stamp() = default;
  Stamp(unsigned block, unsigned thread, unsigned epoch, unsigned clock)
      : bits(1ull << 63 | static_cast<uint64_t>(block & 0x3fffff) << 41 | static_cast<uint64_t>(thread & 0x3ff) << 31 |
             static_cast<uint64_t>(epoch & 0x7fff) << 16 | (clock & 0xffff)) {}
  explicit operator bool() const { return bits != 0; }
  unsigned block() const { return bits >> 41 & 0x3fffff; }
  unsigned thread() const { return bits >> 31 & 0x3ff; }
  unsigned epoch() const { return bits >> 16 & 0x7fff; }
  unsigned clock() const { return bits & 0xffff; }
};

struct Byte {
  Stamp write, atomic, read[2];  // read: of the two threads that read last
  bool initialised = false;
  bool in_flight = false;  // an asynchronous copy into it has not been waited for
};

struct Region {
  std::string name;
  char* begin;
  size_t size;
  Content content;
  bool is_shared;
  std::vector<Byte> bytes;  // empty where read-only
};

// Another block's writes become visible through: fence, atomic by that block; atomic on the same address by this one.
struct Release {
  unsigned epoch, thread;
};
struct Acquired {
  Release release;
  unsigned by_thread, at_epoch;
};

// The running thread, as far as ordering is concerned.
struct Observer {
  unsigned block, thread, epoch;
  const uint32_t* seen;  // [32]: warp barriers of each lane of my warp that I know to have passed
  unsigned clock() const { return seen[thread % 32]; }
};

class Memory {
 public:
  void add_region(Region region);
  void drop_shared_regions();
  void drop_all_regions();
  void forget_stamps();        // a launch ended: everything before is ordered before everything after
  void forget_acquisitions();  // a block ended

  // Checks and records one access; returns "" or what is wrong with it.
  std::string access(const void* address, size_t bytes, Access kind, const Observer& observer);
  std::string begin_async_write(void* address, size_t bytes, const Observer& observer);
  void finish_async_write(void* address, size_t bytes, const Observer& observer);
  std::string check_streaming(const void* address, size_t bytes);
  // An atomic of a thread that has fenced publishes its block's ordered writes; every atomic sees what was published.
  void synchronise(const void* address, bool publishes, const Observer& observer);

 private:
  Region* find(const void* address);
  std::string describe(const Region& region, const void* address, size_t bytes) const;
  bool is_ordered(Stamp earlier, const Observer& observer) const;
  std::string nearest(const void* address) const;

  std::vector<std::unique_ptr<Region>> regions_;
  Region* last_ = nullptr;
  std::map<const void*, std::map<unsigned, Release>> published_;
  std::map<unsigned, Acquired> acquired_;
};

}  // namespace emulator
