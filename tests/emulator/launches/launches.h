// How tests launch kernels on the emulator: arguments by name in, a number out. Each <family>.cpp beside this file
// registers its own functions, and module.cpp binds whatever is registered to Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

namespace emulator {

using Address = uintptr_t;

template <typename T>
T* as(Address address) {
  return reinterpret_cast<T*>(address);
}

// An int of Python (a pointer too), a float, a name (of a dtype), or a list of pointers.
using Value = std::variant<int64_t, double, std::string, std::vector<Address>>;
using Values = std::map<std::string, Value>;

// The arguments of one launch. A missing one is 0, which as a pointer means "none".
struct Arguments {
  const Values& values;

  int64_t operator()(const std::string& name) const { return get<int64_t>(name); }
  double number(const std::string& name) const { return get<double>(name); }
  std::string text(const std::string& name) const { return get<std::string>(name); }
  template <typename T>
  T* at(const std::string& name) const {
    return as<T>(static_cast<Address>((*this)(name)));
  }
  template <typename T>
  std::vector<T*> list(const std::string& name) const {
    std::vector<T*> pointers;
    for (const Address address : get<std::vector<Address>>(name)) pointers.push_back(as<T>(address));
    return pointers;
  }

 private:
  template <typename T>
  T get(const std::string& name) const {
    const auto place = values.find(name);
    if (place == values.end()) return T{};
    if (const T* value = std::get_if<T>(&place->second)) return *value;
    throw std::invalid_argument("the launch takes another type for " + name);
  }
};

// `static const Registration kTree{"tree_mask", tree_mask};` makes the function callable from Python by that name.
struct Registration {
  Registration(const char* name, int64_t (*compute)(const Arguments&));
  Registration(const char* name, void (*launch)(const Arguments&));  // 0 in Python
};
using Functions = std::map<std::string, std::function<int64_t(const Arguments&)>>;
const Functions& registered();

// primitives.cpp, planted_faults.cpp
void run_primitive(const std::string& name, Address in, Address out, Address out2, Address out3, int a, int b, int c);
void run_planted_fault(const std::string& name, Address in, Address out, bool broken);

}  // namespace emulator
