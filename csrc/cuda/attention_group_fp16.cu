// Attention kernels of float16 for the heads of a group: a file a type, so that they compile side by side.
#include "cuda/attention_group.cuh"

namespace pass_ext::gpu {

template GroupKernel* group_kernel_of<GroupShape<float16, 576, 512, 1>>();
template GroupKernel* group_kernel_of<GroupShape<float16, 576, 512, 2>>();
template GroupKernel* group_kernel_of<GroupShape<float16, 512, 512, 1>>();
template GroupKernel* group_kernel_of<GroupShape<float16, 512, 512, 2>>();
template GroupKernel* group_kernel_of<GroupShape<float16, 256, 256, 1>>();
template GroupKernel* group_kernel_of<GroupShape<float16, 192, 128, 1>>();
template GroupKernel* group_kernel_of<GroupShape<float16, 128, 128, 1>>();
template GroupKernel* group_kernel_of<GroupShape<float16, 64, 64, 1>>();

}  // namespace pass_ext::gpu
