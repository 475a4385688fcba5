// The kernels of csrc/cuda/attention_codes.cuh, compiled beside those of attention.cpp, which launches them.
#include "cuda/attention_codes.cuh"

namespace pass_ext::gpu {

template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<bfloat16, 64, 1>>>();
template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<bfloat16, 64, 4>>>();
template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<bfloat16, 96, 1>>>();
template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<bfloat16, 96, 4>>>();
template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<bfloat16, 128, 1>>>();
template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<bfloat16, 128, 4>>>();
template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<bfloat16, 256, 1>>>();
template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<bfloat16, 256, 4>>>();
template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<float16, 64, 1>>>();
template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<float16, 64, 4>>>();
template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<float16, 96, 1>>>();
template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<float16, 96, 4>>>();
template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<float16, 128, 1>>>();
template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<float16, 128, 4>>>();
template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<float16, 256, 1>>>();
template CodesKernel* codes_kernel_of<CodesShape<AttentionShape<float16, 256, 4>>>();

}  // namespace pass_ext::gpu
