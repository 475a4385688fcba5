"""``lookahead_embed``: input rows of a step that mixes real tokens and look-ahead slots, in one gather.

out[n] = table[ids[n]] for ids[n] >= 0, lookahead[-1 - ids[n]] for ids[n] < 0. Kernels: csrc/cpu/lookahead.cpp,
csrc/cuda/lookahead.cu. Called by decoders, the decoding loop, and training.
"""

import torch
from torch import Tensor

from pass_ext import _library

_op = torch.ops.pass_ext.lookahead_embed.default
_backward_op = torch.ops.pass_ext.lookahead_embed_backward.default


def lookahead_embed(ids: Tensor, table: Tensor, lookahead: Tensor) -> Tensor:
    """Embeds token ids and look-ahead slots together.

    Args:
        ids: ``[...]`` int32 or int64. ``id >= 0`` takes row ``id`` of ``table``; ``-1 - i`` takes look-ahead slot ``i``.
        table: ``[V, d]`` bfloat16, float16, float32 or float64; rows may be strided, each row contiguous.
        lookahead: ``[L, d]`` in the table's dtype, or float32 beside any table (master weights for training).

    Returns:
        ``[..., d]`` in the table's dtype. Differentiable in ``lookahead``, and in ``table`` if it requires grad; gradients
        add up in fp32 (fp64 for float64) in a fixed order, so they are the same bits in every run.

    Ids outside ``[-L, V)`` are refused on the CPU before anything is written. On CUDA nobody waits for the GPU to look: such
    a row is all zeros. ``pass_ext.set_debug(True)`` or ``PASS_EXT_DEBUG=1`` checks them there too, at the price of a
    synchronisation per call.
    """
    if torch.compiler.is_compiling():
        return _op(ids, table, lookahead)
    if _library.debug_enabled():
        check_ids(ids, table.shape[0], lookahead.shape[0])
    if torch.is_inference_mode_enabled():  # autograd is out of the way already
        return _op(ids, table, lookahead)
    if torch.is_grad_enabled() and (lookahead.requires_grad or table.requires_grad):
        return _Recorded.apply(ids, table, lookahead)
    return _embed(ids, table, lookahead)


def _embed(ids: Tensor, table: Tensor, lookahead: Tensor) -> Tensor:
    # Straight to the kernel: torch's Python autograd layer of a registered op costs several times the kernel of a small step.
    with torch._C._AutoDispatchBelowAutograd():
        return _op(ids, table, lookahead)


def check_ids(ids: Tensor, vocabulary: int, slots: int) -> None:
    """Raises IndexError for the first id outside ``[-slots, vocabulary)``. Waits for the device."""
    bad = (ids < -slots) | (ids >= vocabulary)
    if bool(bad.any()):
        index = int(bad.flatten().nonzero()[0])
        raise IndexError(
            f"pass_ext::lookahead_embed: ids must be in [{-slots}, {vocabulary}) ({slots} look-ahead slots, {vocabulary} "
            f"table rows), got {int(ids.flatten()[index])} at flat index {index}"
        )


@torch.library.register_fake("pass_ext::lookahead_embed")
def _embed_shape(ids: Tensor, table: Tensor, lookahead: Tensor) -> Tensor:
    return table.new_empty((*ids.shape, table.shape[1]))


@torch.library.register_fake("pass_ext::lookahead_embed_backward")
def _embed_backward_shape(grad: Tensor, ids: Tensor, rows: int, slots: bool, dtype: torch.dtype) -> Tensor:
    return grad.new_empty((rows, grad.shape[-1]), dtype=dtype)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ids, table, lookahead = inputs
    ctx.save_for_backward(ids)
    ctx.table_like = (table.shape[0], table.dtype)
    ctx.lookahead_like = (lookahead.shape[0], lookahead.dtype)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    (ids,) = ctx.saved_tensors
    to_table = _gradient(grad, ids, *ctx.table_like, slots=False) if ctx.needs_input_grad[1] else None
    to_lookahead = _gradient(grad, ids, *ctx.lookahead_like, slots=True) if ctx.needs_input_grad[2] else None
    return None, to_table, to_lookahead


def _gradient(grad: Tensor, ids: Tensor, rows: int, dtype: torch.dtype, *, slots: bool) -> Tensor:
    if torch.compiler.is_compiling() or torch.is_grad_enabled():  # a second derivative may be wanted
        return _backward_op(grad, ids, rows, slots, dtype)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_op(grad, ids, rows, slots, dtype)


torch.library.register_autograd("pass_ext::lookahead_embed", _backward, setup_context=_save)


def _save_for_second(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    grad, ids, rows, slots, _ = inputs
    ctx.save_for_backward(ids)
    ctx.rows, ctx.slots, ctx.dtype = rows, slots, grad.dtype


def _second(ctx, grad_of_gradient):  # type: ignore[no-untyped-def]
    # The gradient is linear in grad: row n went to the row that its id picks, so that row's derivative comes back to n.
    (ids,) = ctx.saved_tensors
    picked = -1 - ids if ctx.slots else ids
    inside = ((picked >= 0) & (picked < ctx.rows)).unsqueeze(-1)
    rows = grad_of_gradient[picked.clamp(0, max(ctx.rows - 1, 0))] if ctx.rows else grad_of_gradient.new_zeros(())
    return torch.where(inside, rows, 0).to(ctx.dtype), None, None, None, None


torch.library.register_autograd("pass_ext::lookahead_embed_backward", _second, setup_context=_save_for_second)


class _Recorded(torch.autograd.Function):
    """The formula registered above, for eager calls: the same gradient with a fraction of the Python around it."""

    @staticmethod
    def forward(ctx, ids, table, lookahead):  # type: ignore[no-untyped-def]
        _save(ctx, (ids, table, lookahead), None)
        return _embed(ids, table, lookahead)

    backward = staticmethod(_backward)
