// The kernels of csrc/cuda/attention_group.cuh, as their own files name them.
#include "cuda/attention_group_bf16.cu"
#include "cuda/attention_group_fp16.cu"
