"""``Run``: one call of a training command, with the frozen model and the texts that the module learns from.

documents of --data        a tenth of the files held out, by name
samples                    written by the model itself, sampled once and then read from the folder --out
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pass_ext.training.common.documents import Document, fingerprint, is_held_out
from pass_ext.training.common.frozen_model import load_frozen, weights_digest
from pass_ext.training.common.options import check_packages, read_texts
from pass_ext.training.common.own_texts import Sample, collect, plan_batches
from pass_ext.training.common.steps import watched

_HELD_OUT = "held out"


class Texts(NamedTuple):
    """Training documents and samples, and the samples that are held out for the evaluation."""

    documents: list[Document]
    samples: list[Sample]
    held_out: list[Sample]
    description: dict[str, str]
    """Counts and digests, for the record."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Options, the command line, the frozen model with its tokenizer, all documents, and instructions to answer."""

    options: argparse.Namespace
    command: str
    model: Any
    tokenizer: Any
    documents: list[Document]
    instructions: list[str]
    console: Any

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

    def texts(self) -> Texts:
        """All texts; samples that the folder lacks are written now."""
        samples = self._samples()
        held_out = [sample for sample in samples if is_held_out(sample.name)]
        training = [sample for sample in samples if not is_held_out(sample.name)]
        documents = [document for document in self.documents if not is_held_out(document.name)]
        return Texts(documents, training, held_out, _description(self.documents, documents, training, held_out))

    def identity(self, texts: Texts, **settings: Any) -> str:
        """A JSON line of all that decides what is kept in the folder: another model, other data or settings differ in it. What
        is held out decides nothing but the evaluation."""
        model = {"model": Path(self.options.model).name, "weights": weights_digest(self.model)}
        data = {name: text for name, text in texts.description.items() if name != _HELD_OUT}
        return json.dumps({**settings, **model, "dtype": self.options.dtype, "data": data})

    def _samples(self) -> list[Sample]:
        options = self.options
        training, held_out = plan_batches(
            self.tokenizer,
            self.documents,
            self.instructions,
            continuations=options.continuations,
            own_chats=options.own_chats,
            held_out=options.held_out,
            prefix_tokens=min(48, options.length // 2),
            seed=options.seed,
        )
        settings = {"name": Path(options.model).name, "new_tokens": options.sample_tokens, "seed": options.seed}
        samples: list[Sample] = []
        for name, batches, replaces in (("samples", training, False), ("held-out", held_out, True)):
            if batches:
                file = self.out / f"{name}.jsonl"
                written = collect(self.model, self.tokenizer, batches, file, **settings, replaces=replaces)
                for batch in watched(self.console, f"sampling, batches of {name}", written, len(batches)):
                    samples += batch
        return samples


def load_run(options: argparse.Namespace, command: Sequence[str]) -> Run:
    """Reads the texts and loads the model; what cannot be done ends the program with a sentence."""
    check_packages()
    from rich.console import Console

    documents, instructions = read_texts(options)
    model, tokenizer = load_frozen(options.model, getattr(torch, options.dtype))
    console = Console(highlight=False)
    return Run(options, shlex.join(command), model.to(options.device), tokenizer, documents, instructions, console)


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


def _written(samples: list[Sample]) -> int:
    return sum(len(sample.ids) - sample.prompt_tokens for sample in samples)


def _digest(samples: list[Sample]) -> str:
    fields = [dataclasses.asdict(sample) for sample in samples]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
