"""A stand-in for SGLang's CPU kernels: its Triton kernels for other platforms build trees and verify them greedily.

Every other name exists and refuses to run.
"""


def build_tree_kernel_efficient_cpu(*arguments):
    """``sgl_build_tree_kernel_triton``, SGLang's own for XPUs"""
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton

    sgl_build_tree_kernel_triton(*arguments)


def verify_tree_greedy_cpu(*, retrive_index, retrive_next_token, retrive_next_sibling, **arguments):
    """``verify_tree_greedy_triton``, SGLang's own for XPUs"""
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    verify_tree_greedy_triton(
        retrieve_index=retrive_index,
        retrieve_next_token=retrive_next_token,
        retrieve_next_sibling=retrive_next_sibling,
        **arguments,
    )


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*arguments, **options):
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return refuse
