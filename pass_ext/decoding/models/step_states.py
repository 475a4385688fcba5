"""``StepStates``: the states of a call's requests, which the layers that keep one read in the order of their calls."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pass_ext.ops.convolution import convolution_tree
from pass_ext.ops.recurrent import RecurrentUpdate, recurrent_tree

Update = RecurrentUpdate | Tensor


class StatePlace(NamedTuple):
    """Where transformers' cache keeps a state, and how it lies there."""

    layer: int
    form: Literal["window", "inputs", "tokens", "plain", "transposed", "channels"]
    """"window": the last K inputs of a convolution, one more than here; "inputs": as many as here; "tokens": ids ``[B, n]``.
    Recurrent states are "plain", as here, "transposed" ``[B, H, dv, dk]``, or of "channels" ``[B, dv, dk]``, one head's."""
    number: int = 0
    """Among the layer's windows, inputs and tokens."""
    zero: int = 0
    """The token that is 0 here; ``zero`` tokens are before a text."""

    @property
    def is_convolution(self) -> bool:
        """transformers keeps it among its states of convolutions."""
        return self.form in ("window", "inputs", "tokens")

    def to_theirs(self, state: Tensor) -> Tensor:
        """A state of ours as transformers keeps it."""
        if self.form == "window":
            return functional.pad(state, (1, 0))  # its oldest input is never read
        if self.form == "inputs":
            return state
        if self.form == "tokens":
            return state[:, 0].long() + self.zero
        if self.form == "channels":
            state = state[:, 0]
        return state if self.form == "plain" else state.transpose(-1, -2)

    def to_ours(self, state: Tensor) -> Tensor:
        """A state of transformers' as it lies here."""
        if self.form == "window":
            return state[..., 1:]
        if self.form == "inputs":
            return state
        if self.form == "tokens":
            return (state - self.zero).float()[:, None]
        if self.form == "channels":
            state = state[:, None]
        return (state if self.form == "plain" else state.transpose(-1, -2)).float()


class StepStates:
    """The states of one call.

    Args:
        states: one of each layer or convolution, ``[B, ...]`` over all requests; a first call appends zeros.
        places: of the states; a session's first call appends them.
        is_first: no call has made the states yet.
        is_prompt: the rows are of prompts, which some layers treat otherwise than steps.
        requests, parents, cu_nodes: of the call's trees.

    Attributes:
        updates: of the states so far, for ``state_commit_``.
    """

    def __init__(
        self,
        states: list[Tensor],
        places: list[StatePlace],
        requests: int,
        parents: Tensor,
        cu_nodes: Tensor,
        *,
        is_first: bool,
        is_prompt: bool,
    ) -> None:
        self.is_prompt = is_prompt
        self.updates: list[Update] = []
        self._states, self._places, self._requests, self._is_first = states, places, requests, is_first
        self._parents, self._cu_nodes = parents, cu_nodes

    @property
    def layers(self) -> set[int]:
        """The layers that have read a state so far."""
        return {place.layer for place in self._places[: len(self.updates)]}

    def convolution(
        self, place: StatePlace, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """x ``[N, C]``, weight ``[C, K]`` -> ``[N, C]``, as ``convolution_tree``."""
        state = self._next(place, (x.shape[1], weight.shape[1] - 1), x)
        self.updates.append(x)
        return convolution_tree(x, weight, bias, state, self._parents, self._cu_nodes, activation=activation)

    def earlier(self, place: StatePlace, x: Tensor, step: int, count: int) -> list[Tensor]:
        """x ``[N, C]`` -> the inputs ``[N, C]`` of the rows ``step`` tokens before each row, 2 step before it … ``count`` of
        them. The state has the last ``count * step`` inputs."""
        state, parts = self._next(place, (x.shape[1], count * step), x), list[Tensor]()
        self.updates.append(x)
        weight = x.new_zeros(x.shape[1], step + 1)
        weight[:, 0] = 1  # of the oldest input
        for held in state.split(step, 2)[::-1]:
            x = convolution_tree(x, weight, None, held, self._parents, self._cu_nodes)
            parts.append(x)
        return parts

    def recurrent(
        self, place: StatePlace, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, **options: Any
    ) -> Tensor:
        """``[N, H, dv]``, as ``recurrent_tree``."""
        state = self._next(place, (v.shape[1], k.shape[2], v.shape[2]), v.new_empty(0, dtype=torch.float32))
        out, update = recurrent_tree(q, k, v, log_decay, beta, state, self._parents, self._cu_nodes, **options)
        self.updates.append(update)
        return out

    def _next(self, place: StatePlace, sizes: tuple[int, ...], like: Tensor) -> Tensor:
        """The next state, for each request of these sizes in the dtype of ``like``."""
        number, shape = len(self.updates), (self._requests, *sizes)
        if self._is_first:
            self._states.append(torch.zeros(shape, dtype=like.dtype, device=like.device))
        elif number == len(self._states):
            raise ValueError(f"a call has more states than {number}, those of the first call or of `past`")
        if number == len(self._places):
            self._places.append(place)
        if self._places[number] != place:
            raise ValueError(
                f"layers must keep their states in one order: expected {self._places[number]}, got {place}"
            )
        state = self._states[number]
        if state.shape != shape or state.dtype != like.dtype:
            raise ValueError(
                f"state {number}, from `past` or a first call, is {state.dtype} {list(state.shape)}, this call has "
                f"{like.dtype} {list(shape)}"
            )
        return state
