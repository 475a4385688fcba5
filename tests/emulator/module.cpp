// The Python module _emulator: sessions, buffers, critical paths, plans, and the kernels of the emulator's own tests.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <stdexcept>
#include <utility>

#include "engine.h"
#include "launches.h"

namespace emulator {
namespace {

using Counts = std::map<std::string, uint32_t>;

Counts counts_of(const emulator::Path& path) {
  Counts counts;
  for (size_t i = 0; i < emulator::kEvents; ++i) counts[emulator::kEventNames[i]] = path.counts[i];
  return counts;
}

void bind_paths(pybind11::module_& module) {
  // cycles: of each event, by its name. weights: address in this library behind the hook of a basic block -> its
  // instructions.
  module.def(
      "record_paths",
      [](const std::map<std::string, double>& cycles, const std::map<uintptr_t, uint32_t>& weights) {
        emulator::PathSettings settings;
        for (size_t i = 0; i < emulator::kEvents; ++i) settings.cycles[i] = cycles.at(emulator::kEventNames[i]);
        Dl_info library{};
        dladdr(reinterpret_cast<const void*>(&emulator::taken_paths), &library);
        for (const auto& [offset, weight] : weights)
          settings.weights[reinterpret_cast<uintptr_t>(library.dli_fbase) + offset] = weight;
        emulator::record_paths(std::move(settings));
      },
      pybind11::arg("cycles"), pybind11::arg("weights"));
  module.def("taken_paths", [] {
    pybind11::list launches;
    for (const auto& launch : emulator::taken_paths()) {
      pybind11::dict found;
      found["name"] = launch.name;
      found["blocks"] = launch.blocks;
      found["threads"] = launch.threads;
      found["path"] = counts_of(launch.path);
      found["bytes"] = 128 * launch.lines;
      launches.append(found);
    }
    return launches;
  });
}

}  // namespace

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
  module.def("set_gpu", &emulator::set_gpu);
  module.def("counters_are_zero", &emulator::counters_are_zero);
  module.def("count_launches", &emulator::count_launches);
  module.def("count_accesses", &emulator::count_accesses);
  module.def("count_bytes", [] {
    std::map<std::string, std::pair<uint64_t, uint64_t>> bytes;  // loaded, stored
    for (const auto& [name, traffic] : emulator::count_bytes()) bytes[name] = {traffic.loaded, traffic.stored};
    return bytes;
  });
  module.def("record_copies", &emulator::record_copies);
  module.def("taken_copies", [] {
    std::vector<std::tuple<uint32_t, uint32_t, uintptr_t>> copies;
    for (const auto& copy : emulator::taken_copies()) copies.emplace_back(copy.block, copy.group, copy.from);
    return copies;
  });
  module.def("set_exp2_error", [](const std::string& name) {
    static const std::map<std::string, emulator::Exp2Error> kErrors = {{"none", emulator::Exp2Error::none},
                                                                       {"up", emulator::Exp2Error::up},
                                                                       {"down", emulator::Exp2Error::down},
                                                                       {"mixed", emulator::Exp2Error::mixed}};
    emulator::set_exp2_error(kErrors.at(name));
  });
  emulator::bind_paths(module);
  module.def("run_primitive", &emulator::run_primitive);
  module.def("run_planted_fault", &emulator::run_planted_fault);
  for (const auto& [name, plan] : emulator::plans())
    module.def(name.c_str(),
               [plan = plan](const std::map<std::string, int64_t>& values) { return plan(emulator::Numbers{values}); });
}
