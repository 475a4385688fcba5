// A stand-in for torch's threads: new ones for every call, number i on range i.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

namespace torch::stable {

inline int64_t threads = 1;

inline int64_t get_num_threads() { return threads; }

template <typename Function>
void parallel_for(int64_t begin, int64_t end, int64_t, const Function& function) {
  std::vector<std::thread> others;
  for (int64_t i = begin + 1; i < end; ++i) others.emplace_back([&function, i] { function(i, i + 1); });
  function(begin, begin + 1);
  for (std::thread& other : others) other.join();
}

}  // namespace torch::stable
