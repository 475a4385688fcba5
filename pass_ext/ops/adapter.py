"""``adapter_rows_``: adds a low-rank product to the rows of look-ahead slots, and to no others, in place; and
``adapter_rows``, the same out of place and differentiable, in PyTorch.

out[n] = out[n] + scale * (x[n] @ down[k].T) @ up[k] for ids[n] < 0, k = -1 - ids[n] or 0. Kernels: csrc/cpu/adapter.cpp,
csrc/cuda/adapter.cuh.
"""

import torch
from torch import Tensor

from pass_ext import _library
from pass_ext.ops.common.arguments import integers, typed
from pass_ext.ops.common.kernels import call, fake_kernel, nothing, refuse_gradients

MAX_RANK = 128  # kMaxAdapterRank of csrc/core/adapter.h

_op = _library.ops.adapter_rows_.default
_ID_DTYPES = (torch.int64, torch.int32)


@typed("pass_ext::", page="ops/adapter")
def adapter_rows_(out: Tensor, x: Tensor, ids: Tensor, down: Tensor, up: Tensor, scale: float = 1.0) -> Tensor:
    """Adds to the output ``out [..., out]`` of a linear layer, in place, the low-rank product of its input ``x [..., in]`` for
    the rows of look-ahead slots: ``out[n] += scale * (x[n] @ down[k].T) @ up[k]`` where ``ids[n] < 0``.

    Args:
        out: ``[..., out]`` bfloat16, float16 or float32; contiguous rows, evenly apart. Not x itself.
        x: ``[..., in]`` in out's dtype, N rows as out has.
        ids: ``[N]`` integers of any dtype, as ``lookahead_embed`` takes them: rows of tokens, ``id >= 0``, keep their bits.
            ``-1 - k`` has adapter k.
        down: ``[K, r, in]`` in out's dtype, r at most 128; K = 1: all slots share one adapter.
        up: ``[K, r, out]`` in out's dtype.
        scale: of the product.

    Returns:
        out.

    Products and sums are fp32, and out is rounded once. A row's bits do not depend on the rows beside it, their order or the
    number of threads. Both products are one launch on CUDA, and blocks of tokens only read their id: a call without slots
    reads no weights. It can be part of a CUDA graph.

    The CPU refuses slots below -K (if K is not 1) before anything is written. On CUDA ids are not checked, to avoid a
    synchronisation: such a row stays as it is. ``pass_ext.set_debug(True)`` or ``PASS_EXT_DEBUG=1`` checks them there too.
    No gradients, reverse or forward: the op raises if an input requires one. ``pass_ext.layers.adapter_rows`` has them.

    Example:

        >>> out, x, ids = torch.zeros(2, 2), torch.ones(2, 2), torch.tensor([7, -1])  # a token, then slot 0
        >>> pass_ext.layers.adapter_rows_(out, x, ids, torch.ones(1, 1, 2), torch.tensor([[[3.0, 4.0]]]))
        tensor([[0., 0.],
                [6., 8.]])
    """
    refuse_gradients("adapter_rows_", out, x, down, up, instead="pass_ext.layers.adapter_rows")
    if ids.dtype not in _ID_DTYPES:
        ids = integers("adapter_rows_", "ids", ids, torch.int64)
    if _library.debug_enabled() and not torch.compiler.is_compiling():
        check_adapter_ids(ids, down.shape[0] if down.dim() else 0)
    call(_op, out, x, ids, down, up, scale)
    return out


def check_adapter_ids(ids: Tensor, adapters: int, op: str = "adapter_rows_") -> None:
    """Raises IndexError for the first slot below ``-adapters``, unless all share one. Synchronises with the device."""
    bad = ids < -adapters
    if adapters != 1 and bool(bad.any()):
        index = int(bad.nonzero()[0])
        raise IndexError(
            f"pass_ext::{op}: ids must be at least {-adapters} ({adapters} adapters), got {int(ids[index])} at index {index}"
        )


fake_kernel("adapter_rows_")(nothing)


@typed("pass_ext::", page="ops/adapter")
def adapter_rows(out: Tensor, x: Tensor, ids: Tensor, down: Tensor, up: Tensor, scale: float = 1.0) -> Tensor:
    """``adapter_rows_`` as a new tensor, for training: composite PyTorch, differentiable in out, x, down and up.

    The products are computed in down's dtype, which may be wider than out's (master weights), and rounded to out's.

    Example:

        >>> up = torch.tensor([[[3.0, 4.0]]], requires_grad=True)
        >>> out = pass_ext.layers.adapter_rows(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([-1]), torch.ones(1, 1, 2), up)
        >>> torch.autograd.grad(out.sum(), up)
        (tensor([[[2., 2.]]]),)
    """
    rows, flat = x.flatten(0, -2), out.flatten(0, -2)
    for k in range(len(down)):
        chosen = ids < 0 if len(down) == 1 else ids == -1 - k
        if bool(chosen.all()):
            return (flat + (scale * ((rows.to(down.dtype) @ down[k].T) @ up[k])).to(flat.dtype)).view(out.shape)
        picked = chosen.nonzero()[:, 0]
        product = (rows[picked].to(down.dtype) @ down[k].T) @ up[k]
        flat = flat.index_add(0, picked, (scale * product).to(flat.dtype))
    return flat.view(out.shape)
