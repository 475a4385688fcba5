// Attention kernels for problems with chunks, of head size 128: a file of its own, because all kernels in one take over
// a minute.
#include "cuda/attention.cuh"

namespace pass_ext::gpu {

template AttentionKernel* attention_kernel_of<ChunkedShape<bfloat16, 1>>();
template AttentionKernel* attention_kernel_of<ChunkedShape<bfloat16, 4>>();
template AttentionKernel* attention_kernel_of<ChunkedShape<float16, 1>>();
template AttentionKernel* attention_kernel_of<ChunkedShape<float16, 4>>();

}  // namespace pass_ext::gpu
