"""``DirectCall``: a transformers model's call without its Python, once a call has shown what that Python does.

    logits = head(norm(layer_stack(rows, rotary(rows, positions))))

A call shows it by the tensors that its parts take and return: the rows go to the rotary embedding and the first layer as they
are, the last layer's output to the norm, the norm's to the head, and the head's output is the logits. A model that scales its
rows, or caps its logits, is called as ever. The rotary embedding may be called several times, with the name of a kind of layer
behind rows and positions, as gemma3's is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.packed import Attend
from pass_ext.decoding.models.patching.few_rows import is_plain_linear
from pass_ext.decoding.models.patching.layer_stack import LayerEnds, LayerStack, found_in
from pass_ext.decoding.models.patching.row_attention import OurCall
from pass_ext.decoding.models.patching.step_modules import norm_of
from pass_ext.decoding.models.slots import CallSlots
from pass_ext.tree import MAX_TREE_NODES

_FIXED_ROPES = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings whose frequencies do not depend on the text's length."""


class DirectCall:
    """The parts of a model, and whether nothing else computes in a call.

    Args:
        model: whose norm and head nothing has replaced yet.
        stack: its layers.
    """

    def __init__(self, model: Any, stack: LayerStack) -> None:
        self._stack = stack
        self._parts = _parts_of(model)
        self._is_right: bool | None = None  # None: not yet shown
        # What the rotary embedding takes behind rows and positions, call by call.
        self._kinds: list[tuple[str, ...]] = [()]
        self._table: tuple[Tensor, Tensor] | None = None  # cosines and sines by position
        self._has_table = False

    def end(self) -> None:
        """Behind the last of the generations that share it. A call that showed nothing may not have been one that could."""
        self._table = None
        self._is_right = self._is_right or None

    def run(
        self,
        attend: Attend,
        layers: int | None,
        rows: Tensor,
        positions: Tensor,
        slots: CallSlots | None,
        wanted: Tensor | None,
    ) -> Tensor | None:
        """Logits ``[N or len(wanted), V]``; None: the model must be called."""
        parts = self._parts
        if not self._is_right or parts is None or not self._stack.can_run(attend, layers, rows):
            return None
        if not found_in(attend, self, parts.are_reached):
            return None
        ends = LayerEnds(parts.norm_weight, parts.head_weight, wanted)
        if not self._has_table:
            cos, sin = self._rotated(rows, positions)
            return self._stack.run(attend, layers, rows, cos, sin, None, slots, ends)
        cos, sin = self._rotations(rows, positions)
        return self._stack.run(attend, layers, rows, cos, sin, positions, slots, ends)

    @contextmanager
    def watched(self, call: OurCall, rows: Tensor, positions: Tensor) -> Iterator[Callable[[Tensor], None]]:
        """A call of the model inside, after which the function that is given must get its logits ``[N, V]``."""
        parts = self._parts
        form = self._stack.norm_form(call.layers)
        if (
            self._is_right is not None
            or parts is None
            or parts.norm_form != form
            or not parts.are_reached()
            or not self._stack.can_run(call.attend, call.layers, rows)
        ):
            yield lambda logits: None
            return
        flow: list[_Step] = []
        former = rows.clone()

        def check(logits: Tensor) -> None:
            kinds = self._shown_kinds(flow, _Value(rows, former), positions, logits)
            self._is_right = kinds is not None
            if kinds is not None:
                self._kinds = kinds
                self._has_table = self._is_in_table(rows, positions)

        with ExitStack() as hooks:
            for name in ("rotary", "norm", "head"):
                hooks.callback(getattr(parts, name).register_forward_hook(_noting(flow, name), with_kwargs=True).remove)
            yield check

    def _shown_kinds(
        self, flow: list[_Step], rows: _Value, positions: Tensor, logits: Tensor
    ) -> list[tuple[str, ...]] | None:
        """What the rotary embedding takes behind rows and positions, call by call; None if the call has not shown that nothing
        else computes in it."""
        names = [step.part for step in flow]
        if names != [*["rotary"] * (len(flow) - 2), "norm", "head"] or self._stack.ends is None:
            return None
        *rotary, norm, head = flow
        first_input, rotations, last_output = self._stack.ends
        calls = [step for rotation in rotations for step in rotary if step.output is rotation]
        kinds = [step.inputs[2:] for step in calls]
        is_shown = (
            len(calls) == len(rotations)
            and all(_is_rotary_call(step, rows, positions) for step in calls)
            and len({cos.shape for cos, _ in rotations}) == 1
            and all(map(torch.equal, self._rotated(rows.tensor, positions, kinds), _joined(rotations)))
            and rows.is_in(first_input)
            and norm.inputs[0] is last_output
            and norm.value().is_in(head.inputs[0])
            and head.value().is_in(logits)
        )
        return kinds if is_shown else None

    def _is_in_table(self, rows: Tensor, positions: Tensor) -> bool:
        """True if the rotary embedding of positions does not depend on which others are computed beside them."""
        types = None if self._parts is None else getattr(self._parts.rotary, "rope_type", None)
        if not set(types.values() if isinstance(types, dict) else [types]) <= _FIXED_ROPES:
            return False
        known, given = self._rotations(rows, positions), self._rotated(rows, positions)
        return all(torch.equal(table[..., positions, :], part) for table, part in zip(known, given, strict=True))

    def _rotations(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions up to these and beyond: twice as many where they outgrow the table."""
        table, length = self._table, int(positions.max()) + 1
        if table is None or table[0].shape[-2] < length:
            longer = torch.arange(max(2 * length, MAX_TREE_NODES), device=rows.device)
            table = self._table = self._rotated(rows, longer)  # another thread may put a shorter one in its place
        return table

    def _rotated(
        self, rows: Tensor, positions: Tensor, kinds: list[tuple[str, ...]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines at these positions, as ``layer_stack`` takes them. kinds: None: those that were shown."""
        assert self._parts is not None
        kinds = self._kinds if kinds is None else kinds
        return _joined([self._parts.rotary(rows[None], positions[None], *kind) for kind in kinds])


def _joined(rotations: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Cosines ``[1, N, D']`` and sines of each kind of layer as one ``[N, D']``, or ``[K, N, D']``."""
    if len(rotations) == 1:
        cos, sin = rotations[0]
        return cos[0], sin[0]
    all_cos, all_sin = zip(*rotations, strict=True)
    return torch.cat(all_cos), torch.cat(all_sin)


def _is_rotary_call(step: _Step, rows: _Value, positions: Tensor) -> bool:
    """True if the rotary embedding was called with the rows, their positions and nothing else but names."""
    if len(step.inputs) < 2:
        return False
    given, places, *kind = step.inputs
    is_at_positions = isinstance(places, Tensor) and torch.equal(places[0], positions)
    return is_at_positions and rows.is_in(given) and all(isinstance(name, str) for name in kind)


class _Parts(NamedTuple):
    """The modules of a call."""

    norm_weight: Tensor
    norm_form: tuple[float, int]
    """eps and form."""
    head_weight: Tensor
    rotary: nn.Module
    norm: nn.Module
    head: nn.Module
    decoder: nn.Module
    model: nn.Module

    def are_reached(self) -> bool:
        """True if no hook, no other forward and no other weight has come to the modules since."""
        return (
            not any(part._forward_hooks or part._forward_pre_hooks for part in self[3:])
            and not any("forward" in part.__dict__ for part in (self.decoder, self.model))
            and self.norm._parameters.get("weight") is self.norm_weight
            and self.head._parameters.get("weight") is self.head_weight
        )


def _parts_of(model: Any) -> _Parts | None:
    """The parts by their names; None if the model has others."""
    if not all(hasattr(model, name) for name in ("get_decoder", "get_output_embeddings")):
        return None
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    rotary, norm = getattr(decoder, "rotary_emb", None), getattr(decoder, "norm", None)
    if not isinstance(rotary, nn.Module) or not isinstance(norm, nn.Module) or "forward" in vars(norm):
        return None
    known = norm_of(norm)
    if known is None or not is_plain_linear(head) or head._parameters["bias"] is not None:
        return None
    return _Parts(known.weight, (known.eps, known.form), head.weight, rotary, norm, head, decoder, model)


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
