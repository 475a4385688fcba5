"""The parts of a step, and the machine's limits that they are compared with.

    products     the model's linear layers, and norms, rotations and gates in the same op:
                 max(bytes of the weights / read bandwidth, flops / peak)
    attention    bytes of keys and values / read bandwidth
    small        everything else in the model's call
    loop         draft, accept, commit, and the loop itself

Products and attention are sums of their ops under torch's profiler; the call and the loop are timed without it.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.decoding.contenders import GREEDY
from benchmarks.decoding.prompts import Prompt
from benchmarks.decoding.steps import profile
from benchmarks.harness import cpu_timing, machine
from benchmarks.harness.cases import Contender, settings_for

PRODUCTS = re.compile(r"linear|::mm\b|addmm|matmul|::bmm|gemm|pass_ext::layer_")
ATTENTION = re.compile(r"attention")  # of the names that PRODUCTS does not hold
CALL = "pass_ext::verify"
TURNS = 3


def machine_limits() -> dict[str, float]:
    """Bytes read per second, and flops per second of a large product in bfloat16 or float32, whichever is faster."""
    cache = machine.last_level_cache_bytes()
    return {
        "read_gb_per_s": cpu_timing.read_bandwidth(settings_for("cpu", False, cache), cache) / 1e9,
        "gflop_per_s": max(map(cpu_timing.matmul_rate, (torch.bfloat16, torch.float32))) / 1e9,
    }


def step_parts(model: Any, contender: Contender, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """Milliseconds of each part per call of the model, behind the call on the prompt, with the bytes and flops of its limit.

    Each is the median of `TURNS` texts; texts with and without the profiler take turns.
    """
    ids, timed, profiled = tuple(prompt), list[dict[str, Any]](), list[dict[str, float]]()
    activities = [torch.profiler.ProfilerActivity.CPU]
    for _ in range(TURNS):
        timed.append(profile(contender, [Prompt("", "", ids)], GREEDY, tokens, model.device))
        with counted_rows() as counts, torch.profiler.profile(activities=activities) as profiler:
            contender(ids, GREEDY, 0, tokens)
        counts = counts[1:]
        profiled.append({name: sum_ / len(counts) for name, sum_ in sums_of_ops(profiler.events(), CALL).items()})
    rows = sum(counts) / len(counts)
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    size, config = model.dtype.itemsize, model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
    products, attention = (1e-3 * median(sums[name] for sums in profiled) for name in ("products", "attention"))
    call, draft, accept, commit, rest = (
        median(times[f"{name}_ms"] for times in timed) for name in ("verify", "draft", "accept", "commit", "rest")
    )
    return {
        "calls": len(counts),
        "rows": rows,
        "ms": {
            "products": products,
            "attention": attention,
            "small": call - products - attention,
            "loop": draft + accept + commit + rest,
        },
        "bytes": {"products": weights * size, "attention": per_token * (len(ids) + tokens / 2)},
        "flops": {"products": 2 * weights * rows},
    }


def sums_of_ops(events: Any, call: str) -> dict[str, float]:
    """Microseconds of products and of attention inside the calls of the model, the first call left out: it reads the prompt.

    An op inside another of these ops is part of it and counts once.
    """
    spans = sorted((event.time_range.start, event.time_range.end) for event in events if event.name == call)[1:]
    sums = {"products": 0.0, "attention": 0.0}
    for event in events:
        kind = _kind(event.name)
        if kind is None or any(_kind(parent.name) for parent in _above(event)):
            continue
        if any(begin <= event.time_range.start < end for begin, end in spans):
            sums[kind] += event.time_range.elapsed_us()
    return sums


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


def _kind(name: str) -> str | None:
    if PRODUCTS.search(name):
        return "products"
    return "attention" if ATTENTION.search(name) else None


def _above(event: Any) -> Iterator[Any]:
    parent = event.cpu_parent
    while parent is not None:
        yield parent
        parent = parent.cpu_parent
