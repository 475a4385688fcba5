"""``python -m pass_ext train-decision``: its options, what they must satisfy, and the loading for ``decision_pipeline``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch

from pass_ext.modules.decision import KINDS
from pass_ext.training.common.options import (
    add_text_arguments,
    check_least,
    check_packages,
    check_text_arguments,
    read_texts,
)
from pass_ext.training.decision.which_draft import check_draft, load_draft
from pass_ext.tree import MAX_TREE_NODES

AT_LEAST = {
    **dict.fromkeys(("texts", "places", "epochs", "batch", "sample_tokens", "evaluation_places", "levels"), 1),
    **dict.fromkeys(("continuations", "own_chats", "held_out", "learning_rate", "draft_cost"), 0),
    "length": 2,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add_text_arguments(parser)
    add = parser.add_argument
    add(
        "--draft",
        required=True,
        help="a model like --model, or exit:LAYERS or exit:NAME_OR_FILE, the target's first layers without or with an adapter",
    )
    add(
        "--kind",
        choices=KINDS,
        required=True,
        help="what it reads: the input of the draft's output layer, or entropy and top-10 probabilities of its law",
    )
    add("--sample-share", type=float, default=0.75, help="part of the training texts that is sampled")
    add("--texts", type=int, default=400, help="training texts")
    add("--length", type=int, default=256, help="tokens a text")
    add("--places", type=int, default=48, help="places a text that are learnt from")
    add(
        "--temperature",
        type=float,
        help="of the laws whose acceptance the hidden kind foretells; default 1; 0: of greedy drafts",
    )
    add("--epochs", type=int, default=10)
    add("--batch", type=int, default=256, help="places a step")
    add("--learning-rate", type=float, default=0.001)
    add(
        "--threshold",
        default="0.4",
        help="drafting goes on above it; auto: the fastest on chains drafted from training text, by --draft-cost",
    )
    add("--draft-cost", type=float, default=0.25, help="time of a draft call, a call of the target being 1")
    add("--levels", type=int, default=4, help="of the chains that the evaluation drafts")
    add("--seed", type=int, default=0)
    add("--evaluation-places", type=int, default=32, help="places a held-out text")
    add("--device", default="cpu")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of both models; on most CPUs float32 is faster",
    )
    add("--name", help="of the result: NAME.safetensors, .json, .md and .svg in --out; default: decision-KIND")


def check_arguments(options: argparse.Namespace) -> None:
    """Says what cannot be done before anything is loaded, and settles what was left open."""
    check_least(options, AT_LEAST)
    check_draft(options.draft)
    if options.length > MAX_TREE_NODES:
        raise SystemExit(f"--length must be at most {MAX_TREE_NODES}, got {options.length}")
    if options.levels * options.evaluation_places > MAX_TREE_NODES // 2:
        raise SystemExit(
            f"--levels times --evaluation-places must be at most {MAX_TREE_NODES // 2}, got "
            f"{options.levels} · {options.evaluation_places}"
        )
    if not 0 <= options.sample_share <= 1:
        raise SystemExit(f"--sample-share must lie between 0 and 1, got {options.sample_share}")
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
    check_text_arguments(options)
    options.name = options.name or f"decision-{options.kind}"


def _threshold(given: str) -> float:
    try:
        threshold = float(given)
    except ValueError:
        threshold = -1.0
    if not 0 <= threshold <= 1:
        raise SystemExit(f"--threshold must be auto or lie between 0 and 1, got {given}")
    return threshold


def run(options: argparse.Namespace, command: Sequence[str]) -> Path:
    """Trains and evaluates; the path of the safetensors file."""
    check_arguments(options)
    check_packages()
    from rich.console import Console

    from pass_ext.training.common.frozen_model import load_frozen
    from pass_ext.training.decision.pipeline import train

    console = Console(highlight=False)
    documents, instructions = read_texts(options)
    dtype = getattr(torch, options.dtype)
    model, tokenizer = load_frozen(options.model, dtype)
    model = model.to(options.device)
    draft = load_draft(options.draft, model, tokenizer, dtype)
    if hasattr(draft, "to"):
        draft = draft.to(options.device)
    return train(options, shlex.join(command), model, draft, tokenizer, documents, instructions, console)
