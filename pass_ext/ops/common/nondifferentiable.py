"""``call``: runs the kernel of an op that has no derivative. ``refuse_gradients``: for those that would lose one.

A kernel drops forward-mode derivatives (dual tensors, ``torch.func.jvp``, ``jacfwd``): the result would have tangents of zero
and no error. So ``call`` refuses them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pass_ext.ops.common.fakes import tensors_in


def call(op: Any, *arguments: Any) -> Any:
    """The op's result, computed below autograd: for a small step torch's autograd layer takes longer than the kernel."""
    if forward_ad._current_level >= 0:
        refuse_tangents(op, *arguments)
    if torch.compiler.is_compiling():
        return op(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def refuse_gradients(op: str, *tensors: Tensor | None, instead: str = "") -> None:
    """Refuses tensors that require a gradient while gradients are recorded. instead: the op that has them."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise RuntimeError(
            f"pass_ext::{op}: no gradient is implemented, but an input requires one; call it under torch.no_grad()"
            + (f", or {instead}, which has gradients" if instead else "")
        )


def refuse_tangents(op: Any, *arguments: Any) -> None:
    """Raises RuntimeError if an argument carries a forward-mode derivative at any level of torch.func."""
    name = op._schema.name.split("::")[1]
    for argument, tensor in tensors_in([entry.name for entry in op._schema.arguments], arguments):
        if tensor.is_floating_point() or tensor.is_complex():
            _Refusal.apply(name, argument, tensor)


class _Refusal(torch.autograd.Function):
    """Raises in ``jvp``, which torch calls only if the tensor has a tangent, at any level of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op, argument, tensor):  # type: ignore[no-untyped-def]
        return tensor.new_zeros(())

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.op, ctx.argument, _ = inputs

    @staticmethod
    def jvp(ctx, *tangents):  # type: ignore[no-untyped-def]
        raise RuntimeError(
            f"pass_ext::{ctx.op}: no forward-mode derivative is implemented, but {ctx.argument} carries one (a dual tensor, "
            "torch.func.jvp or jacfwd); detach it"
        )
