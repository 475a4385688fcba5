"""Options that the three training commands share: texts, seeds and packages, and reading them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from pass_ext.training.common.documents import Document, read_documents

PACKAGES = ("transformers", "safetensors", "rich", "matplotlib")


INSTRUCTIONS = Path(__file__).parent.parent / "instructions.txt"


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
