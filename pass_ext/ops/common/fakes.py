"""``register_fake``: registers an op's fake kernel, which returns empty results of the right shapes.

Fake kernels first check that all tensors are on one device. Without the check an op that gets a CPU tensor and one on ``meta``
would return uninitialised memory: torch then calls the fake kernel, which makes its results on the device of one argument.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pass_ext._library import NAMESPACE


def register_fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function, which takes the op's arguments and returns empty results, as the op's fake kernel."""
    arguments = [argument.name for argument in getattr(torch.ops.pass_ext, name).default._schema.arguments]

    def register(shapes: Callable[..., Any]) -> Callable[..., Any]:
        def fake(*values: Any) -> Any:
            check_one_device(name, arguments, values)
            return shapes(*values)

        torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
        return shapes

    return register


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
