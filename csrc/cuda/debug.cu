// The switch behind pass_ext.set_debug for ops on CUDA.
#include "cuda/runtime.h"

extern "C" __attribute__((visibility("default"))) void pass_ext_check_earlier_cuda_errors(int enabled) {
  pass_ext::g_checks_earlier_errors = enabled != 0;
}
