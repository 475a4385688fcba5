// Fibers, the shuffled scheduler, barriers and warp operations; see engine.h.
// A fiber runs until it waits for others. Not instrumented: what this file does is not an access by a kernel.
#include "engine.h"

#include <link.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "core/half.h"
#include "critical_path.h"
#include "memory.h"

namespace emulator {
namespace {

constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kSharedBytes = 512 * 1024;
constexpr size_t kRedZone = 128;
constexpr unsigned kMostAtomicsInARow = 1 << 18;

enum class State { ready, at_block_barrier, at_warp_operation, returned };

struct AsyncCopy {
  void* to;
  const void* from;
  char before[16];  // what `from` held at the issue
  size_t bytes;
  bool valid;
  int group;       // of this thread; kUncommitted before the commit
  double arrival;  // on its critical path
};
constexpr int kUncommitted = 1 << 30;

struct Thread {
  State state = State::ready;
  const char* waits_for = "";  // name of the operation
  unsigned mask = 0;
  uint64_t input[5] = {}, output[4] = {};  // of a warp operation
  bool vote = false;
  int votes = 0;
  uint32_t seen[32] = {};    // the past of each lane of my warp that I know, my own clock among them
  uint32_t fenced[32] = {};  // of that, what I know to lie behind a fence
  std::shared_ptr<const Past> fenced_by_barrier;  // and of the block's past that came by block barriers
  std::vector<AsyncCopy> copies;
  unsigned atomics_in_a_row = 0;
  int groups = 0;
  jmp_buf context;
  bool has_stack_frame = false;  // the fiber has started and waits in its loop or in the kernel
};

struct Engine {
  std::mt19937_64 random;
  std::unique_ptr<Memory> memory;
  bool in_session = false;
  uint64_t launches = 0;
  uint64_t accesses = 0;
  bool records_copies = false;
  std::vector<CopyRecord> copies;
  PathRecorder paths;
  Exp2Error exp2_error = Exp2Error::none;
  int multiprocessors = 0, resident_blocks = 1;
  std::vector<int32_t> counters;
  bool is_inside_operation = false;  // whose accesses are no loads of their own
  bool looks_again = false;          // at an access that was counted
  std::map<std::string, Traffic> traffic;

  // the launch
  const char* name = "";
  Index3 grid, block;
  void (*thread_body)(const void*) = nullptr;
  const void* call = nullptr;
  size_t dynamic_bytes = 0;

  // the block
  Index3 block_position;
  unsigned block_rank = 0, running_threads = 0, waiting_threads = 0;  // waiting: at the block barrier
  std::shared_ptr<Past> by_barrier;  // the past of every thread that the last block barrier made known to all
  bool has_fenced = false;
  Past fenced;  // the part of it that lies behind a fence
  std::vector<std::pair<const void*, void*>> shared_sites;
  size_t shared_used = 0;

