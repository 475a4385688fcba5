"""The optimisation of an EAGLE-3 head, which learns to draft from its own states: Muon on its matrices.

    pass 1   row j: the model's states of token j, and token j + 1                -> its state s_1[j]
    pass k   row j: s_{k-1}[j], and token j + k; it sees rows 0 … j of pass 1 and row j of the passes between, as a draft does
    loss     sum over k of decay^(k-1) · mean over j of KL(the model's law after token j + k || the head's)

Laws are over the head's vocabulary, normalised within it. The frozen model has run over all text before: ``Hidden``. The
windows of a step depend on the seed and its number alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.drafting.heads.eagle3 import Eagle3Head
from pass_ext.training.common.loss import distillation_loss
from pass_ext.training.common.ranks import Ranks
from pass_ext.training.common.steps import Trainer, rate_at
from pass_ext.training.draft.loop import Hidden


class PassAttention:
    """Attention of all passes on one window: ``attend`` of the head's calls, one pass after the other."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int = -1, **more: Any) -> Tensor:
        """As a ``PackedModel`` takes it; rows ``[N, …]`` are the first N of the pass before."""
        assert not more, "heads have no other options"
        kept = self._kept.setdefault(layer, [])
        kept.append((k, v))
        count, groups = len(q), q.shape[1] // k.shape[1]
        first, *later = ([x[:count].repeat_interleave(groups, 1) for x in pair] for pair in kept)
        scores = torch.einsum("ihd,jhd->hij", q, first[0])
        rows = torch.arange(count, device=q.device)
        distances = rows[:, None] - rows
        hidden = distances < 0
        if window >= 0:
            hidden |= distances + len(later) >= window
        scores = scores.masked_fill(hidden, -torch.inf)
        own = [torch.einsum("ihd,ihd->hi", q, keys) for keys, _ in later]
        weights = (torch.cat([scores, *(each[..., None] for each in own)], -1) * q.shape[-1] ** -0.5).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", weights[..., :count], first[1])
        for number, (_, values) in enumerate(later):
            out = out + weights[..., count + number].T[..., None] * values
        return out


def passes(head: Eagle3Head, embedded: Tensor, taps: Tensor, count: int) -> list[Tensor]:
    """The rows ``[T - k, d]`` in front of the output layer of pass k = 1, 2, … on a window.

    Args:
        embedded: ``[T, d]``, embeddings of its tokens.
        taps: ``[T, taps, d]``, the model's states.
    """
    attend, rows, states = PassAttention(), [], head.take(taps)
    for k in range(1, count + 1):
        length = len(embedded) - k
        positions = torch.arange(k - 1, length + k - 1, device=embedded.device)
        out, states = head(embedded[k:], states[:length], positions, attend)
        rows.append(out)
    return rows


@dataclass(frozen=True)
class HeadSettings:
    """What decides the result of a run, beside the data."""

    steps: int
    batch: int
    length: int
    unroll: int
    decay: float
    learning_rate: float
    weight_decay: float
    warm_up: int
    clip: float
    seed: int
    step_dtype: str
    time_budget: float


class HeadTrainer(Trainer):
    """Trains the matrices of ``head`` in place on ``hidden``, this rank's share of the texts. Norms and the output layer, which
    is the model's, stay; the model lends its embeddings.

    lengths: of all ranks' texts.
    """

    def __init__(
        self,
        model: Any,
        head: Eagle3Head,
        hidden: Hidden,
        settings: HeadSettings,
        ranks: Ranks | None = None,
        lengths: Sequence[int] = (),
    ) -> None:
        for name, weight in head.named_parameters():
            weight.requires_grad_(weight.dim() == 2 and name != "lm_head.weight")
        super().__init__(
            head,
            torch.optim.Muon(
                [weight for weight in head.parameters() if weight.requires_grad],
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            steps=settings.steps,
            schedule=lambda step: rate_at(step, self.expected_steps(step), settings.warm_up),
            clip=settings.clip,
            ranks=ranks,
            time_budget=settings.time_budget,
        )
        self.head, self._hidden, self._settings, self._lengths = head, hidden, settings, list(lengths)
        mine = list(self.ranks.share_of(range(len(self._lengths))))
        starts = accumulate((self._lengths[text] for text in mine), initial=0)
        self._starts = dict(zip(mine, starts, strict=False))
        """Where this rank's texts begin among its rows."""
        self._embeddings = model.get_input_embeddings()
        self._dtype = getattr(torch, settings.step_dtype)
        weight = model.get_output_embeddings().weight.detach()
        self._table = weight if head.tokens is None else weight[head.tokens]
        self._long = [text for text, length in enumerate(self._lengths) if length > settings.unroll + 1]
        if not self._long:
            raise SystemExit(f"no training text is longer than --unroll + 1, {settings.unroll + 1} tokens")

    def windows(self, step: int) -> list[tuple[int, int, int]]:
        """The windows of a step: a text, and the first token and the end; texts are drawn by their length."""
        chooser = random.Random(f"{self._settings.seed} {step}")
        found = []
        for text in chooser.choices(self._long, [self._lengths[text] for text in self._long], k=self._settings.batch):
            first = chooser.randint(0, max(0, self._lengths[text] - self._settings.length))
            found.append((text, first, min(first + self._settings.length, self._lengths[text])))
        return found

    def loss(self, step: int) -> Tensor:
        """The loss of those of one step's windows that this rank has."""
        settings, head, table = self._settings, self.head, self._table
        device, whole = table.device, sum(settings.decay**k for k in range(settings.unroll))
        drafted, weights, final, teachers, count = [], [], [], [], 0
        for text, first, end in self.windows(step):
            self.tokens += end - first
            if text not in self._starts:
                continue
            rows = slice(self._starts[text] + first, self._starts[text] + end)
            self.ranks.did("rows", end - first)
            with torch.no_grad():
                embedded = self._embeddings(self._hidden.tokens[rows].long().to(device)).float()
            taps = torch.stack([self._hidden.after[int(tap)][rows] for tap in head.taps], 1).to(device, torch.float32)
            with self.part("passes"), torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32):
                drafted += [out.to(table.dtype) for out in passes(head, embedded, taps, settings.unroll)]
            for k in range(1, settings.unroll + 1):
                teachers.append(torch.arange(count + k, count + end - first, device=device))
                weight = settings.decay ** (k - 1) / whole / len(teachers[-1]) / settings.batch
                weights.append(torch.full((len(teachers[-1]),), weight, device=device))
            final.append(self._hidden.final[rows].to(device, table.dtype))
            count += end - first
        if not drafted:
            return 0 * head.fc.weight.sum()
        with self.part("loss"):
            return distillation_loss(
                [torch.cat(drafted)],
                [table],
                torch.cat(weights),
                teacher_rows=torch.cat(final),
                teacher=torch.cat(teachers),
            )
