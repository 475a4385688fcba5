// Attention kernels of bfloat16 for head sizes 128 and 256: a file of its own, because all kernels in one take over a
// minute.
#include "cuda/attention.cuh"

namespace pass_ext::gpu {

template AttentionKernel* attention_kernel_of<AttentionShape<bfloat16, 128, 1>>();
template AttentionKernel* attention_kernel_of<AttentionShape<bfloat16, 128, 4>>();
template AttentionKernel* attention_kernel_of<AttentionShape<bfloat16, 256, 1>>();
template AttentionKernel* attention_kernel_of<AttentionShape<bfloat16, 256, 4>>();

}  // namespace pass_ext::gpu
