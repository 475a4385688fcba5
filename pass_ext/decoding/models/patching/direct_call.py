"""``DirectCall``: a transformers model's call without its Python, once a call has shown what that Python does.

    logits = head(norm(layer_stack(rows, rotary(rows, positions))))

A call shows it by the tensors that its parts take and return: the rows go to the rotary embedding and the first layer as they
are, the last layer's output to the norm, the norm's to the head, and the head's output is the logits. A model that scales its
rows, or caps its logits, is called as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.patching.layer_stack import LayerStack
from pass_ext.decoding.models.patching.row_attention import OurCall


class DirectCall:
    """The parts of a model, and whether nothing else computes in a call.

    Args:
        model: attached.
        stack: its layers.
    """

    def __init__(self, model: Any, stack: LayerStack) -> None:
        self._stack = stack
        self._parts = _parts_of(model)
        self._is_right: bool | None = None  # None: not yet shown

    def run(self, call: OurCall, rows: Tensor, positions: Tensor, wanted: Tensor | None) -> Tensor | None:
        """Logits ``[N or len(wanted), V]``; None: the model must be called."""
        parts = self._parts
        if not self._is_right or parts is None or not parts.are_reached() or not self._stack.is_ready(call, rows):
            return None
        x = rows[None]
        hidden = self._stack.run(call, x, parts.rotary(x, positions[None]))
        if hidden is None:
            return None
        hidden = parts.norm(hidden)
        logits: Tensor = parts.head(hidden if wanted is None else hidden[:, wanted])
        return logits[0]

    @contextmanager
    def watched(self, call: OurCall, rows: Tensor, positions: Tensor) -> Iterator[Callable[[Tensor], None]]:
        """A call of the model inside, after which the function that is given must get its logits ``[N, V]``."""
        parts = self._parts
        if self._is_right is not None or parts is None or not parts.are_reached() or not self._stack.is_ready(call, rows):
            yield lambda logits: None
            return
        flow: list[_Step] = []
        former = rows.clone()

        def check(logits: Tensor) -> None:
            self._is_right = self._is_shown(flow, _Value(rows, former), positions, logits)

        with ExitStack() as hooks:
            for name in ("rotary", "norm", "head"):
                hooks.callback(getattr(parts, name).register_forward_hook(_noting(flow, name), with_kwargs=True).remove)
            yield check

    def _is_shown(self, flow: list[_Step], rows: _Value, positions: Tensor, logits: Tensor) -> bool:
        if [step.part for step in flow] != ["rotary", "norm", "head"] or self._stack.ends is None:
            return False
        rotary, norm, head = flow
        first_input, rotation, last_output = self._stack.ends
        places = rotary.inputs[1] if len(rotary.inputs) == 2 else None
        return (
            rows.is_in(rotary.inputs[0])
            and rows.is_in(first_input)
            and isinstance(places, Tensor)
            and torch.equal(places[0], positions)
            and rotation is rotary.output
            and norm.inputs[0] is last_output
            and norm.value().is_in(head.inputs[0])
            and head.value().is_in(logits)
        )


class _Parts(NamedTuple):
    """The modules that ``DirectCall`` calls, and those that it does not."""

    rotary: nn.Module
    norm: nn.Module
    head: nn.Module
    outer: tuple[nn.Module, ...]
    """The model and its decoder."""

    def are_reached(self) -> bool:
        """True if no hook and no other forward has come to the outer modules."""
        return not any(
            part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__ for part in self.outer
        )


def _parts_of(model: Any) -> _Parts | None:
    """The parts by their names; None if the model has others."""
    if not all(hasattr(model, name) for name in ("get_decoder", "get_output_embeddings")):
        return None
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    rotary, norm = getattr(decoder, "rotary_emb", None), getattr(decoder, "norm", None)
    if not all(isinstance(part, nn.Module) for part in (rotary, norm, head)):
        return None
    return _Parts(rotary, norm, head, (model, decoder))


class _Value(NamedTuple):
    """A tensor, and a copy of its numbers from when it was made."""

    tensor: Tensor
    numbers: Tensor

    def is_in(self, other: Any) -> bool:
        """True if the other tensor is this one, but for a dimension of 1 in front, and no number has changed."""
        if not isinstance(other, Tensor) or other.numel() != self.numbers.numel():
            return False
        return other.data_ptr() == self.tensor.data_ptr() and torch.equal(other.view_as(self.numbers), self.numbers)


class _Step(NamedTuple):
    """A part's call."""

    part: str
    inputs: tuple[Any, ...]
    output: Any
    numbers: Any
    """A copy of the output, if it is a tensor."""

    def value(self) -> _Value:
        return _Value(self.output, self.numbers)


def _noting(flow: list[_Step], part: str) -> Any:
    """A forward hook that notes the part's call."""

    def hook(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        numbers = output.clone() if isinstance(output, Tensor) else None
        flow.append(_Step(part, (*inputs, *named.values()), output, numbers))

    return hook
