"""Times of a step: one call of the model by its number of rows, and the parts of each method's step."""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from benchmarks.decoding.contenders import now
from benchmarks.decoding.prompts import Prompt
from benchmarks.harness.cases import Contender, Row

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
PREFIX = 192
"""Tokens before the measured calls: about half of a raced text."""
RANGES = ("draft", "verify", "accept", "commit")


def step_times(model: Any, rounds: int, seed: int = 0) -> list[Row]:
    """Milliseconds of one call with its logits, by number of rows; interleaved, in a new order every round."""
    import pass_ext
    from pass_ext.decoding.models.any_model import packed_model
    from pass_ext.decoding.session.session import Session

    adapted = packed_model(model)
    device = adapted.table.device
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    order = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(adapted.table.shape[0], (PREFIX + max(ROWS),), generator=generator).to(device)
    trees = {rows: pass_ext.pack_trees([pass_ext.Tree.chain(rows - 1)], device) for rows in (*ROWS, PREFIX)}
    with torch.inference_mode(), adapted.attached():
        session = Session(adapted, 1, PREFIX + max(ROWS), cuda_graphs=True)
        session.call(trees[PREFIX], ids[:PREFIX], torch.zeros(1, dtype=torch.int64, device=device))
        path = torch.arange(PREFIX, dtype=torch.int32, device=device)[None]
        session.commit(trees[PREFIX], path, torch.full((1,), PREFIX - 1, dtype=torch.int32, device=device))
        warm_up = 3  # on a GPU: load, record, replay
        for turn in range(warm_up + rounds):
            for rows in order.sample(ROWS, len(ROWS)):
                started = now(device)
                session.call(trees[rows], ids[PREFIX : PREFIX + rows])
                if turn >= warm_up:
                    times[rows].append(now(device) - started)
    return [{"rows": rows, **_percentiles(seconds)} for rows, seconds in times.items()]


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "ms": 1e3 * median(ordered),
        "ms_p10": 1e3 * ordered[len(ordered) // 10],
        "ms_p90": 1e3 * ordered[len(ordered) * 9 // 10],
        "samples": len(ordered),
    }


def profile(contender: Contender, prompts: Sequence[Prompt], most: int, device: torch.device) -> Row:
    """Milliseconds per call of the model in each profiler range of the loop and outside; without the call on the prompt."""
    sums: dict[str, float] = defaultdict(float)
    calls = tokens = 0
    for prompt in prompts:
        with timed_ranges(device) as times:
            outcome = contender(prompt.ids, most)
        calls += outcome.calls - 1
        tokens += len(outcome.tokens) - 1
        for name in RANGES:
            sums[name] += sum(times[name][1:] if name in ("verify", "commit") else times[name])
        sums["rest"] += outcome.seconds - sum(map(sum, times.values()))
    calls = max(calls, 1)
    return {
        "contender": contender.name,
        "calls": calls,
        "tokens_per_call": tokens / calls,
        **{f"{name}_ms": 1e3 * sums[name] / calls for name in (*RANGES, "rest")},
    }


@contextmanager
def timed_ranges(device: torch.device) -> Iterator[dict[str, list[float]]]:
    """Times the profiler ranges of the decoding loop; on a GPU a range waits for the work before and in it."""
    from pass_ext.decoding.loop import device_step, host_step
    from pass_ext.decoding.session import reading

    modules = (host_step, device_step, reading)

    times: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        started = now(device)
        try:
            yield
        finally:
            times[name].append(now(device) - started)

    before = reading.profiled
    for module in modules:
        module.profiled = timed
    try:
        yield times
    finally:
        for module in modules:
            module.profiled = before
