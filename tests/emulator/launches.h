// What Python calls beside the ops: plans, which launch nothing or only what a test reads of them, and the kernels of
// the emulator's own tests. module.cpp binds them.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace emulator {

using Address = uintptr_t;

template <typename T>
T* as(Address address) {
  return reinterpret_cast<T*>(address);
}

// The arguments of a plan by name. A missing one is 0, which as a pointer means "none".
struct Numbers {
  std::map<std::string, int64_t> values;

  int64_t operator()(const std::string& name) const {
    const auto place = values.find(name);
    return place == values.end() ? 0 : place->second;
  }
  int32_t narrow(const std::string& name) const { return static_cast<int32_t>((*this)(name)); }
  template <typename T>
  T* at(const std::string& name) const {
    return as<T>(static_cast<Address>((*this)(name)));
  }
};

// plans.cpp
using Plan = int64_t (*)(const Numbers&);
const std::map<std::string, Plan>& plans();

// primitives.cpp, planted_faults.cpp
void run_primitive(const std::string& name, Address in, Address out, Address out2, Address out3, int a, int b, int c);
void run_planted_fault(const std::string& name, Address in, Address out, bool broken);

}  // namespace emulator
