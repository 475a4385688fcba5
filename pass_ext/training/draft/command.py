"""``python -m pass_ext train-draft``: its options, and what they must satisfy."""

from __future__ import annotations

import argparse

from pass_ext.training.common import options as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    shared.add_text_arguments(parser)
    add = shared.adder(parser)
    add(
        "--document-tokens",
        type=int,
        least=0,
        default=100_000,
        metavar="N",
        help="tokens of --data that are read, beside the samples",
    )
    add(
        "--layers",
        type=int,
        nargs="+",
        default=[4],
        metavar="K",
        help="the draft leaves the model after layer K; of several, that with the best expected speed is kept",
    )
    add("--rank", type=int, least=1, default=128, help="width of the adapter, of 2·d·rank parameters")
    add(
        "--vocabulary",
        type=int,
        least=0,
        default=8192,
        metavar="S",
        help="the draft's head is computed for the S most frequent tokens of the training text; 0: for all",
    )
    add("--steps", type=int, least=1, default=1000, help="for each K")
    add("--batch", type=int, least=1, default=512, help="rows a step")
    add("--length", type=int, least=1, default=256, help="tokens a window")
    add("--learning-rate", type=float, least=0, default=0.003)
    add("--weight-decay", type=float, least=0, default=0.01)
    add("--warm-up", type=int, least=0, default=20, help="steps")
    add("--clip", type=float, least=0, default=1.0, help="largest gradient norm")
    shared.add_run_arguments(parser, name="exit")


def check_arguments(options: argparse.Namespace) -> None:
    """Says what cannot be done before anything is loaded."""
    shared.check_least(options)
    shared.check_text_arguments(options)
