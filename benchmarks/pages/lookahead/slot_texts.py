"""Texts that look-ahead slots draft for: tokens per call of the model, and speed against plain decoding.

    tokens per call = new tokens / calls of the model, the call on the prompt left out of both
    speed           = seconds of Plain / seconds of the method, on the same prompts, in turn

One text at a time, of prompts whose greedy texts do not loop. `python -m benchmarks.pages.lookahead.slots` runs this and
writes the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

import pass_ext
from benchmarks.harness.markdown import table

EIGHT, TWO, TIMED = "one pass, 8 rows", "two passes, 8 rows", "one pass, rows by measured times"
ALONE = "one pass, 8 rows, without recall"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T 0.8, coupled": dict(temperature=0.8, rule="coupled"),
    "T 0.8, traversal": dict(temperature=0.8, rule="traversal"),
}
METHODS = {
    "greedy": (EIGHT, ALONE, TWO, TIMED),
    "T 0.8, coupled": (EIGHT, ALONE, TIMED),
    "T 0.8, traversal": (EIGHT, ALONE),
}


def methods_of(file: str) -> dict[str, Any]:
    """The methods by name."""
    slots = pass_ext.LookaheadEmbedding.from_pretrained(file)
    return {
        EIGHT: pass_ext.PaSS(slots, rows=8),
        ALONE: pass_ext.PaSS(slots, rows=8, recall=False),
        TWO: pass_ext.PaSS(slots, rows=8, passes=2),
        TIMED: pass_ext.PaSS(slots),
    }


def measure(
    model: Any, files: Sequence[str], prompts: dict[str, list[list[int]]], tokens: int
) -> Iterator[dict[str, Any]]:
    """The rows of the result. prompts: by domain."""
    of_files = {(file, name): method for file in files for name, method in methods_of(file).items()}
    for sampling, options in SAMPLINGS.items():
        contenders = {key: method for key, method in of_files.items() if key[1] in METHODS[sampling]}
        contenders |= {("", "Plain"): pass_ext.Plain()}
        for domain, texts in prompts.items():
            sums = {contender: [0, 0, 0.0] for contender in contenders}
            # The first text comes twice: step times are measured, memory is allocated.
            for number, ids in enumerate([texts[0], *texts]):
                for contender, method in contenders.items():
                    own = options if contender[0] else {"temperature": options.get("temperature", 0.0)}
                    stats = pass_ext.generate(
                        model, torch.tensor([ids]), method, max_new_tokens=tokens, eos_token_id=[], seeds=number, **own
                    ).stats
                    if number:
                        sums[contender][0] += stats.tokens - 1
                        sums[contender][1] += stats.model_calls - 1
                        sums[contender][2] += stats.seconds
            plain = sums["", "Plain"][2]
            for (file, name), (written, calls, seconds) in sums.items():
                yield {
                    "file": file,
                    "method": name,
                    "sampling": sampling,
                    "domain": domain,
                    "texts": len(texts),
                    "tokens per call": round(written / calls, 4),
                    "speed": round(plain / seconds, 4),
                }


def lines_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The tables of the page."""
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    lines = []
    for sampling in dict.fromkeys(row["sampling"] for row in rows):
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for row in rows:
            if row["sampling"] == sampling and row["file"]:
                found.setdefault((row["method"], row["file"]), {})[row["domain"]] = row
        cells = [
            [method, file]
            + [f"{by_domain[domain]['tokens per call']:.2f}" for domain in domains]
            + [f"{by_domain[domain]['speed']:.2f} ×" for domain in domains]
            for (method, file), by_domain in sorted(found.items())
        ]
        heads = [
            "method",
            "file",
            *(f"{name}: tokens per call" for name in domains),
            *(f"{name}: speed" for name in domains),
        ]
        lines += [f"## {sampling[0].upper()}{sampling[1:]}", "", *table(heads, cells, left=2), ""]
    return lines
