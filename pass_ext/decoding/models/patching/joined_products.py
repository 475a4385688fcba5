"""``joined_products``: inside a context, linear layers that read one input compute as one product: the queries, keys and values
of an attention, the gate and up of an MLP.

``linear_rows`` reads the weights of a group as one weight, so they must lie behind each other. A group whose weights lie apart
is moved once: every parameter stays the same object with the same numbers, as a part of the joined memory, and its former
memory is freed at once. So no weight is ever held twice but those of the one group that is being moved. The weights stay
there: moving them back would copy them in every generation. An output has the same bits as from a layer alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.patching.few_rows import MAX_FEW_ROWS, few_rows_forward, is_plain_linear

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""The names of layers of one module that read the same input, in the order in which models call them."""

_op = torch.ops.pass_ext.linear_rows.default


@contextmanager
def joined_products(module: nn.Module, when: Callable[[], bool]) -> Iterator[None]:
    """Inside, the first layer of a group computes the product of all its layers for up to ``MAX_FEW_ROWS`` rows; the others
    return their part of it if they get the same tensor. All other calls, and ``when()`` False, compute as in
    ``few_rows_linear``, and layers that it would leave alone stay as they are. The layers are restored at the end.
    """
    changed: list[nn.Linear] = []
    try:
        if not torch.is_autocast_enabled("cpu"):
            for part in list(module.modules()):
                for names in GROUPS:
                    layers = [part._modules.get(name) for name in names]
                    if _may_join(layers):
                        changed += _join(layers, when)  # type: ignore[arg-type]
        yield
    finally:
        for layer in changed:
            del layer.forward


def _may_join(layers: list[nn.Module | None]) -> bool:
    """True for different plain layers of one input width and dtype, all with a bias or none, whose memory may be moved."""
    if not all(type(layer) is nn.Linear and is_plain_linear(layer) for layer in layers) or len({*layers}) < len(layers):
        return False
    weights: list[Any] = [layer.weight for layer in layers]  # type: ignore[union-attr]
    biases: list[Any] = [layer.bias for layer in layers]  # type: ignore[union-attr]
    return (
        len({(weight.dtype, weight.shape[1]) for weight in weights}) == 1
        and len({bias is None for bias in biases}) == 1
        and all(_lie_joined(tensors) or all(map(_is_movable, tensors)) for tensors in _present(weights, biases))
    )


def _present(weights: list[Any], biases: list[Any]) -> list[list[Any]]:
    return [weights] if biases[0] is None else [weights, biases]


def _is_movable(tensor: Tensor) -> bool:
    """True if the tensor is all of its memory, which no other process sees: moving it frees that memory."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return whole and tensor.is_contiguous() and not tensor.is_shared() and not tensor.is_inference()


def _lie_joined(tensors: list[Tensor]) -> bool:
    """True if contiguous tensors lie behind each other in one memory."""
    first, end = tensors[0].untyped_storage().data_ptr(), tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != first or tensor.data_ptr() != end or not tensor.is_contiguous():
            return False
        end += tensor.numel() * tensor.element_size()
    return True


def _joined(tensors: list[Tensor]) -> Tensor:
    """The tensors as one, along the first dimension; those that lie apart are moved."""
    if not _lie_joined(tensors):
        joined = torch.cat([tensor.detach() for tensor in tensors])
        for tensor, part in zip(tensors, joined.split([len(tensor) for tensor in tensors]), strict=True):
            tensor.data = part
    first = tensors[0].detach()
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


class _Product(local):
    """The product that a thread computed last: the input, and a part for each layer that has not asked yet."""

    input: Tensor | None = None
    parts: tuple[Tensor, ...] = ()


def _join(layers: list[nn.Linear], when: Callable[[], bool]) -> list[nn.Linear]:
    """Moves the weights of a group if need be and replaces the forward of its layers."""
    weight = _joined([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else _joined([layer.bias for layer in layers])
    sizes, most, dtype = [layer.out_features for layer in layers], MAX_FEW_ROWS * weight.shape[1], weight.dtype
    tensors = [(layer._parameters, name, tensor, tensor.data_ptr()) for layer in layers
               for name, tensor in layer._parameters.items() if tensor is not None]  # fmt: skip
    product, last = _Product(), len(layers) - 1

    def is_as_joined() -> bool:
        return all(
            parameters.get(name) is tensor and tensor.data_ptr() == place for parameters, name, tensor, place in tensors
        )

    def first_forward(alone: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(input: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return alone(input)
            few = input.numel() <= most and input.dtype is dtype and input.is_cpu
            if few and not torch.is_grad_enabled() and is_as_joined() and when():
                product.parts = _op(input, weight, bias).split(sizes, dim=-1)
                product.input = input
                return product.parts[0]
            return alone(input)

        return forward

    def later_forward(index: int, alone: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(input: Tensor) -> Tensor:
            if torch.compiler.is_compiling() or product.input is not input:
                return alone(input)
            part = product.parts[index]
            if index == last:
                product.input, product.parts = None, ()
            return part

        return forward

    for index, layer in enumerate(layers):
        alone = few_rows_forward(layer, when)
        forward = later_forward(index, alone) if index else first_forward(alone)
        layer.forward = forward  # type: ignore[method-assign, assignment]
    return layers
