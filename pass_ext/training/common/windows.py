"""Windows that a training step reads, from the model's samples and from documents, and random anchors in them.

Everything is drawn from (seed, step) alone, so a resumed run reads what an uninterrupted one would.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pass_ext.training.common.documents import Document
from pass_ext.training.common.own_texts import Sample
from pass_ext.training.common.run import Run, Texts

_MOST_DRAWS = 1000  # for one text; pieces that are too short are rare where there is anything to learn


def even_places(places: Tensor, most: int) -> Tensor:
    """``most`` of the places, evenly spread with both ends, or all where they are fewer; there must be some."""
    return places[torch.linspace(0, len(places) - 1, min(most, len(places))).long()]


@dataclass(frozen=True)
class Window:
    """Texts ``ids`` [B, T], padded on the right with 0 where short, and anchors [B, A] that stay clear of the padding."""

    ids: Tensor
    anchors: Tensor


@dataclass(frozen=True)
class Windows:
    """Draws the windows of each step; ``share`` is the part that comes from the samples, when there are documents too."""

    tokenizer: Any
    documents: Sequence[Document]
    samples: Sequence[Sample]
    share: float
    length: int
    batch: int
    anchors: int
    lookahead: int
    seed: int

    def __post_init__(self) -> None:
        if not self.documents and not self._long_samples:
            few = f"no sample of {len(self.samples)} has" if self.samples else "there are no samples with"
            raise SystemExit(f"nothing to train on: --data gave no training text and {few} {self._fewest}")

    @cached_property
    def _long_samples(self) -> list[Sample]:
        return [sample for sample in self.samples if len(sample.ids) >= self.lookahead + 2]

    @property
    def _fewest(self) -> str:
        return f"--lookahead + 2 = {self.lookahead + 2} tokens"

    def at(self, step: int) -> Window:
        """The windows of one step."""
        chooser = random.Random(f"{self.seed} {step}")
        texts = [self._text(chooser) for _ in range(self.batch)]
        longest = max(map(len, texts))
        ids = torch.zeros(len(texts), longest, dtype=torch.long)
        anchors = torch.empty(len(texts), self.anchors, dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            places = range(len(text) - 1 - self.lookahead)
            few = len(places) < self.anchors
            chosen = chooser.choices(places, k=self.anchors) if few else chooser.sample(places, self.anchors)
            anchors[row] = torch.tensor(sorted(chosen))
        return Window(ids, anchors)

    def _text(self, chooser: random.Random) -> list[int]:
        for _ in range(_MOST_DRAWS):
            ids = self._drawn(chooser)
            if len(ids) >= self.lookahead + 2:
                return ids
        raise SystemExit(
            f"nothing to train on: {_MOST_DRAWS} windows in a row were shorter than {self._fewest}; --length is {self.length}"
        )

    def _drawn(self, chooser: random.Random) -> list[int]:
        samples = self._long_samples
        if samples and (not self.documents or chooser.random() < self.share):
            ids = chooser.choices(samples, weights=[len(sample.ids) for sample in samples])[0].ids
            start = chooser.randrange(len(ids) - self.length + 1) if len(ids) > self.length else 0
            return ids[start : start + self.length]
        document = chooser.choices(self.documents, weights=[len(document.text) for document in self.documents])[0]
        place = chooser.randrange(len(document.text))
        start = document.text.rfind("\n", 0, place) + 1
        # Six letters a token are more than any tokenizer's mean, so the piece seldom falls short of the window.
        piece = document.text[start : start + 6 * self.length]
        return list(self.tokenizer(piece, add_special_tokens=False).input_ids[: self.length])


def windows_of(run: Run, texts: Texts, *, batch: int, anchors: int, lookahead: int) -> Windows:
    """The windows of a run whose command has --sample-share and --length."""
    options = run.options
    return Windows(
        run.tokenizer,
        texts.documents,
        texts.samples,
        options.sample_share,
        options.length,
        batch,
        anchors,
        lookahead,
        options.seed,
    )
