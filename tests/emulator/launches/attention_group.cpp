// The kernels of csrc/cuda/attention_group.cuh, compiled beside those of attention.cpp, which launches them.
#include "cuda/attention_group.cuh"

namespace pass_ext::gpu {

template GroupKernel* group_kernel_of<GroupShape<bfloat16, 576, 512, 1>>();
template GroupKernel* group_kernel_of<GroupShape<bfloat16, 576, 512, 2>>();
template GroupKernel* group_kernel_of<GroupShape<bfloat16, 512, 512, 1>>();
template GroupKernel* group_kernel_of<GroupShape<bfloat16, 512, 512, 2>>();
template GroupKernel* group_kernel_of<GroupShape<bfloat16, 192, 128, 1>>();
template GroupKernel* group_kernel_of<GroupShape<bfloat16, 192, 128, 2>>();
template GroupKernel* group_kernel_of<GroupShape<bfloat16, 128, 128, 1>>();
template GroupKernel* group_kernel_of<GroupShape<bfloat16, 128, 128, 2>>();
template GroupKernel* group_combine_kernel_of<bfloat16, 512>();
template GroupKernel* group_combine_kernel_of<bfloat16, 128>();
template GroupKernel* group_kernel_of<GroupShape<float16, 576, 512, 1>>();
template GroupKernel* group_kernel_of<GroupShape<float16, 576, 512, 2>>();
template GroupKernel* group_kernel_of<GroupShape<float16, 512, 512, 1>>();
template GroupKernel* group_kernel_of<GroupShape<float16, 512, 512, 2>>();
template GroupKernel* group_kernel_of<GroupShape<float16, 192, 128, 1>>();
template GroupKernel* group_kernel_of<GroupShape<float16, 192, 128, 2>>();
template GroupKernel* group_kernel_of<GroupShape<float16, 128, 128, 1>>();
template GroupKernel* group_kernel_of<GroupShape<float16, 128, 128, 2>>();
template GroupKernel* group_combine_kernel_of<float16, 512>();
template GroupKernel* group_combine_kernel_of<float16, 128>();

}  // namespace pass_ext::gpu
