"""Contenders that attend to a prefix and a tree: pass_ext and PyTorch. attention_libraries.py has other libraries.

attention_steps.py makes their inputs; attention.py says what each stands for.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness.cases import OURS, Contender
from benchmarks.ops.contenders.inputs.attention_steps import Step, as_heads, fold, unfold
from pass_ext.ops.attention import attention_merge, attention_tree

SDPA, FOLDED, MERGED = "SDPA", "SDPA, folded", "torch flash + merge"
FLEX, FLEX_TUNED = "FlexAttention", "FlexAttention, tuned"


@dataclass(frozen=True, kw_only=True)
class AttentionContender(Contender):
    """A contender with the conditions under which it can run. Its function takes a ``Step``."""

    devices: tuple[str, ...] = ("cpu", "cuda")
    prepare: Callable[[Sequence[Step]], None] | None = None
    """Plans, compiles, copies into pages: once per line, untimed."""
    compiles: bool = False
    package: str | None = None
    """The package that must be installed; it is tried in another process first."""
    one_request: bool = False
    """True if it takes one tree for all requests: then it runs on lines of one request."""
    has_window: bool = False
    """True if it can hide keys outside a window that goes by depth."""
    has_sinks: bool = False
    has_lists: bool = False


def ours(step: Step) -> tuple[Tensor, Tensor]:
    """pass_ext: one call on the cache as it is."""
    trees = step.trees
    k, v = step.stored or (step.k, step.v)
    return attention_tree(
        step.q,
        k.transpose(1, 2),
        v.transpose(1, 2),
        trees.prefix_lens,
        trees.cu_nodes,
        trees.visible,
        step.spec.nodes,
        depths=trees.depths,
        window=step.spec.window,
        sinks=step.sinks,
        key_lists=trees.lists,
    )


# ---- a dense mask ----


def used_keys(step: Step) -> tuple[Tensor, Tensor]:
    """Keys and values without unused slots: views [B, Hkv, keys, D]."""
    return step.k[:, :, : step.spec.keys], step.v[:, :, : step.spec.keys]


def sdpa(step: Step) -> Tensor:
    """SDPA with a dense mask, as a user writes it."""
    k, v = used_keys(step)
    return scaled_dot_product_attention(as_heads(step), k, v, attn_mask=step.trees.mask, enable_gqa=True)


def sdpa_folded(step: Step) -> Tensor:
    """SDPA with the query heads of a key head as its rows: no kernel needs to know of groups, or to read a key twice."""
    k, v = used_keys(step)
    return scaled_dot_product_attention(fold(step), k, v, attn_mask=step.trees.folded_mask)


def sdpa_repeated(step: Step) -> Tensor:
    """SDPA with every key head copied for each of its query heads, for kernels that know no groups."""
    k, v = (cache.repeat_interleave(step.spec.group, dim=1) for cache in used_keys(step))
    return scaled_dot_product_attention(as_heads(step), k, v, attn_mask=step.trees.mask)


def on_backend(function: Callable[[Step], Tensor], backend: SDPBackend) -> Callable[[Step], Tensor]:
    """The function, restricted to one kernel of PyTorch."""

    def restricted(step: Step) -> Tensor:
        with sdpa_kernel(backend):
            return function(step)

    return restricted


# ---- the prefix by PyTorch's flash kernel, the nodes by ours, then merged ----


def flash_and_merge(step: Step) -> tuple[Tensor, Tensor]:
    """The prefix by the fastest kernel without a mask, the nodes by `attention_tree`, then merged."""
    spec, trees = step.spec, step.trees
    k, v = step.k[:, :, : spec.prefix], step.v[:, :, : spec.prefix]
    if step.q.is_cuda:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(fold(step), k, v)[:2]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(fold(step), k, v)
    nodes_out, nodes_lse = attention_tree(
        step.q,
        step.k[:, :, spec.prefix :].transpose(1, 2),
        step.v[:, :, spec.prefix :].transpose(1, 2),
        trees.no_prefix,
        trees.cu_nodes,
        trees.visible,
        spec.nodes,
    )
    rows = spec.nodes * spec.group
    return attention_merge(unfold(step, out), unfold(step, lse[..., :rows]), nodes_out, nodes_lse, sinks=step.sinks)


# ---- FlexAttention ----


def prepare_flex(name: str, mode: str | None, steps: Sequence[Step]) -> None:
    """Makes a mask that reads the tree's words, its empty and full blocks, and a kernel compiled for this shape."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    trees, spec = steps[0].trees, steps[0].spec
    words, prefix, window = trees.visible.view(spec.batch, spec.nodes), spec.prefix, spec.window
    depths = trees.depths.view(spec.batch, spec.nodes)

    def sees(b: Tensor, head: Tensor, node: Tensor, key: Tensor) -> Tensor:
        seen = (key < prefix) | ((words[b, node] >> (key - prefix).clamp(0, 63) & 1) == 1)
        return seen if window < 0 else seen & ((key >= prefix) | (key > prefix + depths[b, node] - window))

    if name == FLEX:
        torch._dynamo.reset()  # else the shapes of earlier lines count against dynamo's limit
    blocks = create_block_mask(sees, spec.batch, None, spec.nodes, spec.keys, device=str(trees.mask.device))
    trees.prepared[name] = (torch.compile(flex_attention, dynamic=False, fullgraph=True, mode=mode), blocks)


def with_flex(name: str, step: Step) -> Any:
    """FlexAttention's compiled kernel."""
    attend, blocks = step.trees.prepared[name]
    return attend(as_heads(step), *used_keys(step), block_mask=blocks, enable_gqa=True)


def flex(name: str, mode: str | None, devices: tuple[str, ...]) -> AttentionContender:
    """FlexAttention compiled in a mode of torch.compile."""
    prepare = functools.partial(prepare_flex, name, mode)
    attend = functools.partial(with_flex, name)
    return AttentionContender(name, attend, devices=devices, prepare=prepare, compiles=True, has_window=True)


GPU = ("cuda",)
DENSE = [
    AttentionContender(SDPA, sdpa, has_window=True, has_lists=True),
    AttentionContender(FOLDED, sdpa_folded, has_window=True, has_lists=True),
    AttentionContender("SDPA cuDNN", on_backend(sdpa, SDPBackend.CUDNN_ATTENTION), devices=GPU, has_window=True),
    AttentionContender(
        "SDPA cuDNN, folded", on_backend(sdpa_folded, SDPBackend.CUDNN_ATTENTION), devices=GPU, has_window=True
    ),
    AttentionContender(
        "SDPA efficient, folded", on_backend(sdpa_folded, SDPBackend.EFFICIENT_ATTENTION), devices=GPU, has_window=True
    ),
    AttentionContender(
        "SDPA efficient, repeated",
        on_backend(sdpa_repeated, SDPBackend.EFFICIENT_ATTENTION),
        devices=GPU,
        has_window=True,
    ),
    AttentionContender("SDPA math", on_backend(sdpa, SDPBackend.MATH), devices=GPU, has_window=True),
]
CONTENDERS = [
    AttentionContender(OURS, ours, has_window=True, has_sinks=True, has_lists=True),
    *DENSE,
    AttentionContender(MERGED, flash_and_merge, has_sinks=True),
    flex(FLEX, None, ("cpu", "cuda")),
    flex(FLEX_TUNED, "max-autotune-no-cudagraphs", GPU),
]
