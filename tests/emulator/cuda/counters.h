// csrc/cuda/counters.h for the emulator: one stream's counters, which every op must leave at zero.
#pragma once

#include "cuda/primitives.cuh"
#include "engine.h"

namespace pass_ext {

constexpr int64_t kCountersOfSlot = emulator::kCounters;
constexpr int64_t kSlotBytes = 0;  // no spare slot in front of a workspace: what goes below it is out of bounds

struct CounterSlots {
  static CounterSlots of_device(int) { return {}; }
  int32_t* slot_for(const char*, gpu::Stream, void*) { return emulator::counters(); }
};

}  // namespace pass_ext
