"""How well chances foresee which candidates are right where the target draws by known noise: the reason of core/next_tree.h.
    z           = s / T - ln E, s the scores of a slot's offered tokens with transitions, E the exponential noise of the target
    chance      = softmax(z / f) or softmax(s), times the share of all tokens that the offered ones have
    log loss    = mean of -ln(chance), or of -ln(1 - chance) where the candidate is wrong, of the three best candidates by z
The places are those of the model's own texts, at temperature 0.8, behind the held-out prompts of `benchmarks.decoding`.
`python -m benchmarks.pages.lookahead.raced_chances --model MODEL FILE` writes raced_chances.json and raced_chances.md in the
machine's folder of results; `--check` compares the pages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pass_ext
from benchmarks.decoding.prompts import DOMAINS, read_prompts
from benchmarks.harness import machine
from benchmarks.harness.markdown import table
from benchmarks.pages import by_machine
from pass_ext.checkpoint import load_checkpoint
from pass_ext.reference.common.noise import Purpose, exponentials
from pass_ext.training.common.frozen_model import text_rows
from pass_ext.training.lookahead.forward import slot_rows, transition_hidden

TEMPERATURE, OFFERED, CANDIDATES = 0.8, 64, 3
FLATTENED = (1.0, 1.2, 1.5, 2.0, 2.5)
LEAST = 1e-4  # a chance counts as at least this, and at most one less it


class Place(NamedTuple):
    """What a slot offers at a place."""

    scores: Tensor
    raced: Tensor
    mass: float
    right: Tensor
    """For each offered token whether the model drew it."""


def places_of(model: Any, embedding: Any, ids: Tensor, prompt: int, seed: int) -> Iterator[Place]:
    """Every slot behind every place of a text that the model wrote behind so many tokens, by this seed."""
    table_, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    slots = embedding.num_lookahead
    anchors = torch.arange(prompt - 2, len(ids) - 2 - slots)
    _, past = text_rows(model, ids[None])
    hidden = slot_rows(model, embedding, anchors[None], deepcopy(past))[0]
    for anchor, rows in zip(anchors.tolist(), hidden, strict=True):
        for slot in range(slots):
            position = anchor + 2 + slot
            offered = head(rows[slot]).float().log_softmax(-1).topk(min(OFFERED, head.out_features))
            before = transition_hidden(embedding, table_, ids[position - 1 : position])
            scores = (offered.values + (before @ table_[offered.indices].T).float()[0]).double()
            raced = raced_scores(scores, offered.indices, seed, position, head.out_features)
            yield Place(scores, raced, offered.values.exp().sum().item(), offered.indices == ids[position])


def raced_scores(scores: Tensor, tokens: Tensor, seed: int, position: int, vocabulary: int) -> Tensor:
    """z: the scores of some tokens in the race that draws the token at a position."""
    return scores / TEMPERATURE - exponentials(seed, position, Purpose.coupled, vocabulary)[tokens].log()


def log_loss(places: list[Place], flattened: float | None) -> float:
    """The log loss of chances of the race's scores, so much flattened; None: of the slots' probabilities."""
    total = 0.0
    for place in places:
        scores = place.scores if flattened is None else place.raced / flattened
        chances = (scores.softmax(0) * place.mass).clamp(LEAST, 1 - LEAST)
        for best in place.raced.topk(CANDIDATES).indices:
            total -= (chances[best] if place.right[best] else 1 - chances[best]).log().item()
    return total / (CANDIDATES * len(places))


@torch.no_grad()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The result."""
    from rich.progress import track

    model, tokenizer = load_checkpoint(options.model, torch.bfloat16)
    embedding = pass_ext.LookaheadEmbedding.from_pretrained(options.file).to(torch.bfloat16)
    prompts = [(seed, p) for d in DOMAINS for seed, p in enumerate(read_prompts(d, tokenizer, options.texts))]
    places: list[Place] = []
    for seed, prompt in track(prompts, "texts"):
        written = pass_ext.generate(
            model,
            torch.tensor([list(prompt.ids)]),
            max_new_tokens=options.tokens,
            temperature=TEMPERATURE,
            seeds=[seed],
        )
        ids = written.sequences[0, : len(prompt.ids) + written.lengths[0]]
        places += places_of(model, embedding, ids, len(prompt.ids), seed)
    return {
        "machine": machine.describe_cpu(),
        "date": machine.now(),
        "commit": machine.commit(),
        "versions": machine.describe_versions(),
        "model": Path(options.model).name,
        "file": options.file,
        "texts": len(prompts),
        "places": len(places),
        "slots": log_loss(places, None),
        "raced": [[flattened, log_loss(places, flattened)] for flattened in FLATTENED],
    }


def render(result: dict[str, Any]) -> str:
    """The page."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [["the slots' probabilities", f"{result['slots']:.4f}"]]
    lines += [[f"the race's scores / {flattened:g}", f"{loss:.4f}"] for flattened, loss in result["raced"]]
    return "\n".join([
        "# Chances of candidates that are raced",
        "",
        "Written by `python -m benchmarks.pages.lookahead.raced_chances`; do not edit.",
        "",
        f"{result['file']} for {result['model']} in bfloat16; {result['places']:,} slots behind places of {result['texts']} "
        f"texts at temperature {TEMPERATURE}, the {CANDIDATES} best candidates of each. {result['date'][:10]}, commit "
        f"{result['commit']}, {versions}.",
        "",
        *table(["chance by", "log loss"], lines, left=1),
        "",
    ])  # fmt: skip


def main() -> int:
    """Entry point of `python -m benchmarks.pages.lookahead.raced_chances`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "file", nargs="?", help="a file of look-ahead embeddings, or a name that comes with the package"
    )
    parser.add_argument("--model", help="a GGUF file, or a transformers model folder or name")
    parser.add_argument("--texts", type=int, default=6, help="of each domain")
    parser.add_argument("--tokens", type=int, default=48, help="of a text, at most")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args()
    if not options.check:
        if options.file is None or options.model is None:
            raise SystemExit("give --model and the file")
        by_machine.keep("raced_chances", measure(options))
    return by_machine.write_pages("raced_chances", render, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
