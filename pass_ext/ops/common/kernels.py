"""``fake_kernel`` and ``call``: an op's fake kernel, and its real one where it has no derivative; ``refuse_gradients``.

A fake kernel returns empty results of the right shapes. It first checks that all tensors are on one device: torch calls it for
a CPU tensor beside one on ``meta`` too, and its results, on the device of one argument, would be uninitialised memory.
A kernel drops forward-mode derivatives (dual tensors, ``torch.func.jvp``, ``jacfwd``): the result would have tangents of zero
and no error. So ``call`` refuses them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pass_ext._library import NAMESPACE, ops


def fake_kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function, which takes the op's arguments and returns empty results, as the op's fake kernel."""
    arguments = [argument.name for argument in getattr(ops, name).default._schema.arguments]

    def register(shapes: Callable[..., Any]) -> Callable[..., Any]:
        def fake(*values: Any) -> Any:
            check_one_device(name, arguments, values)
            return shapes(*values)

        torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
        return shapes

    return register


def nothing(*arguments: object) -> None:
    """The fake kernel of an op that writes into its arguments and returns nothing."""


def check_one_device(op: str, arguments: list[str], values: tuple[Any, ...]) -> None:
    """Raises RuntimeError for the first tensor that is not on the device of the first tensor."""
    tensors = tensors_in(arguments, values)
    first_name, first = next(tensors)
    for name, tensor in tensors:
        if tensor.device != first.device:
            raise RuntimeError(
                f"pass_ext::{op}: {name} must be on the device of {first_name} ({_describe(first)}), got {_describe(tensor)}"
            )


def tensors_in(arguments: list[str], values: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor among an op's arguments, with its name; tensors in lists too."""
    for name, value in zip(arguments, values, strict=False):
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, Tensor))


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


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
