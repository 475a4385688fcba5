"""Samples of one prompt that draft for each other: calls of the model with a corpus, and without.

    tokens per call = tokens of a text / calls of the model

N samples of each held-out prompt at temperature 0.8, in one batch, where the slowest text decides, and one after the other.
NGram looks in the text itself; with a corpus, also in the other samples of the prompt. A corpus begins empty for each prompt.
Both write the same texts, which is checked. Counts alone: the machine's speed plays no part.
`python -m benchmarks.samples` writes benchmarks/results/samples.json and samples.md; `--check` compares the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.decoding.prompts import DOMAINS, read_prompts
from benchmarks.decoding.race import in_turn
from benchmarks.harness import machine
from benchmarks.harness.markdown import table
from benchmarks.harness.template import page

RESULT, PAGE = ROOT / "benchmarks/results/samples.json", ROOT / "benchmarks/results/samples.md"
PROMPTS, TOKENS, TEMPERATURE, MOST = 20, 64, 0.8, 8
BATCHES = (1, 4, 8)


def measure() -> dict[str, Any]:
    """The result."""
    import pass_ext
    from pass_ext.checkpoint import demo_model, load_checkpoint

    result: dict[str, Any] = {
        "date": machine.now(),
        "commit": machine.commit(),
        "versions": machine.describe_versions(),
    }
    path = demo_model()
    model, tokenizer = load_checkpoint(path, torch.bfloat16, weights="dense")
    prompts = in_turn([read_prompts(domain, tokenizer, PROMPTS) for domain in DOMAINS])[:PROMPTS]
    result |= {"model": path.name, "prompts": len(prompts), "tokens": TOKENS, "temperature": TEMPERATURE}

    def calls(ids: torch.Tensor, corpus: Any, first: int) -> tuple[int, list[list[int]]]:
        seeds = list(range(first, first + len(ids)))
        options = dict(max_new_tokens=TOKENS, temperature=TEMPERATURE, seeds=seeds)
        written = pass_ext.generate(model, ids, pass_ext.NGram(corpus=corpus), **options)  # type: ignore[arg-type]
        return written.stats.model_calls, written.sequences.tolist()

    rows = []
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt.ids])
        row: dict[str, Any] = {"domain": prompt.domain, "prompt": prompt.name}
        for samples in BATCHES:
            alone, texts = calls(ids.repeat(samples, 1), None, 0)
            together, same = calls(ids.repeat(samples, 1), pass_ext.drafting.Corpus(), 0)
            row[f"batch of {samples}"] = {"own text": alone, "corpus": together, "same": texts == same}
        one_by_one = [calls(ids, None, seed) for seed in range(MOST)]
        corpus = pass_ext.drafting.Corpus()
        with_corpus = [calls(ids, corpus, seed) for seed in range(MOST)]
        row["one after the other"] = {
            "own text": [count for count, _ in one_by_one],
            "corpus": [count for count, _ in with_corpus],
            "same": [text for _, text in one_by_one] == [text for _, text in with_corpus],
        }
        rows.append(row)
        print(f"{number + 1} of {len(prompts)}: {json.dumps(row)}", flush=True)
    return result | {"rows": rows}


def render(result: dict[str, Any]) -> str:
    """The page."""
    lines = []
    for domain in (*DOMAINS, "all"):
        chosen = [row for row in result["rows"] if domain in (row["domain"], "all")]
        if not chosen:
            continue
        for samples in BATCHES:
            counts = [row[f"batch of {samples}"] for row in chosen]
            lines.append(_line(domain, f"{samples} in one batch", len(chosen), counts, result["tokens"]))
        for first, last in ((0, 1), (1, 4), (4, MOST)):
            counts = [
                dict(zip(("own text", "corpus"), pair, strict=True))
                for row in chosen
                for pair in zip(
                    *(row["one after the other"][way][first:last] for way in ("own text", "corpus")), strict=True
                )
            ]
            name = f"one after the other: {'the first' if last == 1 else f'{first + 1} to {last}'}"
            lines.append(_line(domain, name, len(chosen), counts, result["tokens"]))
    same = [entry["same"] for row in result["rows"] for entry in row.values() if isinstance(entry, dict)]
    counts = table(["prompts", "samples", "number", "own text", "with a corpus", "ratio"], lines, left=2)
    return page(__file__, result, counts=counts, same=same.count(True), of=len(same))


def _line(domain: str, name: str, prompts: int, counts: list[dict[str, Any]], tokens: int) -> list[str]:
    own, corpus = (tokens * len(counts) / sum(entry[way] for entry in counts) for way in ("own text", "corpus"))
    return [domain, name, str(prompts), f"{own:.2f}", f"{corpus:.2f}", f"{corpus / own:.2f} ×"]


def main() -> int:
    """Entry point of `python -m benchmarks.samples`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args()
    if not (options.render or options.check):
        RESULT.write_text(json.dumps(measure(), indent=1) + "\n")
    text = render(json.loads(RESULT.read_text()))
    if options.check:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
