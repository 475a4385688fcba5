// Work space that outlives a call: 64-byte aligned floats that only ever grow.
#pragma once

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

namespace pass_ext {

class Buffer {
 public:
  float* at_least(size_t floats) {
    if (floats > size_) {
      size_ = 0;  // in case the allocation throws
      memory_.reset(static_cast<float*>(std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64)));
      if (!memory_)
        throw std::runtime_error("pass_ext: out of memory: work space of " + std::to_string(floats * sizeof(float)) +
                                 " bytes could not be allocated");
      size_ = floats;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::unique_ptr<float, Free> memory_;
  size_t size_ = 0;
};

}  // namespace pass_ext
