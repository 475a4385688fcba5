// The Python module _emulator: sessions, buffers, and every launch of launches.h.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <tuple>
#include <utility>

#include "engine.h"
#include "launches.h"

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
  module.def("record_paths",
             [](const std::map<std::string, double>& cycles, bool most, const std::map<uintptr_t, uint32_t>& weights) {
               emulator::PathSettings settings;
               for (size_t i = 0; i < emulator::kEvents; ++i) settings.cycles[i] = cycles.at(emulator::kEventNames[i]);
               settings.most = most;
               Dl_info library{};
               dladdr(reinterpret_cast<const void*>(&emulator::taken_paths), &library);
               for (const auto& [offset, weight] : weights)
                 settings.weights[reinterpret_cast<uintptr_t>(library.dli_fbase) + offset] = weight;
               emulator::record_paths(std::move(settings));
             });
  module.def("taken_paths", [] {
    pybind11::list launches;
    for (const auto& launch : emulator::taken_paths()) {
      pybind11::dict found;
      found["name"] = launch.name;
      found["blocks"] = launch.blocks;
      found["threads"] = launch.threads;
      found["whole"] = counts_of(launch.whole);
      found["to_product"] = counts_of(launch.to_product);
      found["to_atomic"] = counts_of(launch.to_atomic);
      found["code"] = launch.code;
      found["bytes"] = 128 * launch.lines;
      launches.append(found);
    }
    return launches;
  });
}

}  // namespace

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
  module.def("set_exp2_error", [](const std::string& name) {
    static const std::map<std::string, emulator::Exp2Error> kErrors = {{"none", emulator::Exp2Error::none},
                                                                       {"up", emulator::Exp2Error::up},
                                                                       {"down", emulator::Exp2Error::down},
                                                                       {"mixed", emulator::Exp2Error::mixed}};
    emulator::set_exp2_error(kErrors.at(name));
  });
  bind_paths(module);
  module.def("run_primitive", &emulator::run_primitive);
  module.def("run_planted_fault", &emulator::run_planted_fault);
  module.def("lookahead_embed", &emulator::lookahead_embed);
  module.def("lookahead_embed_backward", &emulator::lookahead_embed_backward);
  module.def("lookahead_embed_backward_splits", &emulator::lookahead_embed_backward_splits);
  module.def("draft_workspace", &emulator::draft_workspace);
  module.def("draft_scan_blocks", &emulator::draft_scan_blocks);
  module.def("draft", &emulator::draft);
  module.def("accept_workspace", &emulator::accept_workspace);
  module.def("accept", &emulator::accept);
  module.def("tree", &emulator::tree);
  module.def("attention_workspace", &emulator::attention_workspace);
  module.def("attention", &emulator::attention);
  module.def("cache_commit", &emulator::cache_commit);
}
