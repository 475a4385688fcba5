"""``python -m pass_ext train-decision``: its options, what they must satisfy, and the draft model that ``--draft`` names.

    PATH or NAME        as --model takes it
    exit:LAYERS         the target's first layers, ``EarlyExitDraft``
    exit:NAME_OR_FILE   the same with its adapter

A name is that of a shipped adapter.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from pass_ext.decoding.models.vocabulary import check_tokenizers
from pass_ext.modules.decision import KINDS
from pass_ext.training.common import options as shared
from pass_ext.training.common.frozen_model import load_frozen
from pass_ext.tree import MAX_TREE_NODES

_EXIT = "exit:"


def check_draft(argument: str) -> None:
    """Refuses what cannot be a draft, before anything is loaded."""
    name = argument.removeprefix(_EXIT)
    if not name:
        raise SystemExit(f"--draft must be a model, exit:LAYERS or exit:NAME_OR_FILE, got {argument!r}")
    if name != argument and name.isdigit() and int(name) < 1:
        raise SystemExit(f"--draft {argument} must leave at least 1 layer")


def load_draft(argument: str, model: Any, tokenizer: Any, dtype: torch.dtype) -> Any:
    """The draft model, in a form that ``packed_model`` takes."""
    if not argument.startswith(_EXIT):
        draft, other = load_frozen(argument, dtype, {})
        try:
            check_tokenizers(tokenizer, other)
        except ValueError as error:
            raise SystemExit(f"--draft {argument!r}: {error}") from error
        return draft
    from pass_ext.decoding.models.early_exit import EarlyExitDraft

    name = argument.removeprefix(_EXIT)
    try:
        return EarlyExitDraft(model, layers=int(name)) if name.isdigit() else EarlyExitDraft(model, adapter=name)
    except (OSError, TypeError, ValueError) as error:
        raise SystemExit(f"--draft {argument!r}: {error}") from error


def draft_name(argument: str) -> str:
    """The draft's name in the file of a decision model: without folders."""
    prefix = _EXIT if argument.startswith(_EXIT) else ""
    return prefix + Path(argument.removeprefix(_EXIT)).name.removesuffix(".gguf").removesuffix(".safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    shared.add_text_arguments(parser)
    add = shared.adder(parser)
    add(
        "--draft",
        required=True,
        help="a model like --model, or exit:LAYERS or exit:NAME_OR_FILE, the target's first layers without or with an adapter",
    )
    add(
        "--kind",
        choices=KINDS,
        required=True,
        help="what it reads: the input of the draft's output layer, or entropy and top-10 probabilities of its distribution",
    )
    shared.add_sample_share(parser, "texts")
    add("--texts", type=int, least=1, default=400, help="training texts")
    add("--length", type=int, least=2, default=256, help="tokens a text")
    add("--places", type=int, least=1, default=48, help="places a text that are learnt from")
    add(
        "--temperature",
        type=float,
        help="of the distributions whose acceptance the hidden kind foretells; 0: of greedy drafts; default: 1, for entropy 0",
    )
    add("--epochs", type=int, least=1, default=10)
    add("--batch", type=int, least=1, default=256, help="places a step")
    add("--learning-rate", type=float, least=0, default=0.001)
    add(
        "--threshold",
        default="0.4",
        help="drafting goes on above it; auto: the fastest on chains drafted from training text, by --draft-cost",
    )
    add("--draft-cost", type=float, least=0, default=0.25, help="time of a draft call, a call of the target being 1")
    add("--levels", type=int, least=1, default=4, help="of the chains that the evaluation drafts")
    add("--evaluation-places", type=int, least=1, default=32, help="places a held-out text")
    shared.add_run_arguments(parser, name="decision-KIND", models="both models")
    parser.set_defaults(name=None)  # check_arguments knows the kind


def check_arguments(options: argparse.Namespace) -> None:
    """Says what cannot be done before anything is loaded, and settles what was left open."""
    shared.check_least(options)
    check_draft(options.draft)
    if options.length > MAX_TREE_NODES:
        raise SystemExit(f"--length must be at most {MAX_TREE_NODES}, got {options.length}")
    if options.levels * options.evaluation_places > MAX_TREE_NODES // 2:
        raise SystemExit(
            f"--levels times --evaluation-places must be at most {MAX_TREE_NODES // 2}, got "
            f"{options.levels} · {options.evaluation_places}"
        )
    shared.check_sample_share(options)
    if options.threshold != "auto":
        options.threshold = _threshold(options.threshold)
    if options.kind == "entropy" and options.temperature not in (None, 0):
        raise SystemExit(
            f"--temperature is for --kind hidden: entropy foretells greedy matches, got {options.temperature}"
        )
    if options.temperature is None:
        options.temperature = 0.0 if options.kind == "entropy" else 1.0
    if not options.temperature >= 0:
        raise SystemExit(f"--temperature must be at least 0, got {options.temperature}")
    shared.check_text_arguments(options)
    options.name = options.name or f"decision-{options.kind}"


def _threshold(text: str) -> float:
    try:
        threshold = float(text)
    except ValueError:
        threshold = -1.0
    if not 0 <= threshold <= 1:
        raise SystemExit(f"--threshold must be auto or lie between 0 and 1, got {text}")
    return threshold
