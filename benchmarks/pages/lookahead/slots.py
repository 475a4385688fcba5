"""How often look-ahead slots hold the token that the model then wrote, and how much of its distribution they have.
    top 1     share of places where slot i's first candidate is the token, raw, with transition scores, and with what the text
              recalls besides
    chain     mean number of slots, counted from the first, that hold the token
    overlap   mean of the sum of min(p, q), the chance that a token drawn from the slot is accepted at temperature 1
The texts are the model's own continuations of the held-out prompts of `benchmarks.decoding`, greedy and at temperature 0.8,
those that loop (benchmarks/decoding/texts.py says which) apart from the others.
`python -m benchmarks.pages.lookahead.slots --model MODEL FILE ...` writes slots.json and slots.md in the machine's folder of
results; `--check` compares the pages.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pass_ext
from benchmarks.decoding.prompts import DOMAINS, read_prompts
from benchmarks.decoding.texts import DEFINITION, loops
from benchmarks.harness import by_machine, machine
from benchmarks.harness.markdown import table
from benchmarks.harness.template import page
from benchmarks.pages.lookahead import slot_aims, slot_texts
from pass_ext.checkpoint import load_checkpoint
from pass_ext.training.lookahead.evaluation import hits_of

SLOTS = 4
TRANSITIONS, RECALL = "with transitions", "with transitions and recall"


class Text(NamedTuple):
    """A prompt's continuation."""

    domain: str
    kind: str
    ids: list[int]
    prompt: int


def texts_of(model: Any, tokenizer: Any, domain: str, *, wanted: int, tokens: int) -> list[Text]:
    """Up to `wanted` texts of each kind: "greedy", "greedy, loops", "T 0.8"."""
    prompts = read_prompts(domain, tokenizer, 4 * wanted)
    longest = max(len(prompt.ids) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt.ids)) + list(prompt.ids) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts])
    by_kind: dict[str, list[Text]] = {}
    for temperature in (0.0, 0.8):
        options = dict(max_new_tokens=tokens, attention_mask=mask, temperature=temperature, seeds=list(range(len(ids))))
        written = pass_ext.generate(model, ids, **options)
        rows = zip(prompts, written.sequences[:, longest:].tolist(), written.lengths, strict=True)
        for prompt, row, length in rows:
            new = row[:length]
            kind = ("greedy" if temperature == 0 else "T 0.8") + (", loops" if loops(new) else "")
            chosen = by_kind.setdefault(kind, [])
            if length > SLOTS + 8 and len(chosen) < wanted:
                chosen.append(Text(domain, kind, [*prompt.ids, *new], len(prompt.ids)))
    return [text for kind, texts in by_kind.items() if kind != "T 0.8, loops" for text in texts]


def judged(model: Any, file: str, texts: list[Text]) -> list[dict[str, Any]]:
    """A row of the result for each way of scoring and each group of texts."""
    rows = []
    for scores in ("raw", TRANSITIONS, RECALL):
        embedding = pass_ext.LookaheadEmbedding.from_pretrained(file).to(model.get_input_embeddings().weight.dtype)
        if scores == "raw":
            embedding.transition_left = embedding.transition_right = None
        elif not embedding.rank:
            continue
        found: dict[tuple[str, str], list[Any]] = {}
        for text in texts:
            after = range(text.prompt - 2, len(text.ids) - 1 - embedding.num_lookahead)
            if not after:  # shorter than this file's slots
                continue
            places = torch.tensor(after)
            hits = hits_of(model, embedding, torch.tensor(text.ids), places, recalls=scores == RECALL)
            for domain in (text.domain, "all"):
                found.setdefault((text.kind, domain), []).append(hits)
        for (kind, domain), parts in found.items():
            right = torch.cat([hits.ranks for hits in parts]) == 0
            overlap = torch.cat([hits.overlaps for hits in parts]).mean(0)
            rows.append(
                {
                    "file": file,
                    "scores": scores,
                    "kind": kind,
                    "domain": domain,
                    "texts": len(parts),
                    "places": len(right),
                    "top 1": [round(share, 4) for share in right.float().mean(0).tolist()],
                    "chain": round(right.int().cumprod(1).sum(1).float().mean().item(), 4),
                    "overlap": [round(share, 4) for share in overlap.tolist()],
                }
            )
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The result."""
    from rich.progress import track

    model, tokenizer = load_checkpoint(options.model, torch.bfloat16, weights="dense")
    texts = [
        text
        for domain in DOMAINS
        for text in texts_of(model, tokenizer, domain, wanted=options.texts, tokens=options.tokens)
    ]
    rows = [row for file in track(options.files, "files") for row in judged(model, file, texts)]
    prompts = {
        domain: [text.ids[: text.prompt] for text in texts if (text.domain, text.kind) == (domain, "greedy")]
        for domain in DOMAINS
    }
    written = slot_texts.measure(
        model, options.files, {name: some for name, some in prompts.items() if some}, options.tokens
    )
    return {
        **machine.describe_run(),
        "model": Path(options.model).name,
        "tokens": options.tokens,
        "rows": rows,
        "written": list(
            track(
                written,
                "texts",
                total=len(DOMAINS) * sum(len(each) * len(options.files) + 1 for each in slot_texts.METHODS.values()),
            )
        ),
    }


def render(result: dict[str, Any]) -> str:
    """The page."""
    lines = []
    for row in result["rows"]:
        tops, overlaps = (" ".join(f"{share:.3f}" for share in row[name]) for name in ("top 1", "overlap"))
        counts = [str(row["texts"]), str(row["places"])]
        lines.append(
            [row["file"], row["kind"], row["domain"], row["scores"], *counts, tops, f"{row['chain']:.2f}", overlaps]
        )
    lines.sort(key=lambda line: (line[1], line[2] != "all", line[2], line[3]))
    heads = ["file", "texts", "domain", "scores", "number", "places", "top 1 of slots 1 to 4", "chain", "overlap"]
    return page(
        __file__, result, definition=DEFINITION, nearness=table(heads, lines, left=4),
        drafted=[*slot_texts.lines_of(result["written"]), *slot_aims.lines_of(result)],
    )  # fmt: skip


def main() -> int:
    """Entry point of `python -m benchmarks.pages.lookahead.slots`."""
    parser = by_machine.parser_of(__doc__)
    parser.add_argument("files", nargs="*", help="files of look-ahead embeddings, or names that come with the package")
    parser.add_argument("--model", help="a GGUF file, or a transformers model folder or name")
    parser.add_argument("--texts", type=int, default=8, help="of each domain and kind, at most")
    parser.add_argument(
        "--tokens", type=int, default=48, help="of a continuation; with more, few prose texts are without a loop"
    )
    options = parser.parse_args()
    if not (options.render or options.check or (options.files and options.model)):
        raise SystemExit("give --model and the files")
    return by_machine.command("slots", options, lambda: measure(options), render)


if __name__ == "__main__":
    sys.exit(main())
