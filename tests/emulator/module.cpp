// The Python module _emulator: sessions, buffers, and every launch of launches.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <tuple>

#include "engine.h"
#include "launches.h"

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
