"""``python -m pass_ext train``: its options, and what they must satisfy."""

from __future__ import annotations

import argparse

from pass_ext.ops.adapter import MAX_RANK
from pass_ext.training.common import options as shared
from pass_ext.training.common.config import PRESETS

KINDS = ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    shared.adder(parser)("--preset", help=f"options that go together: {', '.join(PRESETS)}")
    shared.add_text_arguments(parser)
    shared.add_sample_share(parser, "windows")
    add = shared.adder(parser)
    add("--lookahead", type=int, least=1, default=4, help="L, the number of slots")
    add("--transition-rank", type=int, least=0, default=0, help="width of the transition score; 0: none")
    add(
        "--deep",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="a vector for every layer and slot beside the input embeddings",
    )
    add(
        "--adapter-rank",
        type=int,
        least=0,
        default=0,
        help="rank of adapters that slots' rows have in linear layers; 0: none",
    )
    add("--adapter-kinds", nargs="+", choices=KINDS, metavar="KIND", help=f"of {', '.join(KINDS)}; default: all")
    add(
        "--adapter-by-slot",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="adapters for each slot, not shared by all",
    )
    add("--start", metavar="FILE", help="begin with these embeddings: a file, or a name that comes with the package")
    add("--steps", type=int, least=1, default=1000)
    add("--batch", type=int, least=1, default=2, help="texts a step")
    add("--length", type=int, default=256, help="tokens a text")
    add("--anchors", type=int, least=1, default=48, help="look-ahead groups a text")
    add("--loss", choices=("kl", "total-variation", "cross-entropy"), default="kl")
    add("--loss-temperature", type=float, default=1.0, help="compare both distributions at this temperature")
    add("--decay", type=float, least=0, default=0.8, help="weight of slot i: decay^i")
    add("--slot-weights", type=float, nargs="+", default=(), metavar="W", help="one weight a slot, instead of --decay")
    add(
        "--curriculum",
        type=int,
        least=0,
        default=0,
        help="steps in which slots join one by one; 0: all from the start",
    )
    add("--learning-rate", type=float, least=0, default=0.01)
    add("--transition-learning-rate", type=float, least=0, default=0.003)
    add("--deep-learning-rate", type=float, least=0, default=0.01)
    add("--adapter-learning-rate", type=float, least=0, default=0.001)
    add("--warm-up", type=int, least=0, default=20, help="steps")
    add("--clip", type=float, least=0, default=1.0, help="largest gradient norm of a parameter")
    add("--dry-run", action="store_true", help="print the plan, with times and memory of two steps, and write nothing")
    add(
        "--time-budget",
        type=float,
        least=0,
        default=0,
        metavar="MINUTES",
        help="end after so many minutes of steps, at most --steps, the learning rate being zero by then; 0: after --steps",
    )
    add("--minutes", type=float, least=0, default=0, help="stop after this long, with a checkpoint; 0: never")
    add(
        "--patience",
        type=int,
        least=0,
        default=0,
        help="end when so many evaluations in a row were below the best, and keep the best parameters; 0: never",
    )
    add("--evaluate-every", type=int, least=1, default=250, help="steps between the evaluations of --patience")
    add("--evaluation-anchors", type=int, least=1, default=64, help="places a held-out text")
    add("--checkpoint-every", type=int, least=1, default=50, help="steps")
    shared.add_run_arguments(parser, name="lookahead")
    add(
        "--fsdp",
        action="store_true",
        help="divide the layers of the frozen model among the ranks of torchrun, for one that fits no GPU",
    )
    add(
        "--step-dtype",
        choices=("float32", "bfloat16"),
        help="of the frozen model in training steps, after its samples; default: --dtype. A CPU may write samples faster in "
        "bfloat16 and take steps faster in float32",
    )


def check_arguments(options: argparse.Namespace) -> None:
    """Says what cannot be done before anything is loaded."""
    shared.check_least(options)
    if options.length < options.lookahead + 2:
        raise SystemExit(f"--length must be at least --lookahead + 2 = {options.lookahead + 2}, got {options.length}")
    weights = options.slot_weights
    if weights and (len(weights) != options.lookahead or not all(0 < weight < float("inf") for weight in weights)):
        raise SystemExit(f"--slot-weights must be {options.lookahead} numbers above 0, one a slot, got {list(weights)}")
    if not 0 < options.loss_temperature < float("inf"):
        raise SystemExit(f"--loss-temperature must be above 0, got {options.loss_temperature}")
    if not options.adapter_rank and (options.adapter_kinds or options.adapter_by_slot):
        raise SystemExit("--adapter-kinds and --adapter-by-slot need --adapter-rank, got 0")
    if options.adapter_rank > MAX_RANK:
        raise SystemExit(f"--adapter-rank must be at most {MAX_RANK}, got {options.adapter_rank}")
    shared.check_sample_share(options)
    shared.check_text_arguments(options)