  std::array<Thread, kMostThreads> threads;
  std::vector<unsigned> ready;
  Thread* current = nullptr;
  unsigned current_rank = 0;
  jmp_buf scheduler;
  std::string error;
  char* stacks = nullptr;
  char* shared = nullptr;
};

Engine* make_engine() {
  auto* made = new Engine;
  made->stacks = static_cast<char*>(mmap(nullptr, kStackBytes * kMostThreads, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  made->shared =
      static_cast<char*>(mmap(nullptr, kSharedBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  made->memory = std::make_unique<Memory>(made->shared, kSharedBytes);
  for (unsigned i = 0; i < kMostThreads; ++i) mprotect(made->stacks + i * kStackBytes, 4096, PROT_NONE);
  return made;
}

Engine* const the_engine = make_engine();

Engine& engine() { return *the_engine; }

Index3 unflatten(unsigned rank, Index3 size) {
  return {rank % size.x, rank / size.x % size.y, rank / (size.x * size.y)};
}

Observer observer() {
  Engine& e = engine();
  return {e.block_rank, e.current_rank, e.by_barrier->data(), e.current->seen};
}

[[noreturn]] void back_to_scheduler() { _longjmp(engine().scheduler, 1); }

// Records what is wrong, with who did it, and gives up the launch: the fibers are simply never resumed.
[[noreturn]] void fail(const std::string& what) {
  Engine& e = engine();
  std::ostringstream text;
  text << "kernel " << e.name << ", block (" << e.block_position.x << ", " << e.block_position.y << ", "
       << e.block_position.z << "), thread " << e.current_rank << ": " << what;
  e.error = text.str();
  back_to_scheduler();
}

void fail_if(const std::string& what) {
  if (!what.empty()) fail(what);
}

// The fiber waits until somebody makes it ready.
void wait(State state, const char* operation) {
  Thread& me = *engine().current;
  me.state = state;
  me.waits_for = operation;
  if (_setjmp(me.context) == 0) back_to_scheduler();
}

void make_ready(unsigned rank) {
  Engine& e = engine();
  e.threads[rank].state = State::ready;
  e.ready.push_back(rank);
}

// Where a fiber lives: runs the kernel for one thread after another, block after block.
void fiber_main() {
  for (;;) {
    Engine& e = engine();
    e.thread_body(e.call);
    engine().current->state = State::returned;
    if (_setjmp(engine().current->context) == 0) back_to_scheduler();
  }
}

void resume(unsigned rank) {
  Engine& e = engine();
  Thread& thread = e.threads[rank];
  e.current = &thread;
  e.current_rank = rank;
  thread.atomics_in_a_row = 0;
  if (_setjmp(e.scheduler) == 0) {
    if (thread.has_stack_frame) _longjmp(thread.context, 1);
    thread.has_stack_frame = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = e.stacks + rank * kStackBytes + 4096;
    start.uc_stack.ss_size = kStackBytes - 4096;
    makecontext(&start, fiber_main, 0);
    setcontext(&start);
  }
  e.current = nullptr;
}

// Everybody's past becomes known to all, and with it what each knows to be fenced.
void join_pasts(unsigned count) {
  Engine& e = engine();
  if (e.by_barrier.use_count() > 1) e.by_barrier = std::make_shared<Past>(*e.by_barrier);
  for (unsigned i = 0; i < count; ++i) {
    Thread& thread = e.threads[i];
    (*e.by_barrier)[i] = ++thread.seen[i % 32];
    if (!e.has_fenced) continue;
    for (unsigned lane = 0; lane < 32 && i / 32 * 32 + lane < count; ++lane) {
      uint32_t& fenced = e.fenced[i / 32 * 32 + lane];
      fenced = std::max(fenced, thread.fenced[lane]);
    }
    if (thread.fenced_by_barrier)
      for (unsigned k = 0; k < count; ++k) e.fenced[k] = std::max(e.fenced[k], (*thread.fenced_by_barrier)[k]);
    thread.fenced_by_barrier = nullptr;
  }
}

// If every thread that still runs is at the block barrier, all go on.
void try_block_barrier() {
  Engine& e = engine();
  if (e.waiting_threads == 0 || e.waiting_threads != e.running_threads) return;
  const unsigned count = e.block.x * e.block.y * e.block.z;
  int votes = 0;
  const char* operation = nullptr;
  for (unsigned i = 0; i < count; ++i) {
    const Thread& thread = e.threads[i];
    if (thread.state != State::at_block_barrier) continue;
    if (operation && std::strcmp(operation, thread.waits_for) != 0) return;  // reported as a divergence
    operation = thread.waits_for;
    votes += thread.vote;
  }
  e.waiting_threads = 0;
  join_pasts(count);
  if (e.paths.is_on) e.paths.join_block(count);
  for (unsigned i = 0; i < count; ++i)
    if (e.threads[i].state == State::at_block_barrier) {
      e.threads[i].votes = votes;
      make_ready(i);
    }
}

std::string describe_waiting() {
  Engine& e = engine();
  const unsigned count = e.block.x * e.block.y * e.block.z;
  std::ostringstream text;
  text << "kernel " << e.name << ", block (" << e.block_position.x << ", " << e.block_position.y << ", "
       << e.block_position.z << "): divergence: nobody can go on.";
  for (unsigned i = 0, shown = 0; i < count && shown < 40; ++i) {
    const Thread& thread = e.threads[i];
    const unsigned first = i;
    const auto alike = [&](const Thread& other) {
      if (other.state == State::returned || thread.state == State::returned) return other.state == thread.state;
      return other.state == thread.state && other.mask == thread.mask &&
             !std::strcmp(other.waits_for, thread.waits_for);
    };
    while (i + 1 < count && alike(e.threads[i + 1])) ++i;
    text << " Thread" << (i > first ? "s " : " ") << first;
    if (i > first) text << " to " << i;
    if (thread.state == State::returned)
      text << (i > first ? " have returned." : " has returned.");
    else
      text << " at " << thread.waits_for;
    if (thread.state == State::at_warp_operation) text << std::hex << " (mask 0x" << thread.mask << std::dec << ")";
    if (thread.state != State::returned) text << '.';
    ++shown;
  }
  return text.str();
}

void run_block(unsigned rank) {
  Engine& e = engine();
  e.block_rank = rank;
  e.block_position = unflatten(rank, e.grid);
  const unsigned count = e.block.x * e.block.y * e.block.z;
  e.by_barrier = std::make_shared<Past>(count);
  e.fenced.assign(count, 0);
  e.has_fenced = false;
  e.waiting_threads = 0;
  e.shared_sites.clear();
  e.shared_used = 0;
  if (e.dynamic_bytes > 0) {
    e.memory->add_shared("dynamic shared memory", e.shared, e.dynamic_bytes);
    e.shared_used = (e.dynamic_bytes + kRedZone + 127) / 128 * 128;
  }
  e.running_threads = count;
  e.ready.clear();
  for (unsigned i = 0; i < count; ++i) {
    Thread& thread = e.threads[i];
    memset(thread.seen, 0, sizeof thread.seen);
    memset(thread.fenced, 0, sizeof thread.fenced);
    thread.fenced_by_barrier = nullptr;
    thread.copies.clear();
    thread.groups = 0;
    thread.mask = 0;
    thread.waits_for = "";
    make_ready(i);
  }
  if (e.paths.is_on) e.paths.begin_block(count);
  while (e.error.empty() && !e.ready.empty()) {
    std::swap(e.ready[e.random() % e.ready.size()], e.ready.back());
    const unsigned next = e.ready.back();
    e.ready.pop_back();
    resume(next);
    if (e.threads[next].state == State::returned) {
      if (e.paths.is_on) e.paths.end_thread(next);
      --e.running_threads;
      try_block_barrier();
    }
  }
  if (e.error.empty() && e.running_threads > 0) e.error = describe_waiting();
  e.memory->forget_shared();
}

using Complete = void (*)(unsigned warp_start, unsigned mask);

// Waits until every lane of `mask` is at the same operation; the last to come computes all outputs. `event`: what it
// costs; Event::count: nothing.
void warp_operation(const char* name, unsigned mask, Complete complete, Event event = Event::warp_operation) {
  Engine& e = engine();
  Thread& me = *e.current;
  const unsigned start = e.current_rank / 32 * 32, count = e.block.x * e.block.y * e.block.z;
  if (!(mask >> (e.current_rank % 32) & 1))
    fail(std::string("divergence: calls ") + name + " with a mask without itself");
  const unsigned lanes = std::min(32u, count - start);
  if (lanes < 32) mask &= (1u << lanes) - 1;  // lanes that the block does not have
  me.mask = mask;
  for (unsigned lane = 0; lane < lanes; ++lane) {
    if (!(mask >> lane & 1) || start + lane == e.current_rank) continue;
    const Thread& other = e.threads[start + lane];
    if (other.state == State::at_warp_operation && other.mask == mask &&
        (other.waits_for == name || !std::strcmp(other.waits_for, name)))
      continue;
    wait(State::at_warp_operation, name);
    return;
  }
  complete(start, mask);
  if (e.paths.is_on) e.paths.join_warp(start, mask, event);
  for (unsigned lane = 0; lane < lanes; ++lane)
    if (mask >> lane & 1 && start + lane != e.current_rank) make_ready(start + lane);
}

template <typename Function>
void for_each_lane(unsigned start, unsigned mask, Function&& function) {
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) function(lane, engine().threads[start + lane]);
}

// Read-only data of loaded programs and libraries (constants in kernels) is nobody's buffer and nobody's fault.
bool is_constant_data(const void* address) {
  struct Query {
    uintptr_t address;
    bool found;
  } query{reinterpret_cast<uintptr_t>(address), false};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto* q = static_cast<Query*>(data);
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& segment = info->dlpi_phdr[i];
          const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
          if (segment.p_type == PT_LOAD && !(segment.p_flags & PF_W) && q->address >= begin &&
              q->address < begin + segment.p_memsz)
            q->found = true;
        }
        return static_cast<int>(q->found);
      },
      &query);
  return query.found;
}

}  // namespace

// ---- from tests ----

void begin_session(uint64_t seed) {
  Engine& e = engine();
  if (e.in_session) throw std::logic_error("the emulator already runs a session");
  e.in_session = true;
  e.random.seed(seed);
  e.accesses = 0;
  e.looks_again = false;
  e.counters.assign(kCounters, 0);
}

void add_buffer(const std::string& name, void* address, size_t bytes, Content content) {
  if (bytes > 0) engine().memory->add_buffer(name, address, bytes, content);
}

void tell_buffer(const std::string& name, void* address, size_t bytes, Content content) {
  engine().memory->tell_buffer(name, address, bytes, content);
}

void set_gpu(int multiprocessors, int resident_blocks) {
  engine().multiprocessors = multiprocessors;
  engine().resident_blocks = resident_blocks;
}
int multiprocessors() { return engine().multiprocessors; }
int resident_blocks() { return engine().resident_blocks; }

int32_t* counters() {
  std::vector<int32_t>& counters = engine().counters;
  tell_buffer("counters", counters.data(), kCounters * sizeof(int32_t), Content::initialised);
  return counters.data();
}

bool counters_are_zero() {
  const std::vector<int32_t>& counters = engine().counters;
  return std::all_of(counters.begin(), counters.end(), [](int32_t counter) { return counter == 0; });
}

void record_copies() { engine().records_copies = true; }

std::vector<CopyRecord> taken_copies() {
  engine().records_copies = false;
  return std::move(engine().copies);
}

void set_exp2_error(Exp2Error error) { engine().exp2_error = error; }

uint64_t count_launches() { return engine().launches; }
uint64_t count_accesses() { return engine().accesses; }
std::map<std::string, Traffic> count_bytes() { return engine().traffic; }

bool enters_code = false;

void record_paths(PathSettings settings) {
  engine().paths.start(std::move(settings));
  enters_code = true;
}

std::vector<LaunchPath> taken_paths() {
  enters_code = false;
  return engine().paths.stop();
}

void end_session() {
  engine().traffic = engine().memory->traffic();
  engine().memory->forget_all();
  engine().in_session = false;
}

// ---- from launch() ----

void run_grid(const char* name, Index3 grid, Index3 block, size_t dynamic_shared_bytes,
              void (*thread_body)(const void*), const void* call, size_t call_bytes) {
  Engine& e = engine();
  const uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
  const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
  if (threads == 0 || threads > kMostThreads || blocks == 0 || grid.y > 65535 || grid.z > 65535 || blocks >= 1u << 22 ||
      dynamic_shared_bytes > 227 * 1024)
    throw std::runtime_error(std::string("kernel ") + name + ": invalid launch: " + std::to_string(blocks) +
                             " blocks of " + std::to_string(threads) + " threads, " +
                             std::to_string(dynamic_shared_bytes) + " bytes of dynamic shared memory");
  e.name = name;
  e.grid = grid;
  e.block = block;
  e.dynamic_bytes = dynamic_shared_bytes;
  e.thread_body = thread_body;
  e.call = call;
  e.is_inside_operation = false;
  e.error.clear();
  char* const call_begin = static_cast<char*>(const_cast<void*>(call));
  e.memory->mark_temporary();
  e.memory->add_buffer(kParameters, call_begin, call_bytes, Content::read_only);
  std::vector<unsigned> order(blocks);
  for (unsigned i = 0; i < blocks; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), e.random);
  ++e.launches;
  if (e.paths.is_on) e.paths.begin_launch(name, static_cast<uint32_t>(blocks), static_cast<uint32_t>(threads));
  for (unsigned rank : order) {
    run_block(rank);
    if (!e.error.empty()) break;
  }
  if (e.paths.is_on) e.paths.end_launch();
  e.memory->forget_temporary();
  e.memory->forget_order();
  if (e.error.empty()) return;
  for (Thread& thread : e.threads) thread.has_stack_frame = false;  // abandoned in the middle of the kernel
  throw std::runtime_error(e.error);
}

