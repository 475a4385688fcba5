// Threads that share a job of numbered pieces with the thread that brings it. Each takes the next piece as soon as it
// is free, so a thread that the system has taken off its processor is waited for only if it has begun a piece: a busy
// machine costs the shares of a step that others use, not a time slice for every job.
#pragma once

#include <cstdint>
#include <type_traits>

namespace pass_ext {

// torch.get_num_threads(), but no more than the quota of the process's container fills.
int64_t thread_count();

// A job's pieces, as a function pointer and its argument.
struct Pieces {
  void (*run)(void* function, int64_t piece);
  void* function;
  int64_t count;
};

// Runs all pieces, on at most thread_count() threads, the caller's among them. Inside a piece, further jobs
// run on the piece's thread alone. The first exception of a piece is thrown again here, when no piece runs any more.
void run_pieces(const Pieces& pieces);

// function(piece) for each piece in [0, count), in any order and on several threads.
template <typename Function>
void for_each_piece(int64_t count, Function&& function) {
  using F = std::remove_reference_t<Function>;
  run_pieces({[](void* f, int64_t piece) { (*static_cast<F*>(f))(piece); },
              const_cast<void*>(static_cast<const void*>(&function)), count});
}

// function(begin, end) for ranges that cover [0, count), each of at least `least` numbers but for the last one. There
// are more ranges than threads if `least` allows it, so that threads that come late take fewer.
int64_t range_of(int64_t count, int64_t least);
template <typename Function>
void for_ranges(int64_t count, int64_t least, Function&& function) {
  const int64_t range = range_of(count, least);
  if (range >= count) {
    if (count > 0) function(int64_t{0}, count);
    return;
  }
  for_each_piece((count + range - 1) / range, [&](int64_t piece) {
    const int64_t begin = piece * range, end = begin + range;
    function(begin, end < count ? end : count);
  });
}

// function() on this thread, while the others stand by: jobs inside begin without the threads being called together
// and sent away again, which costs as much as a small job.
void stand_by(void (*run)(void* function), void* function);
template <typename Function>
void with_threads_ready(Function&& function) {
  using F = std::remove_reference_t<Function>;
  stand_by([](void* f) { (*static_cast<F*>(f))(); }, const_cast<void*>(static_cast<const void*>(&function)));
}
// True inside with_threads_ready, if others do stand by: a job pays that is as short as a few microseconds.
bool threads_are_ready();

// One piece per request if there are enough of them, else one request after the other, each with all threads for its
// rows: function(index, alone). alone: the request has all threads for itself.
template <typename Function>
void for_each_request(int64_t count, Function&& function) {
  const bool alone = count < thread_count();
  if (alone || count <= 1)
    for (int64_t index = 0; index < count; ++index) function(index, alone);
  else
    for_each_piece(count, [&](int64_t index) { function(index, false); });
}

}  // namespace pass_ext

// Diagnostics, for ctypes (pass_ext/_library): 1: every job runs in the pool; 0: only while torch's threads are
// avoided. Returns the former setting.
extern "C" __attribute__((visibility("default"))) int pass_ext_always_pool(int always);

// thread_count(), for ctypes.
extern "C" __attribute__((visibility("default"))) int pass_ext_thread_count();
