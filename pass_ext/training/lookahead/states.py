"""Layers that keep a state, in training: a text is a chain without gradients, and each group of slots continues the state after
its anchor, differentiably.

With S the state after the anchor and G_i the sum of a group's log decays up to slot i, the group's outputs are

    u_i = beta_i (v_i - (e^G_i S)^T k_i - sum over j < i of (k_i e^(G_i - G_j) k_j) u_j)    additive: u_i = beta_i v_i
    o_i = scale ((e^G_i S)^T q_i + sum over j <= i of (q_i e^(G_i - G_j) k_j) u_j)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pass_ext.decoding.models.features.states import serve_states
from pass_ext.decoding.models.features.table import first
from pass_ext.decoding.models.layer_kinds import keeps_states
from pass_ext.decoding.models.shadow import OurCall, our_call, shadow_of
from pass_ext.decoding.models.step_states import StatePlace, StepStates
from pass_ext.ops.state import state_commit_
from pass_ext.training.common.frozen_model import text_rows
from pass_ext.tree import MAX_TREE_NODES


def with_states(model: Any, length: int) -> Any:
    """The model itself if all its layers attend; else its shadow, in which layers that keep a state call functions of ours, and
    no cache holds their states.

    length: the most tokens of a text and rows of its slots, together.
    """
    reason = first(lambda feature: feature.untrained(model, length))
    if reason is not None:
        raise SystemExit(f"slots cannot be trained for {model.config.model_type}: {reason}")
    if not keeps_states(model.config.get_text_config(decoder=True)):
        return model
    shadow = shadow_of(model)
    for part in serve_states(shadow):
        part.forward = partial(_without_cache, part.forward)
    return shadow


def _without_cache(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    from transformers import Cache

    shown = [None if isinstance(value, Cache) else value for value in inputs]
    return forward(*shown, **{name: None if isinstance(value, Cache) else value for name, value in named.items()})


class _Attend:
    """What the functions find the states of a call by."""

    def __init__(self, states: Any) -> None:
        self.states = states


# ---- texts ----


@dataclass
class TextPast:
    """One text that was read: the cache of its attention, and what its states' updates were."""

    cache: Any
    states: list[Tensor]
    """All zero: before the first token."""
    updates: list[Any]
    length: int

    def at(self, anchors: Tensor) -> list[Tensor]:
        """The states after each anchor ``[A]``: ``[A, ...]`` of each place."""
        now, bounds = [state.clone() for state in self.states], anchors.new_tensor([0, self.length], dtype=torch.int32)
        kept: dict[int, list[Tensor]] = {}
        done = 0
        for anchor in sorted(set(anchors.tolist())):
            path = torch.arange(done, anchor + 1, dtype=torch.int32, device=anchors.device)[None]
            if path.shape[1]:
                state_commit_(now, self.updates, bounds, path, bounds.new_tensor([path.shape[1] - 1]))
            kept[anchor], done = [state[0].clone() for state in now], anchor + 1
        return [torch.stack(states) for states in zip(*(kept[anchor] for anchor in anchors.tolist()), strict=True)]


def read_text(model: Any, ids: Tensor) -> tuple[Tensor, TextPast]:
    """Last hidden states ``[1, T, d]`` of a text ``[1, T]``, without gradients, and its past."""
    length, device = ids.shape[1], ids.device
    if length > MAX_TREE_NODES:
        raise SystemExit(
            f"--length must be at most {MAX_TREE_NODES} for a model with layers that keep a state, got {length}"
        )
    parents = torch.arange(-1, length - 1, dtype=torch.int32, device=device)
    states: list[Tensor] = []
    step = StepStates(states, [], 1, parents, parents.new_tensor([0, length]), is_first=True, is_prompt=True)
    with our_call(OurCall(_Attend(step))):
        hidden, cache = text_rows(model, ids)
    return hidden, TextPast(cache, states, step.updates, length)


# ---- groups of slots ----


class GroupStates:
    """The states of a call whose rows are groups of L slots, each after an anchor: ``[A, ...]`` of each place, in order."""

    is_prompt = False

    def __init__(self, states: list[Tensor], slots: int) -> None:
        self._states, self._slots = iter(states), slots

    def convolution(
        self, place: StatePlace, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """As ``StepStates``, with gradients."""
        window = next(self._states)
        inputs = torch.cat([window.to(x.dtype), x.unflatten(0, (-1, self._slots)).transpose(1, 2)], 2)
        out = functional.conv1d(inputs, weight[:, None], bias, groups=len(weight)).transpose(1, 2).flatten(0, 1)
        return functional.silu(out) if activation == "silu" else out

    def recurrent(
        self, place: StatePlace, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, **options: Any
    ) -> Tensor:
        """As ``StepStates``, with gradients."""
        q, k, v, log_decay = (x.unflatten(0, (-1, self._slots)) for x in (q, k, v, log_decay))
        beta = None if beta is None else beta.unflatten(0, (-1, self._slots))
        return group_outputs(q, k, v, log_decay, beta, next(self._states), **options).flatten(0, 1)


def of_groups(past: TextPast, anchors: Tensor, slots: int) -> Any:
    """The context of a call whose rows are groups of slots after the anchors ``[A]``."""
    return our_call(OurCall(_Attend(GroupStates(past.at(anchors), slots))))


def group_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    *,
    form: str = "delta",
    scale: float = 1.0,
    decay_rates: Tensor | None = None,
) -> Tensor:
    """``[A, L, H, dv]`` of A chains of L nodes, each from its own state ``[A, H, dk, dv]``; the other arguments are those of
    ``recurrent_tree`` with ``[A, L]`` in place of ``[N]``."""
    heads, length = v.shape[2], v.shape[1]
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q * scale, k))
    if decay_rates is not None:
        logs = log_decay[:, :, :, None] * decay_rates
    else:
        logs = log_decay[..., None, None] if log_decay.dim() == 3 else log_decay[..., None]
    sums = logs.cumsum(1)  # [A, L, H, 1 or dk, 1 or dv]
    is_above = torch.ones(length, length, dtype=torch.bool, device=v.device).tril()
    between = (sums[:, :, None] - sums[:, None]).masked_fill(~is_above[..., None, None, None], -torch.inf).exp()
    begin = sums.exp() * state[:, None]

    def weights(rows: Tensor) -> Tensor:
        """``[A, L, L, H, 1 or dv]``: of u_j in the output of row i."""
        return ((rows[:, :, None] * k[:, None])[..., None] * between).sum(-2)

    base, seen = torch.einsum("alhcd,alhc->alhd", begin, k), weights(k)
    updates: list[Tensor] = []
    for i in range(length):
        value = v[:, i]
        if form == "delta":
            value = (
                value - base[:, i] - sum((seen[:, i, j] * u for j, u in enumerate(updates)), torch.zeros_like(value))
            )
        updates.append(value if beta is None else beta[:, i, :, None] * value)
    u = torch.stack(updates, 1)
    return torch.einsum("alhcd,alhc->alhd", begin, q) + (weights(q) * u[:, None]).sum(2)
