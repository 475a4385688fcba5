// The number of blocks of a launch, counted in 64 bits and refused if a GPU cannot start so many.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pass_ext {

struct Grid {
  int64_t x = 1, y = 1, z = 1;
};

inline void check_grid(const char* kernel, const Grid& grid) {
  constexpr int64_t kMostX = (int64_t{1} << 31) - 1, kMostOthers = 65535;
  if (grid.x > kMostX || grid.y > kMostOthers || grid.z > kMostOthers)
    throw std::runtime_error(std::string("pass_ext::") + kernel +
                             ": too much for one launch: " + std::to_string(grid.x) + " x " + std::to_string(grid.y) +
                             " x " + std::to_string(grid.z) + " blocks, a GPU starts at most " +
                             std::to_string(kMostX) + " x " + std::to_string(kMostOthers) + " x " +
                             std::to_string(kMostOthers) + " (call the op on parts of the batch)");
}

}  // namespace pass_ext