// ---- from kernels ----

Index3 thread_index() { return unflatten(engine().current_rank, engine().block); }
Index3 block_index() { return engine().block_position; }
Index3 block_size() { return engine().block; }
Index3 grid_size() { return engine().grid; }
unsigned thread_rank() { return engine().current_rank; }

void* shared_array(const void* site, const char* name, size_t bytes) {
  Engine& e = engine();
  for (const auto& [known, address] : e.shared_sites)
    if (known == site) return address;
  const size_t begin = e.shared_used + kRedZone, end = (begin + bytes + kRedZone + 127) / 128 * 128;
  if (begin + bytes + kRedZone > kSharedBytes) fail("static shared memory is used up");
  char* const address = e.shared + begin;
  e.memory->add_shared(std::string("shared array ") + name, address, bytes);
  e.shared_sites.emplace_back(site, address);
  e.shared_used = end;
  return address;
}

void* dynamic_shared() { return engine().shared; }

int block_barrier(const char* name, bool vote) {
  Thread& me = *engine().current;
  me.vote = vote;
  me.state = State::at_block_barrier;
  ++engine().waiting_threads;
  me.waits_for = name;
  try_block_barrier();  // may make everybody ready, this thread too
  if (_setjmp(me.context) == 0) back_to_scheduler();
  return me.votes;
}

