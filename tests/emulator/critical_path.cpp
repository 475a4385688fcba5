// Events, joins and rounds of loads; see critical_path.h.
#include "critical_path.h"

#include <utility>

namespace emulator {

const char* const kEventNames[kEvents] = {"instruction", "memory_load",   "l2_load",        "l1_load",
                                          "shared_load", "shared_atomic", "warp_operation", "block_barrier",
                                          "fence",       "atomic",        "matrix_product"};

namespace {

constexpr uintptr_t kLine = 128;
constexpr size_t kAtomic = static_cast<size_t>(Event::atomic);

uintptr_t line_of(const void* address) { return reinterpret_cast<uintptr_t>(address) / kLine; }

const Path& longer(const Path& a, const Path& b) { return b.cycles > a.cycles ? b : a; }

}  // namespace

void PathRecorder::start(PathSettings settings) {
  settings_ = std::move(settings);
  is_on = true;
}

std::vector<LaunchPath> PathRecorder::stop() {
  is_on = false;
  earlier_lines_.clear();
  return std::move(launches_);
}

void PathRecorder::begin_launch(const char* name, uint32_t blocks, uint32_t threads) {
  launches_.emplace_back();
  launches_.back().name = name;
  launches_.back().blocks = blocks;
  launches_.back().threads = threads;
  published_.clear();
}

void PathRecorder::begin_block(uint32_t threads) {
  threads_.assign(threads, Thread());
  block_lines_.clear();
}

void PathRecorder::end_thread(unsigned rank) {
  Path& path = launches_.back().path;
  path = longer(path, threads_[rank].path);
}

void PathRecorder::end_launch() {
  launches_.back().lines = launch_lines_.size();
  earlier_lines_.merge(launch_lines_);
  launch_lines_.clear();
}

void PathRecorder::run_code(unsigned rank, const void* address) {
  const auto weight = settings_.weights.find(reinterpret_cast<uintptr_t>(address));
  if (weight != settings_.weights.end()) count(threads_[rank].path, Event::instruction, weight->second);
}

void PathRecorder::count(Path& path, Event event, uint32_t times) {
  path.counts[static_cast<size_t>(event)] += times;
  path.cycles += times * settings_.cycles[static_cast<size_t>(event)];
}

void PathRecorder::add(unsigned rank, Event event) {
  Thread& thread = threads_[rank];
  count(thread.path, event);
  if (event == Event::fence) thread.global = thread.shared = kNoRound;
}

void PathRecorder::join_warp(unsigned first, unsigned mask, Event event) {
  const Path* longest = nullptr;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1)
      if (const Path& path = threads_[first + lane].path; !longest || path.cycles > longest->cycles) longest = &path;
  Path path = *longest;
  if (event != Event::count) count(path, event);
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    threads_[first + lane].path = path;
    threads_[first + lane].global = threads_[first + lane].shared = kNoRound;
  }
}

void PathRecorder::join_block(unsigned threads) {
  Path path;
  for (unsigned i = 0; i < threads; ++i) path = longer(path, threads_[i].path);
  count(path, Event::block_barrier);
  for (unsigned i = 0; i < threads; ++i) {
    threads_[i].path = path;
    threads_[i].global = threads_[i].shared = kNoRound;
  }
}

void PathRecorder::load(Thread& thread, int& round, Event event) {
  if (round != kNoRound) {
    const auto open = static_cast<size_t>(round);
    if (settings_.cycles[static_cast<size_t>(event)] <= settings_.cycles[open]) return;
    --thread.path.counts[open];
    thread.path.cycles -= settings_.cycles[open];
  }
  count(thread.path, event);
  round = static_cast<int>(event);
}

void PathRecorder::load_shared(unsigned rank) { load(threads_[rank], threads_[rank].shared, Event::shared_load); }

// Blocks run in sequence here, side by side on a GPU. A line that other blocks have read is certain to be in L2 only
// after their hand-over.
Event PathRecorder::level_of(const Thread& thread, const void* address, bool is_written) {
  const uintptr_t line = line_of(address);
  const bool was_read = !is_written && !launch_lines_.insert(line).second;
  if (!block_lines_.insert(line).second) return Event::l1_load;
  const bool is_in_l2 = is_written || earlier_lines_.count(line) || (was_read && thread.path.counts[kAtomic] > 0);
  return is_in_l2 ? Event::l2_load : Event::memory_load;
}

void PathRecorder::load_global(unsigned rank, const void* address, bool is_written) {
  Thread& thread = threads_[rank];
  load(thread, thread.global, level_of(thread, address, is_written));
}

// Blocks that updated the address have handed over: this thread continues with the longest of their paths and its own.
void PathRecorder::update_global(unsigned rank, const void* address) {
  Thread& thread = threads_[rank];
  const Path before = thread.path;
  Path& published = published_[address];
  thread.path = longer(before, published);
  published = longer(published, before);
  count(thread.path, Event::atomic);
  thread.global = thread.shared = kNoRound;
}

double PathRecorder::begin_copy(unsigned rank, const void* address, bool is_written) {
  const Event event = level_of(threads_[rank], address, is_written);
  return threads_[rank].path.cycles + settings_.cycles[static_cast<size_t>(event)];
}

// A wait shorter than half a load from memory counts as hidden behind the work in between.
void PathRecorder::wait_for_copy(unsigned rank, double arrival) {
  const double left = arrival - threads_[rank].path.cycles;
  if (left > settings_.cycles[static_cast<size_t>(Event::memory_load)] / 2)
    count(threads_[rank].path, Event::memory_load);
}

}  // namespace emulator
