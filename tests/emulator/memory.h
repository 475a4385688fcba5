// What the emulator knows of every byte that a kernel may touch: which buffer it belongs to, whether it was ever
// written, and which threads touched it last, so that two accesses that nothing orders are found whatever order they
// ran in.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"

namespace emulator {

constexpr unsigned kMostThreads = 1024;
constexpr const char* kParameters = "the kernel's parameters";  // name of that buffer

// A moment in one thread's life: bit 63 set, block 22 bits, thread 10, the thread's clock 31.
// The clock counts what may make the thread's past known to others: barriers, warp barriers, fences.
struct Stamp {
  uint64_t bits = 0;
  Stamp() = default;
  Stamp(unsigned block, unsigned thread, uint32_t clock)
      : bits(1ull << 63 | static_cast<uint64_t>(block & 0x3fffff) << 41 | static_cast<uint64_t>(thread & 0x3ff) << 31 |
             (clock & 0x7fffffff)) {}
  explicit operator bool() const { return bits != 0; }
  unsigned block() const { return bits >> 41 & 0x3fffff; }
  unsigned thread() const { return bits >> 31 & 0x3ff; }
  uint32_t clock() const { return bits & 0x7fffffff; }
  bool is_of_same_thread(Stamp other) const { return bits >> 31 == other.bits >> 31; }
};

// Who touched a byte last, or neighbours that have the same past. read, update: of two different threads, of two
// different blocks where there were two.
struct Byte {
  Stamp write, update[2], read[2];
  bool operator==(const Byte& other) const {
    return ((write.bits ^ other.write.bits) | (update[0].bits ^ other.update[0].bits) |
            (update[1].bits ^ other.update[1].bits) | (read[0].bits ^ other.read[0].bits) |
            (read[1].bits ^ other.read[1].bits)) == 0;
  }
};

// A past that somebody knows, of the threads of one block: all that thread t did while its clock was below past[t].
using Past = std::vector<uint32_t>;

// The running thread: what it knows of its block through block barriers, and of its warp beyond that.
struct Observer {
  unsigned block, thread;
  const uint32_t* by_barrier;  // [threads]
  const uint32_t* by_warp;     // [32]
  uint32_t clock() const { return by_warp[thread % 32]; }
  bool knows(unsigned other, uint32_t moment) const {
    return other == thread || moment < by_barrier[other] || (other / 32 == thread / 32 && moment < by_warp[other % 32]);
  }
};

// Where an address lies: read_only and written are global memory, parameters the running kernel's.
enum class Place { shared, read_only, written, parameters, nowhere };

class Memory {
 public:
  Memory(char* shared, size_t shared_bytes);

  void add_buffer(const std::string& name, void* address, size_t bytes, Content content);
  void tell_buffer(const std::string& name, void* address, size_t bytes, Content content);
  void add_shared(const std::string& name, void* address, size_t bytes);
  void forget_shared();     // a block ended
  void forget_order();      // a launch ended: everything before is ordered before everything after
  void forget_temporary();  // the buffers added since the last mark_temporary
  void mark_temporary() { permanent_ = regions_.size(); }
  void forget_all();

  bool is_shared(const void* address) const { return address >= shared_ && address < shared_ + shared_bytes_; }

  Place place_of(const void* address);
  // Checks and records one access, and counts its bytes if `counts`; false if it is wrong.
  bool access(const void* address, size_t bytes, Access kind, const Observer& observer, bool counts);
  const std::string& what_is_wrong() const { return wrong_; }  // with the last access that was
  std::map<std::string, Traffic> traffic() const;              // of each buffer, by its name
  std::string begin_async_write(void* address, size_t bytes, const Observer& observer);
  void finish_async_write(void* address, size_t bytes, const Observer& observer);
  std::string check_streaming(const void* address, size_t bytes);
  // An atomic on global memory: `fenced`, the past of its block that a fence lies behind (null for none), is published
  // at the address, and what other blocks have published there becomes known.
  void synchronise(const void* address, const Past* fenced, const Observer& observer);

 private:
  struct Region {
    std::string name;
    char* begin;
    size_t size;
    Content content;
    bool is_shared;
    Byte* bytes;                 // of each unit of 2^shift bytes; null where read-only
    std::vector<uint8_t> flags;  // of each unit, of kWritten and kInFlight; empty where initialised
    // As many as have one past: 4 bytes, until an access touches a part of them.
    unsigned shift = size % 4 == 0 ? 2 : 0;
    Traffic traffic = {};
  };
  struct Acquisition {
    unsigned thread;
    uint32_t clock;
  };

  Region* find(const void* address);
  std::string describe(const Region& region, const void* address, size_t bytes) const;
  std::string nearest(const void* address) const;
  bool is_ordered(const Region& region, Stamp earlier, const Observer& observer) const;
  bool is_published(Stamp earlier, const Observer& observer) const;  // of another block
  bool fails_outside(const Region* region, const void* address, size_t bytes, Access kind);
  void split_units(Region& region, size_t extent);  // until the extent, an offset or a size, is a multiple of them
  // Checks an access inside a region and records it.
  bool record(Region& region, const void* address, size_t bytes, Access kind, const Observer& observer);
  std::string conflict(const Region& region, const void* address, size_t bytes, Access kind, Stamp other,
                       const char* what, const Observer& observer) const;
  bool knows_address(const std::vector<Acquisition>& acquisitions, const Observer& observer) const;
  void release_bytes(Region& region);

  char* shared_;
  size_t shared_bytes_;
  Byte* shared_stamps_;
  std::vector<std::unique_ptr<Region>> regions_;
  size_t permanent_ = 0;
  size_t unnamed_ = 0;
  std::array<Region*, 256> recent_ = {};  // where an address was found last, by its bits above the lowest 8
  std::string wrong_;
  std::map<const void*, std::map<unsigned, Past>> published_;  // address -> block -> what it published there
  std::map<const void*, std::vector<Acquisition>> acquired_;   // by the running block
};

}  // namespace emulator