void warp_barrier(unsigned mask) {
  Engine& e = engine();
  e.current->seen[e.current_rank % 32] += 1;
  warp_operation(
      "sync_warp", mask,
      [](unsigned start, unsigned lanes) {
        uint32_t seen[32] = {}, fenced[32] = {};
        std::shared_ptr<const Past> fenced_by_barrier;
        for_each_lane(start, lanes, [&](unsigned, Thread& thread) {
          for (int i = 0; i < 32; ++i) seen[i] = std::max(seen[i], thread.seen[i]);
          if (!engine().has_fenced) return;
          for (int i = 0; i < 32; ++i) fenced[i] = std::max(fenced[i], thread.fenced[i]);
          if (thread.fenced_by_barrier) fenced_by_barrier = thread.fenced_by_barrier;
        });
        for_each_lane(start, lanes, [&](unsigned, Thread& thread) {
          memcpy(thread.seen, seen, sizeof seen);
          if (!engine().has_fenced) return;
          memcpy(thread.fenced, fenced, sizeof fenced);
          thread.fenced_by_barrier = fenced_by_barrier;
        });
      },
      Event::instruction);
}

uint64_t shuffle(const char* name, uint64_t value, int source_lane, unsigned mask) {
  Thread& me = *engine().current;
  const unsigned count = engine().block.x * engine().block.y * engine().block.z;
  const unsigned source = engine().current_rank / 32 * 32 + static_cast<unsigned>(source_lane);
  if (!(mask >> source_lane & 1) || source >= count)
    fail(std::string("undefined: ") + name + " from lane " + std::to_string(source_lane) +
         ", which does not take part");
  me.input[0] = value;
  me.input[1] = static_cast<uint64_t>(source_lane);
  warp_operation(name, mask, [](unsigned start, unsigned lanes) {
    for_each_lane(start, lanes, [&](unsigned, Thread& thread) {
      thread.output[0] = engine().threads[start + thread.input[1]].input[0];
    });
  });
  return me.output[0];
}

