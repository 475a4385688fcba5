// Tells ThreadSanitizer what OpenMP orders. libgomp is not built with it and waits by futex, so that what torch's
// threads read after a fork, and what is read of theirs after the join, looks like a race. This library is preloaded,
// stands before torch's torch_parallel_for, and says so: fork before every part, every part before the join. Parts are
// not ordered among themselves, so a race between two of them still shows.
#include <dlfcn.h>

#include <cstdint>

extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);

using Part = void (*)(int64_t begin, int64_t end, void* context);

int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, Part part, void* context);
}

namespace {

struct Call {
  Part part;
  void* context;
  char fork, join;  // addresses alone matter
};

void run_part(int64_t begin, int64_t end, void* given) {
  Call& call = *static_cast<Call*>(given);
  __tsan_acquire(&call.fork);
  call.part(begin, end, call.context);
  __tsan_release(&call.join);
}

}  // namespace

int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, Part part, void* context) {
  using ParallelFor = int32_t (*)(int64_t, int64_t, int64_t, Part, void*);
  static const auto torchs =
      reinterpret_cast<ParallelFor>(dlsym(dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD), "torch_parallel_for"));
  Call call{part, context, 0, 0};
  __tsan_release(&call.fork);
  const int32_t status = torchs(begin, end, grain, run_part, &call);
  __tsan_acquire(&call.join);
  return status;
}
