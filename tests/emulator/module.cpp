// The Python module _emulator: sessions, buffers, and every function that launches/*.cpp register.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <stdexcept>
#include <tuple>

#include "engine.h"
#include "launches.h"

namespace emulator {
namespace {

// In a function: files register while their globals are set up, in an order that nobody chooses.
Functions& functions() {
  static Functions all;
  return all;
}

void add(const char* name, std::function<int64_t(const Arguments&)> function) {
  if (!functions().emplace(name, std::move(function)).second)
    throw std::logic_error(std::string("two launches are registered as ") + name);
}

}  // namespace

Registration::Registration(const char* name, int64_t (*compute)(const Arguments&)) { add(name, compute); }
Registration::Registration(const char* name, void (*launch)(const Arguments&)) {
  add(name, [launch](const Arguments& arguments) {
    launch(arguments);
    return int64_t{0};
  });
}
const Functions& registered() { return functions(); }

}  // namespace emulator

PYBIND11_MODULE(_emulator, module) {
  module.def("begin_session", &emulator::begin_session);
  module.def("end_session", &emulator::end_session);
  module.def("add_buffer",
             [](const std::string& name, emulator::Address address, size_t bytes, const std::string& content) {
               static const std::map<std::string, emulator::Content> kContents = {
                   {"in", emulator::Content::read_only},
                   {"out", emulator::Content::uninitialised},
                   {"inout", emulator::Content::initialised},
               };
               emulator::add_buffer(name, emulator::as<void>(address), bytes, kContents.at(content));
             });
  module.def("count_accesses", &emulator::count_accesses);
  module.def("record_copies", &emulator::record_copies);
  module.def("taken_copies", [] {
    std::vector<std::tuple<uint32_t, uint32_t, uintptr_t>> copies;
    for (const auto& copy : emulator::taken_copies()) copies.emplace_back(copy.block, copy.group, copy.from);
    return copies;
  });
  module.def("run_primitive", &emulator::run_primitive);
  module.def("run_planted_fault", &emulator::run_planted_fault);
  for (const auto& [name, function] : emulator::registered())
    module.def(name.c_str(),
               [function = function](const emulator::Values& values) { return function(emulator::Arguments{values}); });
}
