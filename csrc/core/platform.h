// The function qualifiers with which core/ compiles as host code (any C++17 compiler) and as device code (nvcc). Macros
// only.
#pragma once

#if defined(__CUDACC__)
#define PASS_EXT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PASS_EXT_HOST_DEVICE inline
#endif
