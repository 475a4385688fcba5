"""The parts of a step, and the machine's limits that they are compared with.

    layers       products and attention, and all that is in one op with them:
                 max(bytes of weights, keys and values / read bandwidth, flops / peak)
    small        everything else in the model's call
    loop         draft, accept, commit, and the loop itself: (o(n) - o(n / 4)) / (c(n) - c(n / 4)),
                 o(n) the time outside the model's calls in a text of n tokens, c(n) its calls after the one on the prompt
    once         o(n) - loop c(n): what a text costs whatever its length, the model's calls left out

Layers are a sum of ops under torch's profiler; the calls and what is outside are timed without it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.decoding.prompts import Prompt
from benchmarks.decoding.steps import profile
from benchmarks.harness import cpu_timing, machine
from benchmarks.harness.cases import Contender, settings_for

LAYERS = re.compile(r"linear|::mm\b|addmm|matmul|::bmm|gemm|attention|pass_ext::layer_")
CALL = "pass_ext::verify"
OUTSIDE = ("draft", "accept", "commit", "rest")
TURNS = 3


def machine_limits() -> dict[str, float]:
    """Bytes read per second, and flops per second of a large product in bfloat16 or float32, whichever is faster."""
    cache = machine.last_level_cache_bytes()
    return {
        "read_gb_per_s": cpu_timing.read_bandwidth(settings_for("cpu", False, cache), cache) / 1e9,
        "gflop_per_s": max(map(cpu_timing.matmul_rate, (torch.bfloat16, torch.float32))) / 1e9,
    }


def step_parts(model: Any, contender: Contender, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """Milliseconds of each part per call of the model, after the call on the prompt, with the bytes and flops of its limit.

    Each is the median of `TURNS` texts; texts with and without the profiler take turns, and short ones between them.
    """
    ids, timed, profiled, loops = tuple(prompt), list[dict[str, Any]](), list[float](), list[tuple[float, float]]()
    activities = [torch.profiler.ProfilerActivity.CPU]
    for _ in range(TURNS):
        short, long = (
            profile(contender, [Prompt("", "", ids)], length, model.device) for length in (tokens // 4, tokens)
        )
        timed.append(long)
        loops.append(loop_and_once(short, long))
        with counted_rows() as counts, torch.profiler.profile(activities=activities) as profiler:
            contender(ids, tokens)
        counts = counts[1:]
        profiled.append(1e-3 * sum_of_layers(profiler.events(), CALL) / len(counts))
    rows = sum(counts) / len(counts)
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    size, config = model.dtype.itemsize, model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
    layers = median(profiled)
    call = median(times["verify_ms"] for times in timed)
    loop, once = map(median, zip(*loops, strict=True))
    return {
        "calls": len(counts),
        "rows": rows,
        "ms": {
            "layers": layers,
            "small": call - layers,
            "loop": loop,
        },
        "once_ms": once,
        "bytes": {"layers": weights * size + per_token * (len(ids) + tokens / 2)},
        "flops": {"layers": 2 * weights * rows},
    }


def loop_and_once(short: Mapping[str, Any], long: Mapping[str, Any]) -> tuple[float, float]:
    """Milliseconds outside the model, for each call and for each text, from two texts' rows of ``profile``."""
    less, more = (row["calls"] * sum(row[f"{name}_ms"] for name in OUTSIDE) for row in (short, long))
    if long["calls"] <= short["calls"]:
        raise ValueError(
            f"the long text took {long['calls']} calls, the short one {short['calls']}: no slope between them"
        )
    loop = (more - less) / (long["calls"] - short["calls"])
    return loop, more - loop * long["calls"]


def sum_of_layers(events: Any, call: str) -> float:
    """Microseconds of the layers' ops inside the calls of the model, the first call left out: it reads the prompt.

    An op inside another of these ops is part of it and counts once.
    """
    spans = sorted((event.time_range.start, event.time_range.end) for event in events if event.name == call)[1:]
    return sum(
        event.time_range.elapsed_us()
        for event in events
        if LAYERS.search(event.name)
        and not any(LAYERS.search(parent.name) for parent in _above(event))
        and any(begin <= event.time_range.start < end for begin, end in spans)
    )


@contextmanager
def counted_rows() -> Iterator[list[int]]:
    """The rows of every call of the model in this context."""
    from pass_ext.decoding.session.session import Session

    counts: list[int] = []

    def counting(before: Any) -> Any:
        def call(self: Any, trees: Any, ids: Any, *others: Any, **named: Any) -> Any:
            counts.append(len(ids))
            return before(self, trees, ids, *others, **named)

        return call

    with patch.multiple(Session, call=counting(Session.call), call_at=counting(Session.call_at)):
        yield counts


def _above(event: Any) -> Iterator[Any]:
    parent = event.cpu_parent
    while parent is not None:
        yield parent
        parent = parent.cpu_parent
