"""A head beside Plain and PaSS with the shipped slots, on SmolLM2 with its weights as they lie in its file ("stored") and in
bfloat16 ("dense").

    tokens a call    of greedy texts, by kind
    tokens/s         prompts included: medians of the rounds, methods and weights in turn

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

FORMS, KINDS = ("stored", "dense"), ("chat", "prose", "code")
PROMPTS, TOKENS, ROUNDS = 3, 64, 2
LENGTHS = (2, 3, 4)


def texts(path: str) -> list[dict[str, Any]]:
    """A row for each form of the weights, kind and method."""
    models: dict[str, Any] = {}
    methods: dict[str, dict[str, Any]] = {}
    for form in FORMS:
        models[form], tokenizer = load_checkpoint(demo_model(), torch.bfloat16, weights=form)
        head = pass_ext.load_drafter(path, models[form])
        methods[form] = {
            "Plain": pass_ext.Plain(),
            "PaSS, slots": pass_ext.PaSS("smollm2-135m-instruct-slots"),
            "PaSS, slots and adapters": pass_ext.PaSS("smollm2-135m-instruct"),
            **{f"head, {length} drafts": replace(head, length=length) for length in LENGTHS},
        }
    prompts = {kind: [torch.tensor([each.ids]) for each in read_prompts(kind, tokenizer, PROMPTS)] for kind in KINDS}
    rates: dict[Any, list[float]] = {}
    calls: dict[Any, float] = {}
    written: dict[Any, list[Any]] = {}
    for number in range(ROUNDS + 1):
        for form in FORMS:
            for kind in KINDS:
                for name, method in methods[form].items():
                    begun, results = time.perf_counter(), []
                    for ids in prompts[kind]:
                        results.append(
                            pass_ext.generate(models[form], ids, method, max_new_tokens=TOKENS, eos_token_id=[])
                        )
                    rates.setdefault((form, kind, name), []).append(PROMPTS * TOKENS / (time.perf_counter() - begun))
                    calls[form, kind, name] = sum(each.stats.model_calls for each in results)
                    written[form, kind, name] = [each.sequences for each in results]
        print(f"round {number} of {ROUNDS}", file=sys.stderr)
    return [
        {
            "weights": form,
            "kind": kind,
            "method": name,
            "tokens a call": round(PROMPTS * TOKENS / calls[form, kind, name], 2),
            "tokens/s": round(median(rates[form, kind, name][1:]), 1),  # the first round warms up
            "same texts": f"{sum(map(torch.equal, written[form, kind, name], written[form, kind, 'Plain']))} of {PROMPTS}",
        }
        for form in FORMS
        for kind in KINDS
        for name in methods[form]
    ]


if __name__ == "__main__":
    if CORES:
        os.sched_setaffinity(0, CORES)
    folder = ROOT / "benchmarks" / "results" / machine.device_slug("cpu")
    result = {
        "date": machine.now(),
        "commit": machine.commit(),
        "machine": machine.describe_cpu(),
        "versions": machine.describe_versions(),
        "texts": texts(sys.argv[1]),
    }
    (folder / "trained-head.json").write_text(json.dumps(result, indent=1) + "\n")
    for row in result["texts"]:
        print(json.dumps(row))