unsigned ballot(const char* name, bool vote, unsigned mask) {
  Thread& me = *engine().current;
  me.input[0] = vote;
  warp_operation(name, mask, [](unsigned start, unsigned lanes) {
    unsigned votes = 0;
    for_each_lane(start, lanes,
                  [&](unsigned lane, Thread& thread) { votes |= static_cast<unsigned>(thread.input[0]) << lane; });
    for_each_lane(start, lanes, [&](unsigned, Thread& thread) { thread.output[0] = votes; });
  });
  return static_cast<unsigned>(me.output[0]);
}

uint32_t largest(const char* name, uint32_t value, unsigned mask) {
  Thread& me = *engine().current;
  me.input[0] = value;
  warp_operation(name, mask, [](unsigned start, unsigned lanes) {
    uint64_t most = 0;
    for_each_lane(start, lanes, [&](unsigned, Thread& thread) { most = std::max(most, thread.input[0]); });
    for_each_lane(start, lanes, [&](unsigned, Thread& thread) { thread.output[0] = most; });
  });
  return static_cast<uint32_t>(me.output[0]);
}

void fence() {
  Engine& e = engine();
  Thread& me = *e.current;
  if (e.paths.is_on) e.paths.add(e.current_rank, Event::fence);
  ++me.seen[e.current_rank % 32];  // what I do from here on lies behind no fence
  memcpy(me.fenced, me.seen, sizeof me.fenced);
  me.fenced_by_barrier = e.by_barrier;
  e.has_fenced = true;
}

