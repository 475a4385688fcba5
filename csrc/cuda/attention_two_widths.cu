// Attention kernels for keys of 192 and values of 128 numbers: a file of its own, because all kernels in one take over
// a minute.
#include "cuda/attention.cuh"

namespace pass_ext::gpu {

template AttentionKernel* attention_kernel_of<TwoWidthsShape<bfloat16, 1>>();
template AttentionKernel* attention_kernel_of<TwoWidthsShape<bfloat16, 4>>();
template AttentionKernel* attention_kernel_of<TwoWidthsShape<float16, 1>>();
template AttentionKernel* attention_kernel_of<TwoWidthsShape<float16, 4>>();

}  // namespace pass_ext::gpu
