"""``lookahead_embed``: input rows of a step that mixes real tokens and look-ahead slots, in one gather.

out[n] = table[ids[n]] for ids[n] >= 0, lookahead[-1 - ids[n]] for ids[n] < 0. Kernels: csrc/cpu/lookahead.cpp,
csrc/cuda/lookahead.cu.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pass_ext import _library
from pass_ext.ops.common.fakes import register_fake
from pass_ext.ops.common.integers import integers

_op = torch.ops.pass_ext.lookahead_embed.default
_backward_op = torch.ops.pass_ext.lookahead_embed_backward.default
_ID_DTYPES = (torch.int64, torch.int32)


def lookahead_embed(ids: Tensor, table: Tensor, lookahead: Tensor) -> Tensor:
    """Embeds token ids and look-ahead slots together.

    Args:
        ids: ``[...]`` integers of any dtype. ``id >= 0`` takes row ``id`` of ``table``; ``-1 - i`` takes look-ahead slot ``i``.
        table: ``[V, d]`` bfloat16, float16, float32 or float64; rows may be strided, each row contiguous.
        lookahead: ``[L, d]`` in the table's dtype, or float32 beside any table (master weights for training).

    Returns:
        ``[..., d]`` in the table's dtype. Differentiable in ``lookahead`` and ``table``, in reverse and forward mode and under
        ``torch.func``'s grad, jvp, jacfwd, jacrev and vmap; gradients add up in fp32 (fp64 for float64) in a fixed order, so
        they are the same bits in every run.

    Ids outside ``[-L, V)`` are refused on the CPU before anything is written. On CUDA nobody waits for the GPU to look: such
    a row is all zeros. ``pass_ext.set_debug(True)`` or ``PASS_EXT_DEBUG=1`` checks them there too, at the price of a
    synchronisation per call.
    """
    if ids.dtype not in _ID_DTYPES:
        ids = integers("lookahead_embed", "ids", ids, torch.int64)
    if _is_transformed():
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # it would trace the forward alone: tangents of 0
        return _Transformed.apply(ids, table, lookahead)
    if torch.compiler.is_compiling():
        return _op(ids, table, lookahead)
    if _library.debug_enabled():
        check_ids(ids, table.shape[0], lookahead.shape[0])
    if torch.is_inference_mode_enabled():  # autograd is out of the way already
        return _op(ids, table, lookahead)
    if torch.is_grad_enabled() and (lookahead.requires_grad or table.requires_grad):
        return _Recorded.apply(ids, table, lookahead)
    return _embed(ids, table, lookahead)


def _is_transformed() -> bool:
    """Whether a forward-mode level is open, or a transformation of torch.func at work."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


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


@register_fake("lookahead_embed")
def _embed_shape(ids: Tensor, table: Tensor, lookahead: Tensor) -> Tensor:
    return table.new_empty((*ids.shape, table.shape[1]))


@register_fake("lookahead_embed_backward")
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
    if not torch.compiler.is_compiling() and _is_transformed():
        return _TransformedGradient.apply(grad, ids, rows, slots, dtype)
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


# ---- forward mode, and torch.func: autograd functions whose context is set up apart, which torch takes longer to call ----


class _Transformed(torch.autograd.Function):
    """``lookahead_embed``, which is linear in both tables: its tangent is the same gather from their tangents."""

    @staticmethod
    def forward(ids, table, lookahead):  # type: ignore[no-untyped-def]
        return _embed(ids, table, lookahead)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        _save(ctx, inputs, output)
        ctx.save_for_forward(inputs[0])

    backward = staticmethod(_backward)

    @staticmethod
    def jvp(ctx, _, to_table, to_lookahead):  # type: ignore[no-untyped-def]
        (ids,) = ctx.saved_tensors
        given = to_table if to_table is not None else to_lookahead
        if to_table is None:
            to_table = _zeros(given, *ctx.table_like)
        if to_lookahead is None:
            to_lookahead = _zeros(given, *ctx.lookahead_like)
        return lookahead_embed(ids, to_table, to_lookahead)

    @staticmethod
    def vmap(info, in_dims, ids, table, lookahead):  # type: ignore[no-untyped-def]
        size, (ids_dim, table_dim, lookahead_dim) = info.batch_size, in_dims
        if table_dim is None and lookahead_dim is None:
            return lookahead_embed(ids.movedim(ids_dim, 0), table, lookahead), 0
        if ids_dim is not None:
            return _one_by_one(lookahead_embed, size, in_dims, (ids, table, lookahead))
        # One gather of wide rows, each with that row of every table of the batch.
        wide = lookahead_embed(
            ids, _side_by_side(table, table_dim, size), _side_by_side(lookahead, lookahead_dim, size)
        )
        return wide.reshape(*ids.shape, size, wide.shape[-1] // size), ids.dim()


class _TransformedGradient(torch.autograd.Function):
    """``lookahead_embed_backward``, which is linear in grad."""

    @staticmethod
    def forward(grad, ids, rows, slots, dtype):  # type: ignore[no-untyped-def]
        with torch._C._AutoDispatchBelowAutograd():
            return _backward_op(grad, ids, rows, slots, dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        _save_for_second(ctx, inputs, output)
        ctx.save_for_forward(inputs[1])
        ctx.result_dtype = output.dtype

    backward = staticmethod(_second)

    @staticmethod
    def jvp(ctx, to_grad, *_):  # type: ignore[no-untyped-def]
        (ids,) = ctx.saved_tensors
        return _gradient(to_grad, ids, ctx.rows, ctx.result_dtype, slots=ctx.slots)

    @staticmethod
    def vmap(info, in_dims, grad, ids, rows, slots, dtype):  # type: ignore[no-untyped-def]
        size, (grad_dim, ids_dim, *_) = info.batch_size, in_dims

        def gradient(grad: Tensor, ids: Tensor) -> Tensor:
            return _gradient(grad, ids, rows, dtype, slots=slots)

        if ids_dim is not None:
            return _one_by_one(gradient, size, (grad_dim, ids_dim), (grad, ids))
        wide = gradient(grad.movedim(grad_dim, -2).flatten(-2), ids)
        return wide.reshape(rows, size, wide.shape[-1] // size), 1


def _zeros(like: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    return like.new_zeros((1, like.shape[1]), dtype=dtype).expand(rows, -1)


def _side_by_side(table: Tensor, batch_dim: int | None, size: int) -> Tensor:
    """``[rows, size * d]`` of ``size`` tables ``[rows, d]``, or of one for all."""
    table = table.unsqueeze(1).expand(-1, size, -1) if batch_dim is None else table.movedim(batch_dim, 1)
    return table.flatten(1)


def _one_by_one(function: Any, size: int, in_dims: Any, tensors: Any) -> tuple[Tensor, int]:
    def item(i: int) -> Tensor:
        result: Tensor = function(
            *(tensor if dim is None else tensor.select(dim, i) for dim, tensor in zip(in_dims, tensors, strict=True))
        )
        return result

    return torch.stack([item(i) for i in range(size)]), 0