// What of its block's past the running thread knows to lie behind a fence.
static Past fenced_past() {
  Engine& e = engine();
  const Thread& me = *e.current;
  Past past = e.fenced;
  if (me.fenced_by_barrier)
    for (size_t i = 0; i < past.size(); ++i) past[i] = std::max(past[i], (*me.fenced_by_barrier)[i]);
  const unsigned start = e.current_rank / 32 * 32;
  for (unsigned lane = 0; lane < 32 && start + lane < past.size(); ++lane)
    past[start + lane] = std::max(past[start + lane], me.fenced[lane]);
  return past;
}

uint32_t larger_bfloat16s(uint32_t a, uint32_t b) {
  const auto larger = [](uint32_t x, uint32_t y) -> uint32_t {
    const float left = pass_ext::to_float(pass_ext::bfloat16{static_cast<uint16_t>(x)});
    const float right = pass_ext::to_float(pass_ext::bfloat16{static_cast<uint16_t>(y)});
    if (std::isnan(left) || std::isnan(right)) return 0x7fff;
    return pass_ext::from_float<pass_ext::bfloat16>(std::fmax(left, right)).bits;
  };
  return larger(a & 0xffff, b & 0xffff) | larger(a >> 16, b >> 16) << 16;
}

// Each half of a product of two numbers of 16 bits is exact in float64, and so is its sum with a third unless they are
// far apart.
uint32_t fused_pair(uint32_t a, uint32_t b, uint32_t c, bool are_bfloat16) {
  const auto number = [&](uint32_t bits) -> double {
    const uint16_t half = static_cast<uint16_t>(bits);
    return are_bfloat16 ? pass_ext::to_float(pass_ext::bfloat16{half}) : pass_ext::to_float(pass_ext::float16{half});
  };
  const auto fused = [&](uint32_t x, uint32_t y, uint32_t z) -> uint32_t {
    const float sum = static_cast<float>(number(x) * number(y) + number(z));
    return are_bfloat16 ? pass_ext::to_bfloat16(sum).bits : pass_ext::to_float16(sum).bits;
  };
  return fused(a, b, c) | fused(a >> 16, b >> 16, c >> 16) << 16;
}

uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | uint64_t{b} << 32;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t which = selector >> 4 * i & 0xf, byte = static_cast<uint32_t>(bytes >> 8 * (which & 7)) & 0xff;
    picked |= (which < 8 ? byte : byte < 0x80 ? 0 : 0xff) << 8 * i;
  }
  return picked;
}

float exp2_approximate(float x) {
  constexpr int32_t kUlps = 2;
  const float rounded = static_cast<float>(std::exp2(static_cast<double>(x)));
  if (rounded < 0x1p-126f) return 0.0f;
  const Exp2Error error = engine().exp2_error;
  if (error == Exp2Error::none || x == 0.0f || !std::isfinite(rounded)) return rounded;
  int32_t bits;
  memcpy(&bits, &rounded, sizeof bits);
  uint32_t hash;
  memcpy(&hash, &x, sizeof hash);
  const bool is_up = error == Exp2Error::up || (error == Exp2Error::mixed && (hash * 0x9E3779B1u) >> 31);
  bits += is_up ? kUlps : -kUlps;
  float off;
  memcpy(&off, &bits, sizeof off);
  return off < 0x1p-126f ? 0.0f : off;
}

void copy_bytes(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }

void enter_code(const void* address) {
  Engine& e = engine();
  if (e.paths.is_on && e.current) e.paths.run_code(e.current_rank, address);
}

// Parameters and constants are in the constant bank: they count as instructions.
static void record_access(const void* address, size_t bytes, Access kind) {
  Engine& e = engine();
  const Place place = e.memory->place_of(address);
  if (place == Place::shared && kind == Access::read) e.paths.load_shared(e.current_rank);
  if (place == Place::shared && kind == Access::atomic) e.paths.add(e.current_rank, Event::shared_atomic);
  if (place != Place::read_only && place != Place::written) return;
  if (kind == Access::read) e.paths.load_global(e.current_rank, address, place == Place::written);
  if (kind == Access::atomic) e.paths.update_global(e.current_rank, address);
}

