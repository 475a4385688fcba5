"""Takes one sample on the CPU: one call between two reads of the clock, with caches warm or swept."""

import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from benchmarks.harness.cases import Case, Sample, Settings

HOW = "call"


def samplers(case: Case, settings: Settings) -> Iterator[tuple[tuple[str, str], dict[str, Sample]]]:
    """Yields ``(how, cache)`` and a sampler per contender, for warm and for cold caches."""
    first = case.inputs[0]
    yield (HOW, "warm"), {c.name: _sampler(c.function, itertools.repeat(first)) for c in case.contenders}
    swept = torch.ones(settings.sweep_bytes // 4)
    yield (
        (HOW, "cold"),
        {c.name: _sampler(c.function, itertools.cycle(case.inputs), swept.sum) for c in case.contenders},
    )


def _sampler(
    function: Callable[..., object], inputs: Iterator[tuple[object, ...]], sweep: Callable[[], object] | None = None
) -> Sample:
    clock = time.perf_counter_ns

    def sample() -> float:
        arguments = next(inputs)
        if sweep is not None:
            sweep()  # between two steps of a decoder the bytes of a whole model pass through every cache
        started = clock()
        function(*arguments)
        return (clock() - started) * 1e-9

    return sample


def copy_bandwidth(settings: Settings, last_level_cache: int) -> float:
    """Bytes read plus written per second by `tensor.copy_`, between two buffers of the last-level cache's size."""
    size = 32 * 2**20 if settings.quick else max(256 * 2**20, last_level_cache)
    source, target = torch.ones(size // 4), torch.ones(size // 4)
    return 2 * source.numel() * source.element_size() / _median_time(lambda: target.copy_(source), settings)


def read_bandwidth(settings: Settings, last_level_cache: int) -> float:
    """Bytes per second of the fastest of three reductions by torch, over a buffer of twice the last-level cache's size."""
    size = 64 * 2**20 if settings.quick else max(512 * 2**20, 2 * last_level_cache)
    source = torch.ones(size // 4)
    return size / min(_median_time(read, settings) for read in (source.sum, source.max, lambda: source.dot(source)))


def matmul_rate(dtype: torch.dtype) -> float:
    """Flops per second of the product of two square matrices. The fastest sample counts: a busy machine must not lower the
    limit."""
    size = 1024
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / min(_times(lambda: left @ right, 25))


def _median_time(function: Callable[[], object], settings: Settings) -> float:
    return median(_times(function, 5 if settings.quick else 25))


def _times(function: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return times


def clock_overhead() -> float:
    """Seconds of an empty call between two reads of the clock. Every CPU number contains them."""
    sample = _sampler(lambda: None, itertools.repeat(()))
    return median(sample() for _ in range(2001))
