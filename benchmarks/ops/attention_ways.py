"""The ways to attend to a prefix and a tree that attention.py times: ours and PyTorch's. Other libraries:
attention_libraries.py. What they get: attention_steps.py. Why these: the top of attention.py.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.ops.inputs.attention_steps import Step, as_heads, fold, unfold
from pass_ext.ops.attention import attention_merge, attention_tree

OURS, SDPA, FOLDED, MERGED = "pass_ext", "SDPA", "SDPA, folded", "torch flash + merge"
FLEX, FLEX_TUNED = "FlexAttention", "FlexAttention, tuned"


@dataclass(frozen=True)
class Way:
    """One contender, and what it needs before it can run."""

    name: str
    function: Callable[[Step], Any]
    devices: tuple[str, ...] = ("cpu", "cuda")
    prepare: Callable[[Sequence[Step]], None] | None = None
    """Once per line, untimed: plans, compiles, copies into pages."""
    compiles: bool = False
    package: str | None = None
    """What must be installed; tried in a process of its own first."""
    one_request: bool = False
    """Has one tree for all requests, so it does the job for one."""
    has_window: bool = False
    """Hides what lies outside a window that goes by depth."""


def ours(step: Step) -> tuple[Tensor, Tensor]:
    """One call, the cache where it lies."""
    trees = step.trees
    return attention_tree(
        step.q,
        step.k.transpose(1, 2),
        step.v.transpose(1, 2),
        trees.prefix_lens,
        trees.cu_nodes,
        trees.visible,
        step.spec.nodes,
        depths=trees.depths,
        window=step.spec.window,
    )


# ---- a dense mask ----


def used(step: Step) -> tuple[Tensor, Tensor]:
    """Keys and values without the unused slots: views [B, Hkv, keys, D]."""
    return step.k[:, :, : step.spec.keys], step.v[:, :, : step.spec.keys]


def sdpa(step: Step) -> Tensor:
    """As one would write it."""
    k, v = used(step)
    return scaled_dot_product_attention(as_heads(step), k, v, attn_mask=step.trees.mask, enable_gqa=True)


def sdpa_folded(step: Step) -> Tensor:
    """Every key head's query heads are its rows: no kernel needs to know of groups, or to read a key twice."""
    k, v = used(step)
    return scaled_dot_product_attention(fold(step), k, v, attn_mask=step.trees.folded_mask)


def sdpa_repeated(step: Step) -> Tensor:
    """Every key head copied for each of its query heads, as models do whose kernel knows no groups."""
    k, v = (cache.repeat_interleave(step.spec.group, dim=1) for cache in used(step))
    return scaled_dot_product_attention(as_heads(step), k, v, attn_mask=step.trees.mask)


def on_backend(function: Callable[[Step], Tensor], backend: SDPBackend) -> Callable[[Step], Tensor]:
    """With that kernel and no other."""

    def on_this(step: Step) -> Tensor:
        with sdpa_kernel(backend):
            return function(step)

    return on_this


# ---- the prefix by PyTorch's flash kernel, the nodes by ours, then merged ----


def flash_and_merge(step: Step) -> tuple[Tensor, Tensor]:
    """The prefix needs no mask, so the fastest kernel that there is may take it."""
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
    return attention_merge(unfold(step, out), unfold(step, lse[..., :rows]), nodes_out, nodes_lse)


# ---- FlexAttention ----


def prepare_flex(name: str, mode: str | None, steps: Sequence[Step]) -> None:
    """A mask that reads the tree's words, the blocks that it leaves empty or full, and a compiled kernel for this shape."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    trees, spec = steps[0].trees, steps[0].spec
    words, prefix, window = trees.visible.view(spec.batch, spec.nodes), spec.prefix, spec.window
    depths = trees.depths.view(spec.batch, spec.nodes)

    def sees(b: Tensor, head: Tensor, node: Tensor, key: Tensor) -> Tensor:
        seen = (key < prefix) | ((words[b, node] >> (key - prefix).clamp(0, 63) & 1) == 1)
        return seen if window < 0 else seen & ((key >= prefix) | (key > prefix + depths[b, node] - window))

    if name == FLEX:
        torch._dynamo.reset()  # one shape after the other: none must count against a limit on shapes
    blocks = create_block_mask(sees, spec.batch, None, spec.nodes, spec.keys, device=str(trees.mask.device))
    trees.prepared[name] = (torch.compile(flex_attention, dynamic=False, fullgraph=True, mode=mode), blocks)


def with_flex(name: str, step: Step) -> Any:
    """The compiled kernel."""
    attend, blocks = step.trees.prepared[name]
    return attend(as_heads(step), *used(step), block_mask=blocks, enable_gqa=True)


def flex(name: str, mode: str | None, devices: tuple[str, ...]) -> Way:
    """FlexAttention compiled in that mode."""
    prepare = functools.partial(prepare_flex, name, mode)
    return Way(name, functools.partial(with_flex, name), devices, prepare, compiles=True, has_window=True)


GPU = ("cuda",)
DENSE = [
    Way(SDPA, sdpa, has_window=True),
    Way(FOLDED, sdpa_folded, has_window=True),
    Way("SDPA cuDNN", on_backend(sdpa, SDPBackend.CUDNN_ATTENTION), GPU, has_window=True),
    Way("SDPA cuDNN, folded", on_backend(sdpa_folded, SDPBackend.CUDNN_ATTENTION), GPU, has_window=True),
    Way("SDPA efficient, folded", on_backend(sdpa_folded, SDPBackend.EFFICIENT_ATTENTION), GPU, has_window=True),
    Way("SDPA efficient, repeated", on_backend(sdpa_repeated, SDPBackend.EFFICIENT_ATTENTION), GPU, has_window=True),
    Way("SDPA math", on_backend(sdpa, SDPBackend.MATH), GPU, has_window=True),
]
WAYS = [
    Way(OURS, ours, has_window=True),
    *DENSE,
    Way(MERGED, flash_and_merge),
    flex(FLEX, None, ("cpu", "cuda")),
    flex(FLEX_TUNED, "max-autotune-no-cudagraphs", GPU),
]
