"""A training step of look-ahead embeddings: Adam on their parameters alone, the model frozen.

Two forwards: the texts once, then the look-ahead groups of many anchors at once. Anchor a is a text index; its group is L rows
at positions a + 1 + i that see the text up to a and the group's rows up to their own. Slot i predicts the token at a + 2 + i,
as the ordinary row at a + 1 + i does: that row is its teacher.

loss = sum over slots of w_i * divergence(teacher, slot i), averaged over groups and divided by the sum of w_i

w_i is decay^i, or a number of --slot-weights. With a curriculum the first steps train the first slots alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.models.features.table import attending_layers
from pass_ext.decoding.models.layer_kinds import STATES, keeps_states, kinds_of
from pass_ext.decoding.models.limits import kept_by_cache
from pass_ext.decoding.models.parts import cache_name, decoder_of
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.training.common.frozen_model import text_rows
from pass_ext.training.common.loss import distillation_loss
from pass_ext.training.common.ranks import Ranks
from pass_ext.training.common.run import Window, Windows
from pass_ext.training.common.steps import Trainer, rate_at
from pass_ext.training.lookahead.adapters import adapters_in_training
from pass_ext.training.lookahead.frozen_linears import weights_read_again
from pass_ext.training.lookahead.group_attention import attends_in_groups
from pass_ext.training.lookahead.states import TextPast, of_groups, read_text


def group_mask(
    anchors: Tensor, length: int, slots: int, dtype: torch.dtype, *, window: int = -1, chunk: int = -1
) -> Tensor:
    """The additive mask ``[B, 1, A * L, T + A * L]`` of anchors ``[B, A]``, for layers that see the last ``window`` tokens, or
    those of a row's own ``chunk``; -1: all."""
    batch, count = anchors.shape
    places = torch.arange(length, device=anchors.device)
    text = places <= anchors.repeat_interleave(slots, dim=1)[..., None]
    row = torch.arange(count * slots, device=anchors.device)
    own = (row[:, None] // slots == row // slots) & (row[:, None] >= row)
    allowed = torch.cat([text, own.expand(batch, -1, -1)], dim=2)
    at = (anchors[..., None] + 1 + torch.arange(slots, device=anchors.device)).flatten(1)  # of the rows
    seen = torch.cat([places.expand(batch, -1), at], dim=1)[:, None]
    if window >= 0:
        allowed &= at[..., None] - seen < window
    if chunk >= 0:
        allowed &= at[..., None] // chunk == seen // chunk
    mask = torch.zeros(allowed.shape, dtype=dtype, device=anchors.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def _reaches(text: Any, length: int) -> dict[str, int]:
    """Kind of layers that attend -> how many tokens they see; empty, if all see all of this length."""
    kinds = kinds_of(text) or [""] * text.num_hidden_layers
    seen = {kind: most for kind, most in zip(kinds, kept_by_cache(text), strict=True) if kind not in STATES}
    return seen if any(0 <= most < length for most in seen.values()) else {}


def _masks(seen: dict[str, int], anchors: Tensor, length: int, slots: int, dtype: torch.dtype) -> Any:
    """A decoder's mask; where kinds of layers see more or less of a text, one of each."""
    if not seen:
        return group_mask(anchors, length, slots, dtype)
    masks = {
        kind: group_mask(anchors, length, slots, dtype, **{"chunk" if "chunk" in kind else "window": most})
        for kind, most in seen.items()
    }
    return masks if len(set(seen.values())) > 1 else next(iter(masks.values()))


def read_texts(model: Any, ids: Tensor) -> tuple[Tensor, Any]:
    """Last hidden states ``[B, T, d]`` of texts, and their past for ``slot_rows``."""
    if not keeps_states(model.config.get_text_config(decoder=True)):
        return text_rows(model, ids)
    hidden, pasts = zip(*(read_text(model, text[None]) for text in ids), strict=True)
    return torch.cat(hidden), list(pasts)


def slot_rows(
    model: Any, embedding: LookaheadEmbedding, anchors: Tensor, past: Any, slots: int | None = None
) -> Tensor:
    """Last hidden states ``[B, A, L, d]`` of the slots after ``anchors`` [B, A]; ``past``, of ``read_texts``, grows.

    slots: the first so many slots; None: all.
    """
    if isinstance(past, list):  # text by text
        texts = zip(anchors[:, None], past, strict=True)
        return torch.cat([slot_rows(model, embedding, places, one, slots) for places, one in texts])
    table, slots = model.get_input_embeddings().weight, slots or embedding.num_lookahead
    batch, count = anchors.shape
    states: AbstractContextManager[None] = nullcontext()
    attention: AbstractContextManager[None]
    if isinstance(past, TextPast):
        states, length, past = of_groups(past, anchors[0], slots), past.length, past.cache
    else:
        length = past.get_seq_length()
    decoder, text = decoder_of(model), model.config.get_text_config(decoder=True)
    seen = _reaches(text, length + slots)
    # Where no layer attends, models take the mask for one of padding.
    mask = None if attending_layers(text) == {} else _masks(seen, anchors, length, slots, table.dtype)
    ids = (-1 - torch.arange(slots, device=anchors.device)).repeat(batch, count)
    positions = anchors[..., None] + 1 + torch.arange(slots, device=anchors.device)
    offsets: Sequence[Tensor] = ()
    if embedding.deep is not None:
        # A tensor by layer: the gradient of an index into one tensor of all layers is as large as that tensor.
        offsets = embedding.deep[:, :slots].to(table.dtype).repeat(1, count, 1).unbind()
    attention = nullcontext() if seen else attends_in_groups(decoder, anchors, slots)
    adapters = adapters_in_training(model, embedding.adapters, ids, offsets)
    with adapters, states, attention, weights_read_again(decoder):
        hidden = decoder(
            inputs_embeds=embedding(ids, table),
            position_ids=positions.flatten(1),
            attention_mask=mask,
            use_cache=True,
            **{cache_name(decoder.forward): past},
        ).last_hidden_state
    return hidden.unflatten(1, (count, slots))


def transition_hidden(embedding: LookaheadEmbedding, table: Tensor, previous: Tensor) -> Tensor:
    """``(E[previous] @ left) @ right^T`` ``[..., d]``: its product with a candidate's embedding is the transition score.

    Computed in the parameters' type, given in the table's.
    """
    if embedding.transition_left is None or embedding.transition_right is None:
        raise ValueError("these look-ahead embeddings have no transition score (their rank is 0)")
    known = table[previous].to(embedding.transition_left.dtype)
    return ((known @ embedding.transition_left) @ embedding.transition_right.T).to(table.dtype)


@dataclass(frozen=True)
class Settings:
    """What decides the result of a run, beside the data."""

    steps: int
    learning_rate: float
    transition_learning_rate: float
    deep_learning_rate: float
    warm_up: int
    decay: float
    clip: float
    loss: str  # "kl", "total-variation" or "cross-entropy"
    adapter_learning_rate: float = 0.001
    slot_weights: tuple[float, ...] = ()  # empty: decay^i
    loss_temperature: float = 1.0  # of both distributions that the loss compares
    curriculum: int = 0  # steps in which slots join one after the other; 0: all from the start
    time_budget: float = 0.0  # minutes by whose end the rate has fallen to zero; 0: by the steps alone

    def slots_at(self, step: int, slots: int) -> int:
        """How many of the slots a step trains."""
        return slots if step >= self.curriculum else 1 + step * slots // self.curriculum

    def weights_of(self, slots: int) -> list[float]:
        """The weights of the first slots."""
        return list(self.slot_weights[:slots]) or [self.decay**i for i in range(slots)]


def step_loss(
    model: Any,
    embedding: LookaheadEmbedding,
    window: Window,
    slot_weights: Sequence[float],
    loss: str = "kl",
    temperature: float = 1.0,
    groups: int | None = None,
    part: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> Tensor:
    """The loss of one step's groups, each of as many slots as there are weights; its graph reaches the look-ahead parameters
    only. groups: how many the step has, if the window is one rank's share of them. part: a context around each part, by its
    name."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    slots, (batch, count) = len(slot_weights), window.anchors.shape
    ids, anchors = window.ids.to(table.device), window.anchors.to(table.device)
    # Before the passes: a copy to a GPU waits for the work before it.
    powers = torch.tensor(slot_weights, dtype=torch.float32, device=table.device)
    weights = (powers / powers.sum() / (groups or batch * count)).repeat(batch * count)
    with part("teacher pass"):
        text, past = read_texts(model, ids)
    with part("slots pass"):
        rows = [slot_rows(model, embedding, anchors, past, slots).flatten(0, 2)]
    tables = [head.weight]
    # Slot i stands where the ordinary row at a + 1 + i stands, which is its teacher and whose token precedes the one sought.
    place = anchors[..., None] + 1 + torch.arange(slots, device=anchors.device)
    flat = (place + ids.shape[1] * torch.arange(batch, device=anchors.device)[:, None, None]).flatten()
    if embedding.rank:
        score = transition_hidden(embedding, table, ids.flatten()[flat])
        if head.weight.data_ptr() == table.data_ptr():  # tied: one product for both
            rows = [rows[0] + score]
        else:
            rows, tables = [*rows, score], [*tables, table]
    fixed = {"bias": head.bias, "temperature": temperature}
    with part("loss"):
        if loss == "cross-entropy":
            return distillation_loss(rows, tables, weights, labels=ids.flatten()[flat + 1], **fixed)
        text = text.flatten(0, 1)
        return distillation_loss(rows, tables, weights, teacher_rows=text, teacher=flat, divergence=loss, **fixed)


class LookaheadTrainer(Trainer):
    """Trains ``embedding`` in place beside the frozen model, every parameter at a rate and with a norm of its own."""

    def __init__(
        self,
        model: Any,
        embedding: LookaheadEmbedding,
        windows: Windows,
        settings: Settings,
        ranks: Ranks | None = None,
    ) -> None:
        rates = {
            "weight": settings.learning_rate,
            "transition_left": settings.transition_learning_rate,
            "transition_right": settings.transition_learning_rate,
            "deep": settings.deep_learning_rate,
        }
        named = embedding.named_parameters(recurse=False)
        groups: list[dict[str, Any]] = [{"params": [parameter], "lr": rates[name]} for name, parameter in named]
        if embedding.adapters is not None:  # one group, so that their gradients are clipped together
            parameters = list(embedding.adapters.parameters())
            groups.append({"params": parameters, "lr": settings.adapter_learning_rate})
        super().__init__(
            embedding,
            torch.optim.Adam(groups, betas=(0.9, 0.99)),
            steps=settings.steps,
            schedule=lambda step: rate_at(step, self.expected_steps(step), settings.warm_up),
            clip=settings.clip,
            ranks=ranks,
            time_budget=settings.time_budget,
        )
        self._model, self._embedding, self._windows, self._settings = model, embedding, windows, settings
        self._reader = ThreadPoolExecutor(1)
        self._next: tuple[int, Future[Window]] | None = None

    def loss(self, step: int) -> Tensor:
        """This rank's part of the loss of the windows of this step."""
        with self.part("texts"):
            window, settings = self._window(step), self._settings
        weights = settings.weights_of(settings.slots_at(step, self._embedding.num_lookahead))
        self.tokens += window.ids.numel() + window.anchors.numel() * len(weights)
        share, how = window.share(self.ranks), (settings.loss, settings.loss_temperature, window.anchors.numel())
        self.ranks.did("groups", share.anchors.numel())
        return step_loss(self._model, self._embedding, share, weights, *how, self.part)

    def _window(self, step: int) -> Window:
        """The windows of this step; those of the next one are read while this one is computed."""
        ahead, self._next = self._next, None
        window = ahead[1].result() if ahead is not None and ahead[0] == step else self._windows.at(step)
        if step + 1 < self.steps:
            self._next = step + 1, self._reader.submit(self._windows.at, step + 1)
        return window
