"""How one sample is taken on the CPU: one call between two reads of the clock, with the caches warm or swept."""

import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from benchmarks.harness.cases import Case, Sample, Settings

HOW = "call"


def samplers(case: Case, settings: Settings) -> Iterator[tuple[tuple[str, str], dict[str, Sample]]]:
    """For each way to measure, (how, cache), a sampler per contender."""
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
            sweep()  # as between two steps of a decoder: a model's worth of bytes has gone through every cache
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
    """Bytes per second that the best of torch's reductions reads, from a buffer of twice the last-level cache's size."""
    size = 64 * 2**20 if settings.quick else max(512 * 2**20, 2 * last_level_cache)
    source = torch.ones(size // 4)
    return size / min(_median_time(read, settings) for read in (source.sum, source.max, lambda: source.dot(source)))


def matmul_rate(dtype: torch.dtype) -> float:
    """Flops per second of the product of two square matrices, the fastest of all: nobody is held against a limit that a
    busy machine has lowered."""
    size = 1024
    one, other = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / min(_times(lambda: one @ other, 25))


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
    """What an empty call costs between two reads of the clock: contained in every CPU number, never subtracted."""
    sample = _sampler(lambda: None, itertools.repeat(()))
    return median(sample() for _ in range(2001))
