"""What keys and values in 8 bits change in the texts of SmolLM2-135M: counts, no clock.

`python -m benchmarks.decoding.cache_dtype` writes 64 greedy tokens after each of eight held-out prompts, by Plain, NGram and
PaSS, over caches of each dtype, and keeps in benchmarks/results/cache-dtype.json:

    same       texts of NGram and PaSS that are Plain's over the same cache, of 16
    like bf16  tokens of Plain's text before the first that differs from that over the model's own cache, of 512
    NGram      and PaSS: tokens per call, prompts' calls included
    bytes      of a token's keys and values in all layers
"""

import json
from typing import Any

import torch

import pass_ext
from benchmarks import ROOT
from benchmarks.decoding.prompts import read_prompts
from benchmarks.harness import machine
from pass_ext.checkpoint import demo_model, load_checkpoint

RESULT = ROOT / "benchmarks" / "results" / "cache-dtype.json"
DOMAINS, PROMPTS, TOKENS = ("prose", "chat"), 4, 64
DTYPES = (None, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def measure() -> list[dict[str, Any]]:
    """A row for each dtype of the cache."""
    model, tokenizer = load_checkpoint(demo_model(), torch.bfloat16)
    prompts = [torch.tensor([each.ids]) for name in DOMAINS for each in read_prompts(name, tokenizer, PROMPTS)]
    methods = {
        "Plain": pass_ext.Plain(),
        "NGram": pass_ext.NGram(),
        "PaSS": pass_ext.PaSS("smollm2-135m-instruct", rows=8),
    }
    rows: list[dict[str, Any]] = []
    own: list[list[int]] = []
    for dtype in DTYPES:
        texts: dict[str, list[list[int]]] = {}
        row: dict[str, Any] = {"cache": "bfloat16" if dtype is None else str(dtype).removeprefix("torch.")}
        for name, method in methods.items():
            texts[name], calls = [], 0
            for ids in prompts:
                session = pass_ext.Session(model, cache_dtype=dtype)
                result = pass_ext.generate(model, ids, method, max_new_tokens=TOKENS, eos_token_id=[], session=session)
                texts[name].append(result.sequences[0, ids.shape[1] :].tolist())
                calls += result.stats.model_calls
            row[f"{name}, tokens per call"] = round(len(prompts) * TOKENS / calls, 3)
        row["bytes"] = sum(cache[0, 0].nbytes for layer in session.caches for cache in layer)
        drafted = [pair for name in ("NGram", "PaSS") for pair in zip(texts[name], texts["Plain"], strict=True)]
        row["same"] = sum(text == plain for text, plain in drafted)
        own = own or texts["Plain"]
        row["like bf16"] = sum(map(_common, texts["Plain"], own))
        rows.append(row)
        print(json.dumps(row))
    return rows


def _common(text: list[int], other: list[int]) -> int:
    """The tokens before the first that differs."""
    return next((i for i, pair in enumerate(zip(text, other, strict=True)) if pair[0] != pair[1]), len(text))


def main() -> None:
    """Entry point of `python -m benchmarks.decoding.cache_dtype`."""
    begun = {
        "date": machine.now(),
        "commit": machine.commit(),
        "machine": machine.describe_cpu(),
        "versions": machine.describe_versions(),
    }
    RESULT.write_text(json.dumps({**begun, "rows": measure()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
