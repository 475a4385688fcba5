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
    """Attention of all passes on windows of so many rows in the first: ``attend`` of the head's calls, one pass after the
    other."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self._kept: dict[int, list[tuple[Any, Any]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int = -1, **more: Any) -> Tensor:
        """As a ``PackedModel`` takes it; each window's rows are those of the pass before but its last."""
        assert not more, "heads have no other options"
        kept = self._kept.setdefault(layer, [])
        lengths = [length - len(kept) for length in self._lengths]
        kept.append((k.split(lengths), v.split(lengths)))
        parts = [
            self._one(rows, [(keys[at], values[at]) for keys, values in kept], window)
            for at, rows in enumerate(q.split(lengths))
        ]
        return torch.cat(parts)

    def _one(self, q: Tensor, kept: list[tuple[Tensor, Tensor]], window: int) -> Tensor:
        """Of one window's rows, and the keys and values of its passes so far."""
        count, groups = len(q), q.shape[1] // kept[0][0].shape[1]
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


def passes(head: Eagle3Head, embedded: Tensor, taps: Tensor, lengths: Sequence[int], count: int) -> list[Tensor]:
    """The rows in front of the output layer of pass k = 1, 2, …, of each window so many as it has tokens but k.

    Args:
        embedded: ``[T, d]``, embeddings of all windows' tokens, one window after the other.
        taps: ``[T, taps, d]``, the model's states.
        lengths: of the windows.
    """
    attend, rows, states = PassAttention([length - 1 for length in lengths]), [], head.take(taps)
    for k in range(1, count + 1):
        states = torch.cat([part[:-1] for part in states.split([length - k + 1 for length in lengths])])
        tokens = torch.cat([part[k:] for part in embedded.split(list(lengths))])
        positions = torch.cat([torch.arange(k - 1, length - 1, device=embedded.device) for length in lengths])
        out, states = head(tokens, states, positions, attend)
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
        windows = self.windows(step)
        mine = [(self._starts[text] + first, end - first) for text, first, end in windows if text in self._starts]
        self.tokens += sum(end - first for _, first, end in windows)
        if not mine:
            return 0 * head.fc.weight.sum()
        lengths = [length for _, length in mine]
        self.ranks.did("rows", sum(lengths))
        rows = torch.cat([torch.arange(start, start + length) for start, length in mine])
        with torch.no_grad():
            embedded = self._embeddings(self._hidden.tokens[rows].long().to(device)).float()
        taps = torch.stack([self._hidden.after[int(tap)][rows] for tap in head.taps], 1).to(device, torch.float32)
        with self.part("passes"), torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32):
            drafted = torch.cat(passes(head, embedded, taps, lengths, settings.unroll)).to(table.dtype)
        weights, teachers = [], []
        for k in range(1, settings.unroll + 1):
            for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
                teachers.append(torch.arange(start + k, start + length, device=device))
                weight = settings.decay ** (k - 1) / whole / (length - k) / settings.batch
                weights.append(torch.full((length - k,), weight, device=device))
        with self.part("loss"):
            return distillation_loss(
                [drafted],
                [table],
                torch.cat(weights),
                teacher_rows=self._hidden.final[rows].to(device, table.dtype),
                teacher=torch.cat(teachers),
            )
