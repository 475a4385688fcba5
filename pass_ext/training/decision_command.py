"""``python -m pass_ext train-decision``: its options, what they must satisfy, and the loading for ``decision_pipeline``.

Called by ``pass_ext.__main__``.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from pass_ext.decision import KINDS
from pass_ext.training.command import INSTRUCTIONS, PACKAGES
from pass_ext.training.data import read_documents
from pass_ext.training.decision_draft import check_draft, load_draft
from pass_ext.tree import MOST_ROWS

AT_LEAST = {
    **dict.fromkeys(("texts", "places", "epochs", "batch", "sample_tokens", "evaluation_places", "levels"), 1),
    **dict.fromkeys(("continuations", "own_chats", "held_out", "learning_rate", "draft_cost"), 0),
    "length": 2,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add = parser.add_argument
    add("--model", required=True, help="the target: a GGUF file, or a transformers model folder or name")
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
    add("--out", required=True, help="folder for samples and results; samples that are there are used again")
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
    add("--held-out", type=int, default=32, help="held-out prompts of a kind for the evaluation")
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
    for name, least in AT_LEAST.items():
        if not getattr(options, name) >= least:  # so that nan is refused too
            raise SystemExit(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    check_draft(options.draft)
    if options.length > MOST_ROWS:
        raise SystemExit(f"--length must be at most {MOST_ROWS}, got {options.length}")
    if options.levels * options.evaluation_places > MOST_ROWS // 2:
        raise SystemExit(
            f"--levels times --evaluation-places must be at most {MOST_ROWS // 2}, got "
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
    if not options.data and not options.self_distill and not options.own_chats:
        raise SystemExit("nothing to train on: give --data FILES, --self-distill PROMPTS or --own-chats N")
    if options.continuations and not options.data:
        raise SystemExit("--continuations takes its prefixes from --data, which is not given")
    if options.self_distill and not _instructions_file(options.self_distill).is_file():
        raise SystemExit(f"--self-distill names {options.self_distill!r}, and there is no such file")
    options.name = options.name or f"decision-{options.kind}"


def _threshold(given: str) -> float:
    try:
        threshold = float(given)
    except ValueError:
        threshold = -1.0
    if not 0 <= threshold <= 1:
        raise SystemExit(f"--threshold must be auto or lie between 0 and 1, got {given}")
    return threshold


def _instructions_file(given: str) -> Path:
    return INSTRUCTIONS if given == "shipped" else Path(given)


def run(options: argparse.Namespace, command: Sequence[str]) -> Path:
    """Trains and evaluates; the path of the safetensors file."""
    check_arguments(options)
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise SystemExit(f"training needs {', '.join(missing)}: pip install 'pass_ext[hf,train]'")
    from rich.console import Console

    from pass_ext.training.decision_pipeline import train
    from pass_ext.training.model import load_frozen

    console = Console(highlight=False)
    try:
        documents = read_documents(options.data)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from error
    if options.data and not documents:
        raise SystemExit(f"--data holds no .py, .txt, .md or .rst text: {' '.join(options.data)}")
    prompts = _instructions_file(options.self_distill).read_text() if options.self_distill else ""
    instructions = [line.strip() for line in prompts.splitlines() if line.strip()]
    dtype = getattr(torch, options.dtype)
    model, tokenizer = load_frozen(options.model, dtype)
    model = model.to(options.device)
    draft = load_draft(options.draft, model, tokenizer, dtype)
    if hasattr(draft, "to"):
        draft = draft.to(options.device)
    return train(options, shlex.join(command), model, draft, tokenizer, documents, instructions, console)
