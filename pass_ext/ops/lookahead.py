"""``lookahead_embed``: the input rows of a step that mixes tokens and look-ahead slots, in one gather.

out[n] = table[ids[n]] for ids[n] >= 0, lookahead[-1 - ids[n]] for ids[n] < 0. Kernels: csrc/cpu/lookahead.cpp,
csrc/cuda/lookahead.cu.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pass_ext import _library
from pass_ext.ops.common.arguments import integers, typed
from pass_ext.ops.common.kernels import fake_kernel

_op = _library.ops.lookahead_embed.default
_backward_op = _library.ops.lookahead_embed_backward.default
_ID_DTYPES = (torch.int64, torch.int32)


@typed("pass_ext::", page="ops/lookahead")
def lookahead_embed(ids: Tensor, table: Tensor, lookahead: Tensor) -> Tensor:
    """Input embeddings ``[..., d]`` of ids that mix tokens, from ``table [V, d]``, and look-ahead slots, from
    ``lookahead [L, d]``.

    Args:
        ids: ``[...]`` integers of any dtype. ``id >= 0`` is row ``id`` of ``table``; ``-1 - i`` is row ``i`` of ``lookahead``.
        table: ``[V, d]`` bfloat16, float16, float32 or float64; rows may be strided, d contiguous. Or on the CPU a packed one,
            ``[V / 16, d / 32, bytes]`` uint8 as ``layers.pack_weight`` makes it, which has no gradient.
        lookahead: ``[L, d]`` in the table's dtype, or float32 beside any table (master weights for training); beside a packed
            table bfloat16, float16 or float32.

    Returns:
        ``[..., d]`` in the table's dtype, beside a packed one in that of ``lookahead``. Differentiable in ``lookahead`` and
        ``table``, in reverse and forward mode and under ``torch.func``'s grad, jvp, jacfwd, jacrev and vmap; gradients are
        summed in fp32 (fp64 for float64) in a fixed order, so every run gives the same bits.

    The CPU refuses ids outside ``[-L, V)`` before anything is written. On CUDA ids are not checked, to avoid a
    synchronisation: such a row is all zeros. ``pass_ext.set_debug(True)`` or ``PASS_EXT_DEBUG=1`` checks them there too, with
    one synchronisation per call.

    Example:

        >>> table, slots = torch.arange(6.0).view(3, 2), torch.tensor([[10.0, 11.0]])
        >>> pass_ext.lookahead_embed(torch.tensor([2, -1]), table, slots)  # token 2, then slot 0
        tensor([[ 4.,  5.],
                [10., 11.]])
    """
    if ids.dtype not in _ID_DTYPES:
        ids = integers("lookahead_embed", "ids", ids, torch.int64)
    if _is_transformed():
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # a traced call would lose its tangents: they would be 0
        return _Transformed.apply(ids, table, lookahead)
    if torch.compiler.is_compiling():
        return _op(ids, table, lookahead)
    if _library.debug_enabled():
        check_ids(ids, table.shape[0], lookahead.shape[0])
    if torch.is_inference_mode_enabled():  # it skips autograd already
        return _op(ids, table, lookahead)
    if torch.is_grad_enabled() and (lookahead.requires_grad or table.requires_grad):
        return _Recorded.apply(ids, table, lookahead)
    return _embed(ids, table, lookahead)


def _is_transformed() -> bool:
    """True inside a forward-mode level or a transformation of torch.func."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def _embed(ids: Tensor, table: Tensor, lookahead: Tensor) -> Tensor:
    # Below autograd: for a small step torch's Python autograd layer takes several times as long as the kernel.
    with torch._C._AutoDispatchBelowAutograd():
        return _op(ids, table, lookahead)


def check_ids(ids: Tensor, vocabulary: int, slots: int) -> None:
    """Raises IndexError for the first id outside ``[-slots, vocabulary)``. Synchronises with the device."""
    bad = (ids < -slots) | (ids >= vocabulary)
    if bool(bad.any()):
        index = int(bad.flatten().nonzero()[0])
        raise IndexError(
            f"pass_ext::lookahead_embed: ids must be in [{-slots}, {vocabulary}) ({slots} look-ahead slots, {vocabulary} "
            f"table rows), got {int(ids.flatten()[index])} at flat index {index}"
        )


@fake_kernel("lookahead_embed")
def _embed_shape(ids: Tensor, table: Tensor, lookahead: Tensor) -> Tensor:
    like = lookahead if table.dtype is torch.uint8 else table
    return like.new_empty((*ids.shape, like.shape[1]))


