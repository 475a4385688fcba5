"""A stand-in for ``sgl_kernel.speculative``: n-gram trees are built by SGLang's Triton kernel, which another platform uses."""


def reconstruct_indices_from_tree_mask(*arguments):
    """``reconstruct_indices_from_tree_mask_triton``, SGLang's own for XPUs"""
    from sglang.kernels.ops.speculative.reconstruct_tree import reconstruct_indices_from_tree_mask_triton

    reconstruct_indices_from_tree_mask_triton(*arguments)
