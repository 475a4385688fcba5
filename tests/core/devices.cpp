// The Python module _devices: what an op on CUDA does before and at its launch (csrc/cuda/runtime.h, counters.h and the
// launch of primitives.cuh), on the stand-ins in streams/.
#include <pybind11/pybind11.h>

#include "cuda/counters.h"
#include "cuda/runtime.h"

namespace py = pybind11;

namespace pass_ext {
namespace {

void small_kernel(int32_t*) {}
void large_kernel(int32_t*) {}

// An op on a tensor of this device: what it found there, and its counters.
py::dict call(int device) {
  static ResidentBlocks resident;
  const CudaScope scope(Tensor{device});
  char* const spare = nullptr;
  int32_t* const counters = CounterSlots::of_device(scope.device()).slot_for("op", scope.stream(), spare);
  auto block = runtime.device_of.upper_bound(counters);
  gpu::launch("op", small_kernel, {{7}, {32}}, scope.stream(), counters);
  gpu::launch("op", large_kernel, {{7}, {32}, 64 * 1024}, scope.stream(), counters);
  check_launch("op");
  py::dict found;
  found["multiprocessors"] = scope.multiprocessors();
  found["resident"] = resident.count(scope.device(), &large_kernel, 32, 64 * 1024);
  found["counters"] = reinterpret_cast<uintptr_t>(counters);
  found["counters' device"] = std::prev(block)->second;
  return found;
}

// torch.cuda.set_stream: a new stream, which becomes the device's current one.
unsigned long long set_stream(int device) {
  const torch::stable::accelerator::DeviceGuard guard(device);
  cudaStreamCreateWithFlags(&runtime.devices[device].current, cudaStreamNonBlocking);
  return runtime.devices[device].current->id;
}

}  // namespace
}  // namespace pass_ext

PYBIND11_MODULE(_devices, module) {
  using namespace pass_ext;
  module.def("call", &call);
  module.def("set_stream", &set_stream);
  module.def("set_device", [](int device) { runtime.device = device; });
  module.def("device", [] { return runtime.device; });
  module.def("questions", [] { return runtime.questions; });
  module.def("take_launches", [] {
    py::list launches;
    for (const Launch& one : runtime.launches) launches.append(py::make_tuple(one.device, one.stream, one.is_early));
    runtime.launches.clear();
    return launches;
  });
}
