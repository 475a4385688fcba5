// Attention kernels of float16 for head sizes up to 96: a file of its own, because all kernels in one take over a
// minute.
#include "cuda/attention.cuh"

namespace pass_ext::gpu {

template AttentionKernel* attention_kernel_of<AttentionShape<float16, 64, 1>>();
template AttentionKernel* attention_kernel_of<AttentionShape<float16, 64, 4>>();
template AttentionKernel* attention_kernel_of<AttentionShape<float16, 96, 1>>();
template AttentionKernel* attention_kernel_of<AttentionShape<float16, 96, 4>>();

}  // namespace pass_ext::gpu
