"""``Run``: one call of a training command, with the frozen model and the texts that the module learns from.

documents of --data        a tenth of the files held out, by name
samples                    written by the model itself, sampled once and then read from the folder --out
windows                    what a step reads of both, and random anchors in them, drawn from (seed, step) alone: a resumed run
                           reads what an uninterrupted one would
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pass_ext.training.common.documents import Document, fingerprint, is_held_out
from pass_ext.training.common.frozen_model import (
    check_tokenizer,
    load_frozen,
    opened_ids,
    opening_ids,
    weights_digest,
    with_template,
)
from pass_ext.training.common.logs import Log, open_logs
from pass_ext.training.common.options import check_packages, read_texts
from pass_ext.training.common.own_texts import Batch, Sample, collect, plan_batches
from pass_ext.training.common.ranks import Ranks, local_device
from pass_ext.training.common.server import TextServer
from pass_ext.training.common.steps import Phase

_HELD_OUT = "held out"
_MOST_DRAWS = 1000  # for one text; pieces that are too short are rare where there is anything to learn


class Texts(NamedTuple):
    """Training documents and samples, and the samples that are held out for the evaluation."""

    documents: list[Document]
    samples: list[Sample]
    held_out: list[Sample]
    description: dict[str, str]
    """Counts and digests, for the record."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Options, the command line, the frozen model with its tokenizer, all documents, instructions to answer, and the processes
    that share the work."""

    options: argparse.Namespace
    command: str
    model: Any
    tokenizer: Any
    documents: list[Document]
    instructions: list[str]
    console: Any
    ranks: Ranks = dataclasses.field(default_factory=Ranks)

    @property
    def out(self) -> Path:
        """The folder of checkpoints, samples and results."""
        folder = Path(self.options.out)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def base_model(self) -> str:
        """The model's name, as the trained file keeps it."""
        return Path(self.options.model).name.removesuffix(".gguf")

    @property
    def settings(self) -> dict[str, Any]:
        """Every option with its value, for the record."""
        return {name: value for name, value in vars(self.options).items() if name not in ("command", "least")}

    def logs(self, part: str = "") -> Callable[[int], list[Log]]:
        """What opens the logs of --log, after so many steps, for a part of the run; on the first rank."""
        name = f"{self.options.name}{part}"
        names = self.options.log if self.ranks.is_first else ()
        return lambda step: open_logs(names, self.out, name, self.settings, step)

    def texts(self) -> Texts:
        """All texts; samples that the folder lacks are written now."""
        samples = self._samples()
        held_out = _some_of_each([sample for sample in samples if is_held_out(sample.name)], self.options.held_out)
        training = [sample for sample in samples if not is_held_out(sample.name)]
        documents = [document for document in self.documents if not is_held_out(document.name)]
        return Texts(documents, training, held_out, _description(self.documents, documents, training, held_out))

    def identity(self, texts: Texts, **settings: Any) -> str:
        """A JSON line of all that decides what is kept in the folder: another model, other data or settings differ in it. What
        is held out decides nothing but the evaluation; the number of ranks decides nothing. Ranks that differ in it are
        refused."""
        model = {"model": Path(self.options.model).name, "weights": weights_digest(self.model)}
        data = {name: text for name, text in texts.description.items() if name != _HELD_OUT}
        described = json.dumps({**settings, **model, "dtype": self.options.dtype, "data": data})
        for rank, other in enumerate(self.ranks.gather(described)):
            if other != described:
                raise SystemExit(
                    f"all ranks must have the same model, texts and settings, but rank {rank} differs from {self.ranks.rank}"
                    f"\n  {other}\n  {described}"
                )
        return described

    def planned(self) -> tuple[list[Batch], list[Batch]]:
        """The batches of training and of held-out samples."""
        options = self.options
        return plan_batches(
            self.tokenizer,
            self.documents,
            self.instructions,
            continuations=options.continuations,
            own_chats=options.own_chats,
            held_out=options.held_out,
            prefix_tokens=min(48, options.length // 2),
            seed=options.seed,
            batch=options.sample_batch,
            temperatures=options.sample_temperatures,
        )

    def _samples(self) -> list[Sample]:
        options, (training, held_out) = self.options, self.planned()
        settings = {
            **{"name": Path(options.model).name, "new_tokens": options.sample_tokens},
            **{"seed": options.seed, "ranks": self.ranks},
        }
        samples: dict[tuple[int, ...], Sample] = {}
        server = None
        if options.texts_from:
            how = {"concurrency": options.concurrency, "timeout": options.request_timeout}
            server = TextServer(options.texts_from, self.tokenizer, **how)
        for name, batches, replaces in (("samples", training, False), ("held-out", held_out, True)):
            if batches:
                file = self.out / f"{name}.jsonl"
                written = collect(
                    self.model, self.tokenizer, batches, file, **settings, replaces=replaces, server=server
                )
                started, tokens = time.monotonic(), 0
                with Phase(self.console, f"sampling, batches of {name}", len(batches)) as phase:
                    for batch in written:
                        tokens += _written(batch)
                        phase.advance(1, f"{tokens / (time.monotonic() - started):,.0f} tokens/s")
                        for sample in batch:
                            samples.setdefault(tuple(sample.ids), sample)
        return list(samples.values())


def load_run(options: argparse.Namespace, command: Sequence[str], ranks: Ranks) -> Run:
    """Reads the texts and loads the model; what cannot be done ends the program with a sentence."""
    check_packages()
    from rich.console import Console

    documents, instructions = read_texts(options)
    if not ranks.is_first:
        ranks.first(_nothing)  # a GGUF file is converted once
    model, tokenizer = load_frozen(options.model, getattr(torch, options.dtype), options.model_args)
    check_tokenizer(model, tokenizer)
    documents = [with_template(tokenizer, document) for document in documents]
    if ranks.is_first:
        ranks.first(_nothing)
    options.device = local_device(options.device)
    if hasattr(model, "hf_device_map"):  # transformers has placed it
        options.device = str(model.get_input_embeddings().weight.device)
    else:
        model = model.to(options.device)
    console = Console(highlight=False, quiet=not ranks.is_first)
    return Run(options, shlex.join(command), model, tokenizer, documents, instructions, console, ranks)


def _nothing() -> None:
    return


def _description(
    documents: list[Document], texts: list[Document], samples: list[Sample], held_out: list[Sample]
) -> dict[str, str]:
    return {
        "documents": f"{len(texts)} ({sum(len(document.text) for document in texts):,} characters), SHA-256 "
        f"{fingerprint(texts)}",
        "own samples": f"{len(samples)} ({_written(samples):,} tokens), SHA-256 {_digest(samples)}",
        _HELD_OUT: f"{len(documents) - len(texts)} documents and {len(held_out)} samples "
        f"({_written(held_out):,} tokens), by the SHA-256 of their names",
    }


def _some_of_each(samples: list[Sample], most: int) -> list[Sample]:
    """The first ``most`` samples of each kind and temperature."""
    seen: Counter[tuple[str, float]] = Counter()
    kept = []
    for sample in samples:
        seen[sample.kind, sample.temperature] += 1
        if seen[sample.kind, sample.temperature] <= most:
            kept.append(sample)
    return kept


def _written(samples: list[Sample]) -> int:
    return sum(len(sample.ids) - sample.prompt_tokens for sample in samples)


def _digest(samples: list[Sample]) -> str:
    fields = [vars(sample) for sample in samples]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def even_places(places: Tensor, most: int) -> Tensor:
    """``most`` of the places, evenly spread with both ends, or all where they are fewer; there must be some."""
    return places[torch.linspace(0, len(places) - 1, min(most, len(places))).long()]


@dataclass(frozen=True)
class Window:
    """Texts ``ids`` [B, T], padded on the right with 0 where short, and anchors [B, A] that stay clear of the padding."""

    ids: Tensor
    anchors: Tensor

    def share(self, ranks: Ranks) -> Window:
        """What this rank reads of it: every so many-th text; where ranks are more than texts, anchors of one text."""
        rank, count, texts = ranks.rank, ranks.count, len(self.ids)
        readers = len(range(rank % texts, count, texts))  # of the same text
        rows = slice(rank % texts, None, count)
        return Window(self.ids[rows], self.anchors[rows, rank // texts :: max(readers, 1)])


def document_window(tokenizer: Any, documents: Sequence[Document], length: int, chooser: random.Random) -> list[int]:
    """At most ``length`` tokens from the beginning of a line, documents being drawn by their length."""
    text = chooser.choices(documents, weights=[len(document.text) for document in documents])[0].text
    start = text.rfind("\n", 0, chooser.randrange(len(text))) + 1
    # Six letters a token are more than any tokenizer's mean, so the piece seldom falls short of the window.
    return opened_ids(tokenizer, text[start : start + 6 * length], length)


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

    @cached_property
    def _sample_ends(self) -> list[int]:
        """Where each of the samples ends, one after the other: a sample is drawn by its length."""
        return list(accumulate(len(sample.ids) for sample in self._long_samples))

    @cached_property
    def _opening(self) -> list[int]:
        return opening_ids(self.tokenizer)

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
            ids = chooser.choices(samples, cum_weights=self._sample_ends)[0].ids
            start = chooser.randrange(len(ids) - self.length + 1) if len(ids) > self.length else 0
            piece = ids[start : start + self.length]
            return [*self._opening, *piece[len(self._opening) :]] if start else piece
        return document_window(self.tokenizer, self.documents, self.length, chooser)


def windows_of(run: Run, texts: Texts, *, batch: int, anchors: int, lookahead: int) -> Windows:
    """The windows of a run whose command has --sample-share and --length."""
    share, length, seed = run.options.sample_share, run.options.length, run.options.seed
    return Windows(run.tokenizer, texts.documents, texts.samples, share, length, batch, anchors, lookahead, seed)
