"""``python -m pass_ext train``: its options, and what they must satisfy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pass_ext.training.common import options as shared

AT_LEAST = {
    **dict.fromkeys(("lookahead", "steps", "batch", "anchors", "evaluation_anchors", "checkpoint_every"), 1),
    **dict.fromkeys(("transition_rank", "warm_up", "minutes"), 0),
    **dict.fromkeys(("learning_rate", "transition_learning_rate", "deep_learning_rate", "decay", "clip"), 0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    shared.add_text_arguments(parser)
    shared.add_sample_share(parser, "windows")
    add = parser.add_argument
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
    add("--minutes", type=float, default=0, help="stop after this long, with a checkpoint; 0: never")
    add("--evaluation-anchors", type=int, default=64, help="places a held-out text")
    add("--checkpoint-every", type=int, default=50, help="steps")
    shared.add_run_arguments(parser, name="lookahead")


def check_arguments(options: argparse.Namespace) -> None:
    """Says what cannot be done before anything is loaded."""
    shared.check_least(options, AT_LEAST)
    if options.length < options.lookahead + 2:
        raise SystemExit(f"--length must be at least --lookahead + 2 = {options.lookahead + 2}, got {options.length}")
    shared.check_sample_share(options)
    shared.check_text_arguments(options)


def run(options: argparse.Namespace, command: Sequence[str]) -> Path:
    """Trains and evaluates; the path of the safetensors file."""
    check_arguments(options)
    from pass_ext.training.common.run import load_run
    from pass_ext.training.lookahead.pipeline import train

    return train(load_run(options, command))
