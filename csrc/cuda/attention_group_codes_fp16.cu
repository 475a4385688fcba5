// Attention kernels of float16 for the heads of a group and keys and values in 8 bits: a file a type, so that they
// compile side by side.
#include "cuda/attention_group.cuh"

namespace pass_ext::gpu {

template GroupKernel* group_kernel_of<GroupShape<float16, 576, 512, 1, uint8_t>>();
template GroupKernel* group_kernel_of<GroupShape<float16, 576, 512, 2, uint8_t>>();

}  // namespace pass_ext::gpu