// The rest of check_access: registers are saved for it alone.
[[gnu::noinline]] static void check_buffer(const void* address, size_t bytes, Access kind) {
  Engine& e = engine();
  ++e.accesses;
  if (!e.memory->access(address, bytes, kind, observer(), !e.looks_again)) {
    if (kind == Access::read && is_constant_data(address)) return;
    fail(e.memory->what_is_wrong());
  }
  if (e.paths.is_on && !e.is_inside_operation) record_access(address, bytes, kind);
  if (kind != Access::atomic) return;
  if (++e.current->atomics_in_a_row > kMostAtomicsInARow)
    fail("endless: " + std::to_string(kMostAtomicsInARow) +
         " atomics without a barrier; blocks and threads run one after " +
         "another here, so waiting in a loop for somebody else never ends");
  if (e.memory->is_shared(address)) return;
  const Past fenced = e.has_fenced ? fenced_past() : Past();
  e.memory->synchronise(address, e.has_fenced ? &fenced : nullptr, observer());
}

[[noreturn, gnu::noinline]] static void fail_misaligned(size_t bytes) {
  fail("misaligned: an access of " + std::to_string(bytes) + " bytes at an address that is no multiple of it");
}

// Most accesses are to a thread's own variables.
void check_access(const void* address, size_t bytes, Access kind, bool aligned) {
  const Engine& e = engine();
  if (!e.current) return;
  const char* a = static_cast<const char*>(address);
  // Sizes are powers of two: dividing would take as long as all the rest.
  if (aligned && reinterpret_cast<uintptr_t>(a) & (bytes - 1)) fail_misaligned(bytes);
  if (a >= e.stacks && a < e.stacks + kStackBytes * kMostThreads) return;
  check_buffer(address, bytes, kind);
}

void check_streaming(const void* address, size_t bytes) { fail_if(engine().memory->check_streaming(address, bytes)); }

void check_global(const char* name, const void* address) {
  if (engine().memory->is_shared(address)) fail(std::string(name) + ": the address is shared memory");
}

void copy_async(void* shared, const void* global, size_t bytes, bool valid) {
  Thread& me = *engine().current;
  if (reinterpret_cast<uintptr_t>(shared) % bytes || (valid && reinterpret_cast<uintptr_t>(global) % bytes))
    fail("misaligned: copy_async of " + std::to_string(bytes) + " bytes");
  Engine& e = engine();
  e.is_inside_operation = true;
  if (valid) check_access(global, bytes, Access::read, true);
  e.is_inside_operation = false;
  fail_if(e.memory->begin_async_write(shared, bytes, observer()));
  me.copies.push_back({shared, global, {}, bytes, valid, kUncommitted, 0.0});
  if (valid) memcpy(me.copies.back().before, global, bytes);
  if (valid && e.paths.is_on)
    me.copies.back().arrival = e.paths.begin_copy(e.current_rank, global, e.memory->place_of(global) == Place::written);
  if (valid && e.records_copies)
    e.copies.push_back({e.block_rank, static_cast<uint32_t>(me.groups), reinterpret_cast<uintptr_t>(global)});
}

void copy_async_commit() {
  Thread& me = *engine().current;
  for (AsyncCopy& copy : me.copies)
    if (copy.group == kUncommitted) copy.group = me.groups;
  ++me.groups;
}

void copy_async_wait(int pending) {
  Engine& e = engine();
  Thread& me = *e.current;
  std::vector<AsyncCopy> left;
  double arrival = 0.0;
  for (const AsyncCopy& copy : me.copies) {
    if (copy.group >= me.groups - pending) {
      left.push_back(copy);
      continue;
    }
    arrival = std::max(arrival, copy.arrival);
    if (copy.valid) {  // it may read its source at any time until now
      e.is_inside_operation = e.looks_again = true;
      check_access(copy.from, copy.bytes, Access::read, true);
      e.is_inside_operation = e.looks_again = false;
      if (memcmp(copy.before, copy.from, copy.bytes) != 0)
        fail("asynchronous copy: its source was written before copy_async_wait");
    }
    if (copy.valid)
      memcpy(copy.to, copy.from, copy.bytes);
    else
      memset(copy.to, 0, copy.bytes);
    engine().memory->finish_async_write(copy.to, copy.bytes, observer());
  }
  if (e.paths.is_on) e.paths.wait_for_copy(e.current_rank, arrival);
  me.copies = std::move(left);
}

