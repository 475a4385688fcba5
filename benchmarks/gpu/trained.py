"""PaSS with the shipped, trained slots on a real model on a GPU: tokens per second beside Plain and transformers' generate.

    tokens per second = tokens of all texts / seconds of them, the call on the prompt included

The model and prompts are those of benchmarks.contenders: SmolLM2-135M-Instruct in bfloat16, one request, greedy.
Every contender continues a prompt before the next one begins, in shuffled order, so whatever the time allowed is whole.
transformers takes its dynamic cache: its compiler needs longer than the stage. `python -m benchmarks.gpu.trained`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any

import torch

import pass_ext
from benchmarks.decoding.contenders import HF, ONE_PASS, PLAIN, TWO_PASS, method_contender, transformers_contender
from benchmarks.decoding.prompts import DOMAINS, read_prompts
from benchmarks.decoding.race import FEWEST_TOKENS, in_turn, one_round
from benchmarks.harness import evidence
from benchmarks.harness.command import provenance
from pass_ext import LookaheadEmbedding
from pass_ext.checkpoint import demo_model, load_checkpoint

FILE, SLOTS, TOKENS, EACH = "trained-slots.json", "smollm2-135m-instruct-slots", 128, 16


def measure(model: Any, tokenizer: Any, seconds: float, tokens: int = TOKENS) -> dict[str, Any]:
    """The runs of the contenders on as many prompts as begin within the time, at most EACH of a domain; on one more while all
    texts loop."""
    slots = LookaheadEmbedding.from_pretrained(SLOTS)
    raced = [
        method_contender(PLAIN, model, pass_ext.Plain()),
        method_contender(ONE_PASS, model, pass_ext.PaSS(slots)),
        method_contender(TWO_PASS, model, pass_ext.PaSS(slots, passes=2)),
        transformers_contender(HF, model),
    ]
    result: dict[str, Any] = {**provenance("trained-slots", False, model.device.type), "slots": SLOTS, "runs": []}
    prompts = in_turn([read_prompts(domain, tokenizer, EACH) for domain in DOMAINS])
    for contender in raced:
        contender(prompts[0].ids, 8)  # loads kernels, measures step times, records graphs
    until, order = time.monotonic() + seconds, random.Random(0)
    for prompt in prompts:
        if time.monotonic() > until and not all(run["looping"] for run in result["runs"]):
            break
        text = raced[0](prompt.ids, tokens).tokens
        if len(text) < min(FEWEST_TOKENS, tokens):
            continue
        result["runs"] += one_round(prompt, raced, tokens, order, text)
        evidence.add_result(FILE, result)
    return result


def main() -> int:
    """Entry point of `python -m benchmarks.gpu.trained`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=30, help="begin no prompt after these")
    options = parser.parse_args()
    model, tokenizer = load_checkpoint(demo_model(), torch.bfloat16, weights="dense")
    result = measure(model.to(options.device), tokenizer, options.seconds)
    for run in result["runs"]:
        print(json.dumps(run), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
