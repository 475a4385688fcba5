"""Where a step's time goes: a call of the model by its number of rows, and each method's step by its ranges."""

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from benchmarks.decoding_contenders import Contender, Setting
from benchmarks.decoding_prompts import Prompt

Row = dict[str, Any]
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
PREFIX = 192
"""Tokens of text that the measured calls stand behind: the middle of a raced one."""
RANGES = ("draft", "verify", "accept", "commit")


def step_times(model: Any, rounds: int, seed: int = 0) -> list[Row]:
    """Milliseconds of one call, logits included, by its rows; interleaved, in a new order every round."""
    import pass_ext
    from pass_ext.decoding.models.adapt import packed_model
    from pass_ext.decoding.session.session import Session

    adapted = packed_model(model)
    device = adapted.table.device
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    order = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(adapted.table.shape[0], (PREFIX + max(ROWS),), generator=generator).to(device)
    trees = {rows: pass_ext.pack_trees([pass_ext.Tree.chain(rows - 1)], device) for rows in (*ROWS, PREFIX)}
    with torch.inference_mode(), adapted.attached():
        session = Session(adapted, 1, PREFIX + max(ROWS), graphs=True)
        session.call(trees[PREFIX], ids[:PREFIX], torch.zeros(1, dtype=torch.int64, device=device))
        path = torch.arange(PREFIX, dtype=torch.int32, device=device)[None]
        session.commit(trees[PREFIX], path, torch.full((1,), PREFIX - 1, dtype=torch.int32, device=device))
        warm_up = 3  # on a GPU: load, record, replay
        for turn in range(warm_up + rounds):
            for rows in order.sample(ROWS, len(ROWS)):
                started = _now(device)
                session.call(trees[rows], ids[PREFIX : PREFIX + rows])
                if turn >= warm_up:
                    times[rows].append(_now(device) - started)
    return [{"rows": rows, **_percentiles(taken)} for rows, taken in times.items()]


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "ms": 1e3 * median(ordered),
        "ms_p10": 1e3 * ordered[len(ordered) // 10],
        "ms_p90": 1e3 * ordered[len(ordered) * 9 // 10],
        "samples": len(ordered),
    }


def profile(contender: Contender, prompts: Sequence[Prompt], setting: Setting, most: int, device: torch.device) -> Row:
    """Milliseconds per call of the model in each of the loop's ranges, and outside of all; the prompt's own call left out."""
    sums: dict[str, float] = defaultdict(float)
    calls = tokens = 0
    for seed, prompt in enumerate(prompts):
        with timed_ranges(device) as taken:
            outcome = contender.write(prompt.ids, setting, seed, most)
        calls += outcome.calls - 1
        tokens += len(outcome.tokens) - 1
        for name in RANGES:
            sums[name] += sum(taken[name][1:] if name in ("verify", "commit") else taken[name])
        sums["rest"] += outcome.seconds - sum(map(sum, taken.values()))
    calls = max(calls, 1)
    return {
        "contender": contender.name,
        "calls": calls,
        "tokens_per_call": tokens / calls,
        **{f"{name}_ms": 1e3 * sums[name] / calls for name in (*RANGES, "rest")},
    }


@contextmanager
def timed_ranges(device: torch.device) -> Iterator[dict[str, list[float]]]:
    """Meanwhile the decoding loop's profiler ranges are timed; on a GPU each waits for the work before and in it."""
    from pass_ext.decoding import loop
    from pass_ext.decoding.session import reading

    taken: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        started = _now(device)
        try:
            yield
        finally:
            taken[name].append(_now(device) - started)

    before = loop.profiled
    loop.profiled = reading.profiled = timed
    try:
        yield taken
    finally:
        loop.profiled = reading.profiled = before


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
