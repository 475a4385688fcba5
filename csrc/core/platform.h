// What every header in core/ needs to compile as host code (any C++17 compiler) and as device code (nvcc).
// Included by all of core/; defines macros only.
#pragma once

#if defined(__CUDACC__)
#define PASS_EXT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PASS_EXT_HOST_DEVICE inline
#endif
