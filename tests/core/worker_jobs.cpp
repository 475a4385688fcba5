// The Python module _worker_jobs: jobs for csrc/cpu/workers.cpp on the stand-in for torch's threads in threads/.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <time.h>
#include <torch/csrc/stable/ops.h>

#include <chrono>
#include <thread>

#include "cpu/workers.h"

namespace pass_ext {
namespace {

void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// Seconds of all processors that function() takes.
template <typename Function>
double processor_time(Function&& function) {
  const auto now = [] {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
  };
  const double begun = now();
  function();
  return now() - begun;
}

// function(), in a crew or with every job in the pool.
template <typename Function>
void in_team(bool is_crew, Function&& function) {
  pass_ext_always_pool(!is_crew);
  is_crew ? with_threads_ready(function) : function();
  pass_ext_always_pool(0);
}

// Of each job, which thread ran each of its pieces, numbered in the order in which threads came.
std::vector<std::vector<int>> owners(bool is_crew, int jobs, int pieces, double seconds) {
  std::vector<std::vector<std::thread::id>> ran(jobs, std::vector<std::thread::id>(pieces));
  in_team(is_crew, [&] {
    for (auto& job : ran)
      for_each_piece(pieces, [&](int64_t piece) {
        job[piece] = std::this_thread::get_id();
        sleep(seconds);
      });
  });
  std::vector<std::thread::id> known;
  std::vector<std::vector<int>> numbers;
  for (const auto& job : ran) {
    numbers.emplace_back();
    for (const auto id : job) {
      int number = 0;
      while (number < static_cast<int>(known.size()) && known[number] != id) ++number;
      if (number == static_cast<int>(known.size())) known.push_back(id);
      numbers.back().push_back(number);
    }
  }
  return numbers;
}

double time_without_jobs(double seconds) {
  return processor_time([=] { with_threads_ready([=] { sleep(seconds); }); });
}

// The last piece sleeps.
double time_with_a_late_piece(bool is_crew, int pieces, double seconds) {
  return processor_time([=] {
    in_team(is_crew,
            [=] { for_each_piece(pieces, [=](int64_t piece) { sleep(piece + 1 == pieces ? seconds : 1e-3); }); });
  });
}

}  // namespace
}  // namespace pass_ext

PYBIND11_MODULE(_worker_jobs, module) {
  module.def("set_threads", [](int64_t threads) { torch::stable::threads = threads; });
  module.def("owners", &pass_ext::owners);
  module.def("time_without_jobs", &pass_ext::time_without_jobs);
  module.def("time_with_a_late_piece", &pass_ext::time_with_a_late_piece);
}
