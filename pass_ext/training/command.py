"""``python -m pass_ext train``: its options, what they must satisfy, and the loading of model and text for ``pipeline``.

Called by ``pass_ext.__main__``.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from pass_ext.training.data import Document, read_documents

PACKAGES = ("transformers", "safetensors", "rich", "matplotlib")
INSTRUCTIONS = Path(__file__).parent / "instructions.txt"
AT_LEAST = {
    **dict.fromkeys(("lookahead", "steps", "batch", "anchors", "sample_tokens"), 1),
    **dict.fromkeys(("evaluation_anchors", "checkpoint_every"), 1),
    **dict.fromkeys(("continuations", "own_chats", "held_out", "transition_rank", "warm_up", "minutes"), 0),
    **dict.fromkeys(("learning_rate", "transition_learning_rate", "deep_learning_rate", "decay", "clip"), 0),
}


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that every training command has: the model, the folder, and the text."""
    add = parser.add_argument
    add("--model", required=True, help="a GGUF file, or a transformers model folder or name; it stays as it is")
    add("--out", required=True, help="folder for checkpoints, samples and results; a run that stopped goes on from it")
    add(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH",
        help="files or folders of .py, .txt, .md, .rst text; stdlib: Python's own",
    )
    add(
        "--self-distill",
        metavar="PROMPTS",
        help="a file of instructions, one a line, that the model answers; shipped: the one that comes along",
    )
    add("--continuations", type=int, default=0, metavar="N", help="prefixes from --data that the model continues")
    add("--own-chats", type=int, default=0, metavar="N", help="chats of which the model writes both sides")
    add("--sample-tokens", type=int, default=208, help="tokens sampled behind a prompt at most")
    add(
        "--held-out",
        type=int,
        default=32,
        help="held-out prompts of a kind that the model continues for the evaluation",
    )


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


def check_least(options: argparse.Namespace, least: Mapping[str, float]) -> None:
    """Refuses numbers below these."""
    for name, smallest in least.items():
        if not getattr(options, name) >= smallest:  # so that nan is refused too
            raise SystemExit(f"--{name.replace('_', '-')} must be at least {smallest}, got {getattr(options, name)}")


def check_packages() -> None:
    """Names what has to be installed, before minutes of work end without it."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise SystemExit(f"training needs {', '.join(missing)}: pip install 'pass_ext[hf,train]'")


def check_text_arguments(options: argparse.Namespace) -> None:
    """The part of it that ``add_text_arguments`` asks for."""
    if not options.data and not options.self_distill and not options.own_chats:
        raise SystemExit("nothing to train on: give --data FILES, --self-distill PROMPTS or --own-chats N")
    if options.continuations and not options.data:
        raise SystemExit("--continuations takes its prefixes from --data, which is not given")
    if options.self_distill and not _instructions_file(options.self_distill).is_file():
        raise SystemExit(f"--self-distill names {options.self_distill!r}, and there is no such file")


def _instructions_file(given: str) -> Path:
    return INSTRUCTIONS if given == "shipped" else Path(given)


def run(options: argparse.Namespace, command: Sequence[str]) -> Path:
    """Trains and evaluates; the path of the safetensors file."""
    check_arguments(options)
    check_packages()
    from rich.console import Console

    from pass_ext.training.model import load_frozen
    from pass_ext.training.pipeline import train

    console = Console(highlight=False)
    documents, instructions = read_texts(options)
    model, tokenizer = load_frozen(options.model, getattr(torch, options.dtype))
    return train(options, shlex.join(command), model.to(options.device), tokenizer, documents, instructions, console)


def read_texts(options: argparse.Namespace) -> tuple[list[Document], list[str]]:
    """The documents of --data and the instructions of --self-distill."""
    try:
        documents = read_documents(options.data)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from error
    if options.data and not documents:
        raise SystemExit(f"--data holds no .py, .txt, .md or .rst text: {' '.join(options.data)}")
    prompts = _instructions_file(options.self_distill).read_text() if options.self_distill else ""
    return documents, [line.strip() for line in prompts.splitlines() if line.strip()]
