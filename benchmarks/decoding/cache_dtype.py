"""What keys and values in 8 bits change in the texts of SmolLM2-135M, and in the time of a step.

`python -m benchmarks.decoding.cache_dtype` writes 64 greedy tokens after each of eight held-out prompts, by Plain, NGram and
PaSS, over caches of each dtype, and keeps in benchmarks/results/cache-dtype.json:

    same       texts of NGram and PaSS that are Plain's over the same cache, of 16
    like bf16  tokens of Plain's text before the first that differs from that over the model's own cache, of 512
    NGram      and PaSS: tokens per call, prompts' calls included
    bytes      of a token's keys and values in all layers

`python -m benchmarks.decoding.cache_dtype steps` measures, the dtypes in turn, and keeps in the same file as "steps" the
milliseconds of a call by Plain and by PaSS after a text of so many tokens: the median over rounds of the time of 32 more
tokens, without that of the first call.
"""

import itertools
import json
import sys
import time
from statistics import median
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
LENGTHS, STEPS, ROUNDS = (128, 1024), 32, 5


def measure() -> list[dict[str, Any]]:
    """A row for each dtype of the cache."""
    model, tokenizer = load_checkpoint(demo_model(), torch.bfloat16, weights="dense")
    prompts = [torch.tensor([each.ids]) for name in DOMAINS for each in read_prompts(name, tokenizer, PROMPTS)]
    methods: dict[str, Any] = {
        "Plain": pass_ext.Plain(),
        "NGram": pass_ext.NGram(),
        "PaSS": pass_ext.PaSS("smollm2-135m-instruct", rows=8),
    }
    rows: list[dict[str, Any]] = []
    own: list[list[int]] = []
    for dtype in DTYPES:
        texts: dict[str, list[list[int]]] = {}
        row: dict[str, Any] = {"cache": _name(dtype)}
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


def measure_steps() -> list[dict[str, Any]]:
    """A row for each dtype of the cache and length of the text before."""
    model, tokenizer = load_checkpoint(demo_model(), torch.bfloat16, weights="dense")
    prose = itertools.chain.from_iterable(each.ids for each in read_prompts("prose", tokenizer, 64))
    whole = torch.tensor([list(itertools.islice(itertools.cycle(tuple(prose)), max(LENGTHS)))])
    methods: dict[str, Any] = {"Plain": pass_ext.Plain(), "PaSS": pass_ext.PaSS("smollm2-135m-instruct", rows=8)}
    cases = list(itertools.product(LENGTHS, DTYPES, methods))
    sessions: dict[Any, pass_ext.Session] = {}
    pasts: dict[Any, Any] = {}
    for length, dtype in itertools.product(LENGTHS, DTYPES):
        read = pass_ext.Session(model, cache_dtype=dtype)
        pass_ext.generate(model, whole[:, :length], max_new_tokens=1, eos_token_id=[], session=read)
        pasts[length, dtype] = [tuple(x[:, : length - 1].clone() for x in layer) for layer in read.caches], length - 1
    for case in cases:
        sessions[case] = pass_ext.Session(model, capacity=case[0] + STEPS + 64, cache_dtype=case[1])

    def seconds(case: tuple[int, Any, str], tokens: int) -> tuple[float, int]:
        length, dtype, method = case
        session, ids = sessions[case], whole[:, :length]
        session.past = pasts[length, dtype]
        begun = time.perf_counter()
        result = pass_ext.generate(model, ids, methods[method], max_new_tokens=tokens, eos_token_id=[], session=session)
        return time.perf_counter() - begun, result.stats.model_calls

    times: dict[Any, list[float]] = {case: [] for case in cases}
    for round_number in range(ROUNDS + 1):
        for case in cases:
            (first, calls), (all_calls, more) = seconds(case, 1), seconds(case, 1 + STEPS)
            if round_number:  # the first round warms up
                times[case].append(1e3 * (all_calls - first) / (more - calls))
    rows = []
    for length, dtype in itertools.product(LENGTHS, DTYPES):
        row: dict[str, Any] = {"cache": _name(dtype), "tokens before": length}
        rows.append(row | {f"{name}, ms": round(median(times[length, dtype, name]), 2) for name in methods})
        print(json.dumps(rows[-1]))
    return rows


def _name(dtype: torch.dtype | None) -> str:
    return "bfloat16" if dtype is None else str(dtype).removeprefix("torch.")


def _common(text: list[int], other: list[int]) -> int:
    """The tokens before the first that differs."""
    return next((i for i, pair in enumerate(zip(text, other, strict=True)) if pair[0] != pair[1]), len(text))


def main() -> None:
    """Entry point of `python -m benchmarks.decoding.cache_dtype`."""
    begun = machine.describe_run()
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if sys.argv[1:] == ["steps"]:
        result = kept | {"steps": {**begun, "rows": measure_steps()}}
    else:
        result = kept | begun | {"rows": measure()}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
