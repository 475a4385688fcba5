"""A head beside Plain and PaSS with the shipped slots, and both together, on SmolLM2 with its weights as they lie in its file.

    tokens a call    of greedy texts, by kind
    tokens/s         prompts included: medians of the rounds, methods in turn

`python -m benchmarks.decoding.trained_head FOLDER` reads the head's checkpoint there and keeps the result in trained-head.json
of the machine's folder of results.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch

import pass_ext
from benchmarks import CORES, ROOT
from benchmarks.decoding.prompts import read_prompts
from benchmarks.harness import machine
from pass_ext.checkpoint import demo_model, load_checkpoint

KINDS = ("chat", "prose", "code")
PROMPTS, TOKENS, ROUNDS = 2, 64, 2
SLOTS = "smollm2-135m-instruct-slots"
ROWS = (12, 24)
"""Most rows of a call with slots below the head."""


def texts(path: str) -> dict[str, Any]:
    """The head's hit rates, and a row for each kind and method."""
    model, tokenizer = load_checkpoint(demo_model(), torch.bfloat16)
    head = pass_ext.load_drafter(path, model)
    prompts = {kind: [torch.tensor([each.ids]) for each in read_prompts(kind, tokenizer, PROMPTS)] for kind in KINDS}
    rates = _hit_rates(model, head, [ids for each in prompts.values() for ids in each])
    slots = {rows: pass_ext.PaSS(SLOTS, rows=rows) for rows in ROWS}
    methods = {
        "Plain": pass_ext.Plain(),
        "PaSS, slots": pass_ext.PaSS(SLOTS),
        **{f"head, {length} drafts": replace(head, length=length) for length in (1, 2, 4)},
        **{
            f"head, {length} drafts, slots below, {rows} rows": replace(
                head, length=length, lookahead=below, hit_rates=rates
            )
            for length in (1, 2)
            for rows, below in slots.items()
        },
    }
    speeds: dict[Any, list[float]] = {}
    calls: dict[Any, float] = {}
    written: dict[Any, list[Any]] = {}
    for number in range(ROUNDS + 1):
        for kind in KINDS:
            for name, method in methods.items():
                begun = time.perf_counter()
                results = [
                    pass_ext.generate(model, ids, method, max_new_tokens=TOKENS, eos_token_id=[])
                    for ids in prompts[kind]
                ]
                speeds.setdefault((kind, name), []).append(PROMPTS * TOKENS / (time.perf_counter() - begun))
                calls[kind, name] = sum(each.stats.model_calls for each in results)
                written[kind, name] = [each.sequences for each in results]
        print(f"round {number} of {ROUNDS}", file=sys.stderr)
    rows = [
        {
            "kind": kind,
            "method": name,
            "tokens a call": round(PROMPTS * TOKENS / calls[kind, name], 2),
            "tokens/s": round(median(speeds[kind, name][1:]), 1),  # the first round warms up
            "same texts": f"{sum(map(torch.equal, written[kind, name], written[kind, 'Plain']))} of {PROMPTS}",
        }
        for kind in KINDS
        for name in methods
    ]
    return {"hit rates": [round(rate, 3) for (rate,) in rates], "texts": rows}


def _hit_rates(model: Any, head: Any, prompts: list[Any]) -> list[list[float]]:
    """How often a draft of each level is right where those above it are."""
    found = []
    for ids in prompts:
        stats = pass_ext.generate(model, ids, replace(head, length=4), max_new_tokens=TOKENS, eos_token_id=[]).stats
        found.append(torch.tensor([1.0, *stats.acceptance_rate_per_position]))
    reached = torch.stack(found).mean(0)
    return [[float(rate)] for rate in reached[1:] / reached[:-1].clamp(min=1e-6)]


if __name__ == "__main__":
    if CORES:
        os.sched_setaffinity(0, CORES)
    folder = ROOT / "benchmarks" / "results" / machine.device_slug("cpu")
    result = {
        "date": machine.now(),
        "commit": machine.commit(),
        "machine": machine.describe_cpu(),
        "versions": machine.describe_versions(),
        **texts(sys.argv[1]),
    }
    (folder / "trained-head.json").write_text(json.dumps(result, indent=1) + "\n")
    for row in result["texts"]:
        print(json.dumps(row))
