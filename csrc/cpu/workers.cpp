// The threads of for_each_piece: torch's own while the machine is free, else a pool.
//
// torch's threads (OpenMP) are the better ones between torch's ops: they spin for some milliseconds behind each of
// them, and other threads would compete with them. But a job waits for all of them, also for one that has lost its
// processor to another program, and then lasts a time slice. So a job that has waited long sends the next ones, for a
// while, to the pool, which does not wait for a thread that has not begun.
//
// A call of many jobs (with_threads_ready) takes torch's threads once: they look for its jobs until it ends.
//
// A forked child has none of its parent's threads. OpenMP would wait for them without end, so all jobs of a child go to
// a pool of its own.
//
// A container may have less processor time than processors. Threads that wait would use it up, and then all of them
// stand still until the next period: so there are no more threads than the quota fills.
//
// In the pool a job lies in one of a few slots while it is open; free threads look there, first spinning, then asleep.
// A thread counts itself in before it looks at a slot's job, and the job's owner, having closed the slot, waits until
// the count is 0: so no thread touches a job that has ended.
#include "cpu/workers.h"

#include <pthread.h>
#include <time.h>
#include <torch/csrc/stable/ops.h>

#if defined(__linux__)
#include <dirent.h>
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/quota.h"

namespace pass_ext {
namespace {

constexpr int kSlots = 8;  // jobs that are open at once; a ninth runs on its caller's thread alone
constexpr int kMostWorkers = 255;
constexpr int kShares = 16;  // of a job's pieces; more threads begin in the shares of others
constexpr int kRangesPerThread = 4;
// A free thread spins so long before it sleeps: the time between two jobs of a step. Waking one takes some 10 us.
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr auto kSpinForLastPieces = std::chrono::microseconds(20);

// A longer wait for the last pieces means that a thread has lost its processor. Pieces take some 10 us.
constexpr auto kLongWait = std::chrono::microseconds(500);
constexpr auto kShortAvoidance = std::chrono::milliseconds(100), kLongAvoidance = std::chrono::milliseconds(400);

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Spins until `done()` or for `span`; returns done().
template <typename Condition>
bool spin(std::chrono::microseconds span, Condition&& done) {
  const auto end = std::chrono::steady_clock::now() + span;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

// A thread's own pieces are neighbours, so that it reads memory in order; when they are done it takes pieces of others.
struct alignas(64) Share {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

struct Job {
  Job(const Pieces& pieces, int threads)
      : pieces(pieces), shares_used(std::min(threads, kShares)), places(threads - 1) {
    for (int i = 0; i < shares_used; ++i) {
      shares[i].next.store(pieces.count * i / shares_used, std::memory_order_relaxed);
      shares[i].end = pieces.count * (i + 1) / shares_used;
    }
  }
  const Pieces& pieces;
  const int shares_used;
  std::atomic<int> places;  // for further workers
  Share shares[kShares];
  std::mutex mutex;
  std::exception_ptr error;

  // Runs pieces until none is left; `place` says which share comes first.
  void work(int place) {
    for (int i = 0; i < shares_used; ++i) {
      Share& share = shares[(place + i) % shares_used];
      int64_t piece;
      while (share.next.load(std::memory_order_relaxed) < share.end &&
             (piece = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end)
        if (!run(piece)) return;
    }
  }

  bool run(int64_t piece) {
    try {
      pieces.run(pieces.function, piece);
      return true;
    } catch (...) {
      for (Share& share : shares) share.next.store(pieces.count, std::memory_order_relaxed);
      std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = std::current_exception();
      return false;
    }
  }
};

// std::condition_variable waits by a symbol that is younger than the libstdc++ of the wheels' oldest systems.
class Condition {
 public:
  template <typename Predicate>
  void wait(std::unique_lock<std::mutex>& lock, Predicate&& is_true) {
    while (!is_true()) pthread_cond_wait(&condition_, lock.mutex()->native_handle());
  }
  void notify_one() { pthread_cond_signal(&condition_); }
  void notify_all() { pthread_cond_broadcast(&condition_); }

 private:
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

struct alignas(64) Slot {
  std::atomic<Job*> job{nullptr};
  std::atomic<int> inside{0};  // workers that may look at the job
  std::atomic<bool> taken{false};
};

thread_local bool in_piece = false;

// Lets this thread run wherever a thread of the process may. OpenMP may have bound the thread that it was made by to
// one processor (OMP_PROC_BIND), and two threads there would take turns.
void leave_binding() {
#if defined(__linux__)
  cpu_set_t all, mask;
  CPU_ZERO(&all);
  DIR* const threads = opendir("/proc/self/task");
  if (threads == nullptr) return;
  while (const dirent* entry = readdir(threads)) {
    const int thread = std::atoi(entry->d_name);
    if (thread > 0 && sched_getaffinity(thread, sizeof mask, &mask) == 0) CPU_OR(&all, &all, &mask);
  }
  closedir(threads);
  sched_setaffinity(0, sizeof all, &all);
#endif
}

class Pool {
 public:
  void run(const Pieces& pieces, int threads) {
    grow(threads - 1);
    Slot* const slot = free_slot();
    Job job(pieces, threads);
    if (slot != nullptr) open(*slot, job, threads - 1);
    in_piece = true;
    job.work(0);
    in_piece = false;
    if (slot != nullptr) close(*slot);
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  Slot slots_[kSlots];
  std::atomic<uint64_t> opened_{0};  // jobs so far
  std::atomic<int> asleep_{0}, workers_{0};
  std::mutex mutex_;
  Condition work_came_, worker_left_;

  void grow(int workers) {
    if (workers_.load(std::memory_order_relaxed) >= workers) return;
    std::lock_guard<std::mutex> lock(mutex_);
    for (int count = workers_.load(); count < std::min(workers, kMostWorkers); ++count) {
      std::thread([this] { serve(); }).detach();
      workers_.store(count + 1);
    }
  }

  Slot* free_slot() {
    for (Slot& slot : slots_)
      if (!slot.taken.load(std::memory_order_relaxed) && !slot.taken.exchange(true)) return &slot;
    return nullptr;
  }

  void open(Slot& slot, Job& job, int wanted) {
    slot.job.store(&job);
    opened_.fetch_add(1);
    if (asleep_.load() == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (wanted >= asleep_.load()) return work_came_.notify_all();
    for (int i = 0; i < wanted; ++i) work_came_.notify_one();
  }

  void close(Slot& slot) {
    slot.job.store(nullptr);
    const auto left = [&] { return slot.inside.load() == 0; };
    if (!spin(kSpinForLastPieces, left)) {
      // Asleep, this thread leaves its processor to the one that it waits for.
      std::unique_lock<std::mutex> lock(mutex_);
      worker_left_.wait(lock, left);
    }
    slot.taken.store(false);
  }

  // A worker's life.
  void serve() {
    leave_binding();
    in_piece = true;  // jobs that pieces bring run alone
    uint64_t seen = 0;
    for (;;) {
      const uint64_t opened = opened_.load();
      for (Slot& slot : slots_)
        if (slot.job.load(std::memory_order_relaxed) != nullptr) visit(slot);
      const auto came = [&] { return opened_.load() != opened; };
      if (seen != opened) {
        seen = opened;
        if (spin(kSpin, came)) continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_.fetch_add(1);
      work_came_.wait(lock, came);
      asleep_.fetch_sub(1);
    }
  }

  void visit(Slot& slot) {
    slot.inside.fetch_add(1);
    Job* const job = slot.job.load();
    if (job != nullptr) {
      const int place = job->places.fetch_sub(1);
      if (place > 0) job->work(place);
    }
    if (slot.inside.fetch_sub(1) == 1 && slot.job.load() == nullptr) {
      std::lock_guard<std::mutex> lock(mutex_);  // the owner is asleep, or has not yet looked
      worker_left_.notify_all();
    }
  }
};

// Never destroyed: workers may be asleep in it when the process ends.
std::atomic<Pool*> pool{new Pool};

// When torch's threads may be used again. Of all jobs together, and only a hint: threads may overwrite each other's.
class Avoidance {
 public:
  using Clock = std::chrono::steady_clock;

  std::atomic<bool> always{false}, is_child{false};

  bool is_on() const {
    return always.load(std::memory_order_relaxed) || is_child.load(std::memory_order_relaxed) ||
           Clock::now().time_since_epoch().count() < until_.load(std::memory_order_relaxed);
  }

  // In a job on torch's threads the caller waited so long for the last of them, or had no processor itself. Each long
  // wait doubles the avoidance, many short ones halve it.
  void learn(Clock::duration wait) {
    const Clock::duration former{span_.load(std::memory_order_relaxed)};
    if (wait < kLongWait) {
      if (former.count() == 0 || short_waits_.fetch_add(1, std::memory_order_relaxed) % kShortWaits != 0) return;
      span_.store(former < kShortAvoidance ? 0 : (former / 2).count(), std::memory_order_relaxed);
      return;
    }
    const Clock::duration span = std::clamp<Clock::duration>(2 * former, kShortAvoidance, kLongAvoidance);
    span_.store(span.count(), std::memory_order_relaxed);
    until_.store((Clock::now() + span).time_since_epoch().count(), std::memory_order_relaxed);
  }

 private:
  static constexpr int kShortWaits = 64;
  std::atomic<int64_t> until_{0}, span_{0};
  std::atomic<int> short_waits_{1};
};
Avoidance avoidance;

void begin_child() {
  pool.store(new Pool);
  avoidance.is_child.store(true);
}
const int registered = pthread_atfork(nullptr, nullptr, begin_child);

// The time in which this thread had a processor.
std::chrono::nanoseconds own_time() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

// How long a thread waited for others, or had no processor, since this began.
class Loss {
 public:
  Avoidance::Clock::duration of_processor() const {
    return (Avoidance::Clock::now() - begun_) - (own_time() - own_begun_);
  }
  Avoidance::Clock::duration so_far() const { return Avoidance::Clock::now() - begun_; }

 private:
  Avoidance::Clock::time_point begun_ = Avoidance::Clock::now();
  std::chrono::nanoseconds own_begun_ = own_time();
};

void run_on_torch_threads(const Pieces& pieces, int threads) {
  Job job(pieces, threads);
  const Loss loss;
  Avoidance::Clock::duration lost{};
  Avoidance::Clock::time_point alone{};  // when the caller found no further piece
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    in_piece = true;
    for (int64_t place = begin; place < end; ++place) job.work(static_cast<int>(place));
    in_piece = false;
    if (begin == 0) {
      alone = Avoidance::Clock::now();
      lost = loss.of_processor();
    }
  });
  avoidance.learn(std::max(Avoidance::Clock::now() - alone, lost));
  if (job.error) std::rethrow_exception(job.error);
}

// torch's threads for the time of one call, which brings its jobs one after the other.
class Crew {
 public:
  explicit Crew(int threads) : threads_(threads) {}

  void run(const Pieces& pieces) {
    Job job(pieces, static_cast<int>(std::min<int64_t>(threads_, pieces.count)));
    slot_.job.store(&job);
    in_piece = true;
    job.work(0);
    in_piece = false;
    slot_.job.store(nullptr);
    const auto left = [&] { return slot_.inside.load() == 0; };
    if (!spin(kSpinForLastPieces, left)) {
      const Loss loss;
      while (!left()) std::this_thread::yield();
      longest_wait_ = std::max(longest_wait_, loss.so_far());
    }
    if (job.error) std::rethrow_exception(job.error);
  }

  // A waiting thread's part. Its place is the same in all jobs and calls, so that the weights that it reads lie near
  // it.
  void serve(int place) {
    in_piece = true;
    while (!over_.load(std::memory_order_acquire)) {
      const auto came = [&] {
        return slot_.job.load(std::memory_order_relaxed) != nullptr || over_.load(std::memory_order_relaxed);
      };
      if (!spin(kSpin, came)) {
        std::this_thread::yield();
        continue;
      }
      slot_.inside.fetch_add(1);
      Job* const job = slot_.job.load();
      if (job != nullptr) job->work(place);
      slot_.inside.fetch_sub(1);
    }
    in_piece = false;
  }

  void end() { over_.store(true, std::memory_order_release); }
  Avoidance::Clock::duration longest_wait() const { return longest_wait_; }

 private:
  const int threads_;
  Slot slot_;
  std::atomic<bool> over_{false};
  Avoidance::Clock::duration longest_wait_{};
};

thread_local Crew* crew = nullptr;

}  // namespace

int64_t thread_count() {
  static const int64_t most = processors_of_quota("");
  return std::min<int64_t>(torch::stable::get_num_threads(), most);
}

void run_pieces(const Pieces& pieces) {
  if (crew != nullptr && !in_piece && pieces.count > 1) return crew->run(pieces);
  const int threads = static_cast<int>(std::min(thread_count(), pieces.count));
  if (threads > 1 && !in_piece) {
    if (avoidance.is_on())
      pool.load()->run(pieces, threads);
    else
      run_on_torch_threads(pieces, threads);
    return;
  }
  for (int64_t piece = 0; piece < pieces.count; ++piece) pieces.run(pieces.function, piece);
}

bool threads_are_ready() { return crew != nullptr; }

void stand_by(void (*run)(void* function), void* function) {
  const int threads = static_cast<int>(thread_count());
  if (threads < 2 || in_piece || crew != nullptr || avoidance.is_on()) return run(function);
  Crew members(threads);
  std::exception_ptr error;
  const Loss loss;
  Avoidance::Clock::time_point ended{};
  Avoidance::Clock::duration lost{};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    if (begin != 0) return members.serve(static_cast<int>(begin));
    crew = end < threads ? &members : nullptr;  // else no other thread came
    try {
      run(function);
    } catch (...) {
      error = std::current_exception();
    }
    crew = nullptr;
    members.end();
    ended = Avoidance::Clock::now();
    // Interrupts take some of a long call's time.
    lost = loss.of_processor() - loss.so_far() / 20;
  });
  avoidance.learn(std::max({Avoidance::Clock::now() - ended, members.longest_wait(), lost}));
  if (error) std::rethrow_exception(error);
}

int64_t range_of(int64_t count, int64_t least) {
  const int64_t ranges = thread_count() * kRangesPerThread;
  return std::max(std::max<int64_t>(1, least), (count + ranges - 1) / ranges);
}

}  // namespace pass_ext

int pass_ext_always_pool(int always) { return pass_ext::avoidance.always.exchange(always != 0) ? 1 : 0; }

int pass_ext_thread_count() { return static_cast<int>(pass_ext::thread_count()); }
