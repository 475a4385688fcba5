// Attention kernels of float16 for keys and values in 8 bits: a file of its own, because kernels of all types in one
// take minutes.
#include "cuda/attention.cuh"

namespace pass_ext::gpu {

template AttentionKernel* attention_kernel_of<CodesShape<AttentionShape<float16, 64, 1>>>();
template AttentionKernel* attention_kernel_of<CodesShape<AttentionShape<float16, 64, 4>>>();
template AttentionKernel* attention_kernel_of<CodesShape<AttentionShape<float16, 96, 1>>>();
template AttentionKernel* attention_kernel_of<CodesShape<AttentionShape<float16, 96, 4>>>();
template AttentionKernel* attention_kernel_of<CodesShape<AttentionShape<float16, 128, 1>>>();
template AttentionKernel* attention_kernel_of<CodesShape<AttentionShape<float16, 128, 4>>>();
template AttentionKernel* attention_kernel_of<CodesShape<AttentionShape<float16, 256, 1>>>();
template AttentionKernel* attention_kernel_of<CodesShape<AttentionShape<float16, 256, 4>>>();

}  // namespace pass_ext::gpu