void load_matrices(uint32_t* fragment, const void* row, int count, bool transposed) {
  Thread& me = *engine().current;
  const unsigned lane = engine().current_rank % 32;
  if (static_cast<int>(lane) < 8 * count && reinterpret_cast<uintptr_t>(row) % 16 != 0)
    fail("misaligned: load_matrices needs row addresses that are multiples of 16");
  me.input[0] = reinterpret_cast<uint64_t>(row);
  warp_operation(
      count == 4   ? "load_matrices<4>"
      : count == 2 ? "load_matrices<2>"
                   : "load_matrices<1>",
      0xffffffffu,
      [](unsigned start, unsigned) {
        for (unsigned l = 0; l < 32; ++l)  // every lane learns every row's address
          engine().threads[start + l].output[0] = start;
      },
      Event::count);
  const unsigned start = static_cast<unsigned>(me.output[0]);
  Engine& e = engine();
  e.is_inside_operation = true;
  for (int m = 0; m < count; ++m) {
    uint16_t pair[2];
    for (unsigned k = 0; k < 2; ++k) {
      const unsigned i = lane / 4, j = 2 * (lane % 4) + k;
      const unsigned r = transposed ? j : i, c = transposed ? i : j;
      const char* address = reinterpret_cast<const char*>(engine().threads[start + 8 * m + r].input[0]) + 2 * c;
      check_access(address, 2, Access::read, true);
      memcpy(&pair[k], address, 2);
    }
    memcpy(&fragment[m], pair, 4);
  }
  e.is_inside_operation = false;
  // Nobody's addresses may change before everybody has read through them.
  warp_operation("load_matrices (end)", 0xffffffffu, [](unsigned, unsigned) {}, Event::shared_load);
}

void multiply(float* d, const uint32_t* a, const uint32_t* b, bool is_bfloat16) {
  Thread& me = *engine().current;
  memcpy(me.input, a, 16);
  memcpy(me.input + 2, b, 8);
  me.input[4] = is_bfloat16;
  warp_operation(
      is_bfloat16 ? "multiply_m16n8k16<bfloat16>" : "multiply_m16n8k16<float16>", 0xffffffffu,
      [](unsigned start, unsigned) {
        const bool bf16 = engine().threads[start].input[4] != 0;
        const auto value = [bf16](uint32_t pair, int k) {
          const uint16_t bits = static_cast<uint16_t>(pair >> (16 * k));
          return bf16 ? pass_ext::to_float(pass_ext::bfloat16{bits}) : pass_ext::to_float(pass_ext::float16{bits});
        };
        float A[16][16], B[16][8];
        for (unsigned l = 0; l < 32; ++l) {
          uint32_t ra[4], rb[2];
          memcpy(ra, engine().threads[start + l].input, 16);
          memcpy(rb, engine().threads[start + l].input + 2, 8);
          const unsigned g = l / 4, t = l % 4;
          for (int k = 0; k < 2; ++k) {
            A[g][2 * t + k] = value(ra[0], k);
            A[g + 8][2 * t + k] = value(ra[1], k);
            A[g][2 * t + 8 + k] = value(ra[2], k);
            A[g + 8][2 * t + 8 + k] = value(ra[3], k);
            B[2 * t + k][g] = value(rb[0], k);
            B[2 * t + 8 + k][g] = value(rb[1], k);
          }
        }
        for (unsigned l = 0; l < 32; ++l) {
          double sum[4] = {};  // products and their sum in fp64; the accumulator joins in fp64 too
          for (int i = 0; i < 4; ++i)
            for (int k = 0; k < 16; ++k)
              sum[i] += static_cast<double>(A[l / 4 + (i / 2) * 8][k]) * B[k][2 * (l % 4) + i % 2];
          memcpy(engine().threads[start + l].output, sum, sizeof sum);
        }
      },
      Event::matrix_product);
  double sum[4];
  memcpy(sum, me.output, sizeof sum);
  for (int i = 0; i < 4; ++i) d[i] = static_cast<float>(static_cast<double>(d[i]) + sum[i]);
}

}  // namespace emulator
