// The Python module _counters: csrc/cuda/counters.h on the stand-in for the runtime in streams/.
#include "cuda/counters.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace pass_ext {
namespace {

char spare[kSlotBytes];

class Streams {
 public:
  Streams() { cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); }
  ~Streams() { cudaStreamDestroy(stream_); }

  void begin_capture() {
    stream_->captures = new Graph;
    stream_->capture = ++runtime.captures;
  }
  void end_capture_and_destroy() {
    for (const UserObject& object : stream_->captures->objects) object.release(object.data);
    delete stream_->captures;
    stream_->captures = nullptr;
  }
  // The slot's address, or 0 for the call's own memory.
  uintptr_t slot(CounterSlots& slots) {
    spare[17] = 1;
    int32_t* const slot = slots.slot_for("op", stream_, spare);
    if (slot[0] != 0 || slot[4] != 0 || slot[kCountersOfSlot - 1] != 0) throw std::runtime_error("not zero");
    return slot == reinterpret_cast<int32_t*>(spare) ? 0 : reinterpret_cast<uintptr_t>(slot);
  }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace
}  // namespace pass_ext

PYBIND11_MODULE(_counters, module) {
  using namespace pass_ext;
  py::class_<CounterSlots>(module, "CounterSlots").def(py::init());
  py::class_<Streams>(module, "Stream")
      .def(py::init())
      .def("begin_capture", &Streams::begin_capture)
      .def("end_capture_and_destroy", &Streams::end_capture_and_destroy)
      .def("slot", &Streams::slot);
  module.def("allocations", [] { return runtime.memory.size(); });
  module.def("set_full", [](bool is_full) { runtime.is_full = is_full; });
  module.attr("most_eager_streams") = kMostEagerStreams;
}
