"""``python -m pass_ext train``: its options, what they must satisfy, and the loading of model and text for ``pipeline``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch

from pass_ext.training.common.options import (
    add_text_arguments,
    check_least,
    check_packages,
    check_text_arguments,
    read_texts,
)

AT_LEAST = {
    **dict.fromkeys(("lookahead", "steps", "batch", "anchors", "sample_tokens"), 1),
    **dict.fromkeys(("evaluation_anchors", "checkpoint_every"), 1),
    **dict.fromkeys(("continuations", "own_chats", "held_out", "transition_rank", "warm_up", "minutes"), 0),
    **dict.fromkeys(("learning_rate", "transition_learning_rate", "deep_learning_rate", "decay", "clip"), 0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add_text_arguments(parser)
    add = parser.add_argument
    add("--sample-share", type=float, default=0.75, help="part of the training windows that is sampled text")
    add("--lookahead", type=int, default=4, help="L, the number of slots")
    add("--transition-rank", type=int, default=0, help="width of the transition score; 0: none")
    add("--deep", action="store_true", help="a vector for every layer and slot beside the input embeddings")
    add("--steps", type=int, default=1000)
    add("--batch", type=int, default=2, help="texts a step")
    add("--length", type=int, default=256, help="tokens a text")
    add("--anchors", type=int, default=48, help="look-ahead groups a text")
    add("--loss", choices=("kl", "cross-entropy"), default="kl")
    add("--decay", type=float, default=0.8, help="weight of slot i: decay^i")
    add("--learning-rate", type=float, default=0.01)
    add("--transition-learning-rate", type=float, default=0.003)
    add("--deep-learning-rate", type=float, default=0.01)
    add("--warm-up", type=int, default=20, help="steps")
    add("--clip", type=float, default=1.0, help="largest gradient norm of a parameter")
    add("--seed", type=int, default=0)
    add("--minutes", type=float, default=0, help="stop after this long, with a checkpoint; 0: never")
    add("--evaluation-anchors", type=int, default=64, help="places a held-out text")
    add("--checkpoint-every", type=int, default=50, help="steps")
    add("--device", default="cpu")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the frozen model; on most CPUs float32 is faster",
    )
    add("--name", default="lookahead", help="of the result: NAME.safetensors, .json, .md and .svg in --out")


def check_arguments(options: argparse.Namespace) -> None:
    """Says what cannot be done before anything is loaded."""
    check_least(options, AT_LEAST)
    if options.length < options.lookahead + 2:
        raise SystemExit(f"--length must be at least --lookahead + 2 = {options.lookahead + 2}, got {options.length}")
    if not 0 <= options.sample_share <= 1:
        raise SystemExit(f"--sample-share must lie between 0 and 1, got {options.sample_share}")
    check_text_arguments(options)


def run(options: argparse.Namespace, command: Sequence[str]) -> Path:
    """Trains and evaluates; the path of the safetensors file."""
    check_arguments(options)
    check_packages()
    from rich.console import Console

    from pass_ext.training.common.frozen_model import load_frozen
    from pass_ext.training.lookahead.pipeline import train

    console = Console(highlight=False)
    documents, instructions = read_texts(options)
    model, tokenizer = load_frozen(options.model, getattr(torch, options.dtype))
    return train(options, shlex.join(command), model.to(options.device), tokenizer, documents, instructions, console)