@fake_kernel("lookahead_embed_backward")
def _embed_backward_shape(grad: Tensor, ids: Tensor, rows: int, slots: bool, dtype: torch.dtype) -> Tensor:
    return grad.new_empty((rows, grad.shape[-1]), dtype=dtype)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ids, table, lookahead = inputs
    ctx.save_for_backward(ids)
    is_packed = table.dtype is torch.uint8  # zeros as its rows are those of a dense one
    ctx.table_like = (16 * table.shape[0], lookahead.dtype) if is_packed else (table.shape[0], table.dtype)
    ctx.lookahead_like = (lookahead.shape[0], lookahead.dtype)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    (ids,) = ctx.saved_tensors
    to_table = _gradient(grad, ids, *ctx.table_like, slots=False) if ctx.needs_input_grad[1] else None
    to_lookahead = _gradient(grad, ids, *ctx.lookahead_like, slots=True) if ctx.needs_input_grad[2] else None
    return None, to_table, to_lookahead


def _gradient(grad: Tensor, ids: Tensor, rows: int, dtype: torch.dtype, *, slots: bool) -> Tensor:
    if not torch.compiler.is_compiling() and _is_transformed():
        return _TransformedGradient.apply(grad, ids, rows, slots, dtype)
    if torch.compiler.is_compiling() or torch.is_grad_enabled():  # with a graph for second derivatives
        return _backward_op(grad, ids, rows, slots, dtype)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_op(grad, ids, rows, slots, dtype)


torch.library.register_autograd(f"{_library.NAMESPACE}::lookahead_embed", _backward, setup_context=_save)


def _save_for_second(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    grad, ids, rows, slots, _ = inputs
    ctx.save_for_backward(ids)
    ctx.rows, ctx.slots, ctx.dtype = rows, slots, grad.dtype


def _second(ctx, grad_of_gradient):  # type: ignore[no-untyped-def]
    # The gradient adds row n of grad to the row that ids[n] picks. So row n's derivative is a gather from that row.
    (ids,) = ctx.saved_tensors
    picked = -1 - ids if ctx.slots else ids
    inside = ((picked >= 0) & (picked < ctx.rows)).unsqueeze(-1)
    rows = grad_of_gradient[picked.clamp(0, max(ctx.rows - 1, 0))] if ctx.rows else grad_of_gradient.new_zeros(())
    return torch.where(inside, rows, 0).to(ctx.dtype), None, None, None, None


torch.library.register_autograd(
    f"{_library.NAMESPACE}::lookahead_embed_backward", _second, setup_context=_save_for_second
)


class _Recorded(torch.autograd.Function):
    """The gradient registered above, for eager calls: much less Python runs per call."""

    @staticmethod
    def forward(ctx, ids, table, lookahead):  # type: ignore[no-untyped-def]
        _save(ctx, (ids, table, lookahead), None)
        return _embed(ids, table, lookahead)

    backward = staticmethod(_backward)


# ---- forward mode and torch.func: autograd functions with setup_context, which are slower to call ----


class _Transformed(torch.autograd.Function):
    """``lookahead_embed`` is linear in both tables: its tangent is the same gather from their tangents."""

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
        tangent = to_table if to_table is not None else to_lookahead
        if to_table is None:
            to_table = _zeros(tangent, *ctx.table_like)
        if to_lookahead is None:
            to_lookahead = _zeros(tangent, *ctx.lookahead_like)
        return lookahead_embed(ids, to_table, to_lookahead)

    @staticmethod
    def vmap(info, in_dims, ids, table, lookahead):  # type: ignore[no-untyped-def]
        size, (ids_dim, table_dim, lookahead_dim) = info.batch_size, in_dims
        if table_dim is None and lookahead_dim is None:
            return lookahead_embed(ids.movedim(ids_dim, 0), table, lookahead), 0
        if ids_dim is not None:
            return _one_by_one(lookahead_embed, size, in_dims, (ids, table, lookahead))
        # One gather from wide rows: row r holds row r of every table in the batch.
        wide = lookahead_embed(
            ids, _side_by_side(table, table_dim, size), _side_by_side(lookahead, lookahead_dim, size)
        )
        return wide.reshape(*ids.shape, size, wide.shape[-1] // size), ids.dim()


class _TransformedGradient(torch.autograd.Function):
    """``lookahead_embed_backward`` is linear in grad: its tangent is the same op on grad's tangent."""

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
    """``[rows, size * d]``: ``size`` tables ``[rows, d]`` side by side, or copies of one table."""
    table = table.unsqueeze(1).expand(-1, size, -1) if batch_dim is None else table.movedim(batch_dim, 1)
    return table.flatten(1)


def _one_by_one(function: Any, size: int, in_dims: Any, tensors: Any) -> tuple[Tensor, int]:
    def item(i: int) -> Tensor:
        result: Tensor = function(
            *(tensor if dim is None else tensor.select(dim, i) for dim, tensor in zip(in_dims, tensors, strict=True))
        )
        return result

    return torch.stack([item(i) for i in range(size)]), 0
