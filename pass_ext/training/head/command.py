"""``python -m pass_ext train-head``: its options, and what they must satisfy."""

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
        "--taps",
        type=int,
        nargs=3,
        metavar="K",
        help="the layers whose inputs the head reads; default: half of the model's, the last but two, and the last",
    )
    add(
        "--vocabulary",
        type=int,
        least=0,
        default=8192,
        metavar="S",
        help="the head drafts the S most frequent tokens of the training text; 0: all",
    )
    add("--inner", type=int, least=0, default=0, metavar="D", help="width of its MLP; 0: the model's")
    add("--unroll", type=int, least=1, default=3, metavar="N", help="drafts that a row writes from its own states")
    add("--decay", type=float, least=0, default=0.8, help="weight of a draft's loss against that of the draft above it")
    add("--steps", type=int, least=1, default=1000)
    add("--batch", type=int, least=1, default=4, help="windows a step")
    add("--length", type=int, least=1, default=256, help="tokens a window")
    add("--learning-rate", type=float, least=0, default=0.002, help="Muon's, as that of AdamW counts")
    add("--weight-decay", type=float, least=0, default=0.0)
    add("--warm-up", type=int, least=0, default=20, help="steps")
    add("--clip", type=float, least=0, default=1.0, help="largest gradient norm")
    add(
        "--time-budget",
        type=float,
        least=0,
        default=0,
        metavar="MINUTES",
        help="end after so many minutes of steps, at most --steps, the learning rate being zero by then; 0: after --steps",
    )
    add(
        "--step-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the products in training steps; the head's own numbers are float32. bfloat16 is faster where the processor "
        "has such products (a GPU, AVX-512 BF16, AMX)",
    )
    shared.add_run_arguments(parser, name="model")


def check_arguments(options: argparse.Namespace) -> None:
    """Says what cannot be done before anything is loaded."""
    shared.check_least(options)
    shared.check_text_arguments(options)
    if options.length <= options.unroll + 1:
        raise SystemExit(
            f"--length must be more than --unroll + 1, got {options.length} and {options.unroll}: a window of so few tokens "
            "has no row for the last draft"
        )
