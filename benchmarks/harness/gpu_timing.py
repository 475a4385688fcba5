"""Takes one sample on a GPU, in two ways.

graph    many calls in one CUDA graph between two events, caches warm or flushed: the GPU's time per call
eager    a Python loop of calls between two events: mostly the host's launch work
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.cases import Case, Contender, Sample, Settings

MOST_CALLS = 64
BYTES_PER_REPLAY = 4 * 10**9
EAGER_CALLS = 32
LEAST_HEAD_START, MOST_CLOCK = 100e-6, 2.1e9  # seconds; cycles of a GPU in one of them


def samplers(case: Case, settings: Settings) -> Iterator[tuple[tuple[str, str], dict[str, Sample]]]:
    """Yields ``(how, cache)`` and a sampler per contender. A contender that no graph can record runs eagerly only."""
    calls = MOST_CALLS
    moved = case.fewest_bytes
    if moved:
        calls = max(8, min(MOST_CALLS, BYTES_PER_REPLAY // (moved if isinstance(moved, int) else max(moved))))
    capturable = [contender for contender in case.contenders if contender.capturable]
    warm = [case.inputs[0]]
    yield ("graph", "warm"), _graph_samplers(capturable, warm, calls, None)
    flush = torch.ones(settings.sweep_bytes // 4, device="cuda")
    # Each call of a replay has its own inputs, and the flush before the replay makes all of them cold.
    calls = min(calls, len(case.inputs))
    yield ("graph", "cold"), _graph_samplers(capturable, case.inputs, calls, flush)
    yield ("eager", "warm"), {c.name: _eager_sampler(c, case.inputs[0]) for c in case.contenders}


def _graph_samplers(
    contenders: Sequence[Contender], inputs: Sequence[tuple[Any, ...]], calls: int, flush: Tensor | None
) -> dict[str, Sample]:
    """A sampler for each contender that can be captured. Ours, the first, must be; another one's failure is printed."""
    samplers = {}
    for contender in contenders:
        try:
            samplers[contender.name] = graph_sampler(contender.function, inputs, calls, flush)
        except RuntimeError as error:
            if contender is contenders[0]:
                raise
            print(f"{contender.name} in no CUDA graph: {str(error).splitlines()[0]}", file=sys.stderr)
            torch.cuda.synchronize()
    return samplers


def graph_sampler(
    function: Callable[..., object], inputs: Sequence[tuple[Any, ...]], calls: int, flush: Tensor | None = None
) -> Sample:
    """Seconds of a call in a graph of `calls` calls. Before each replay `flush` is read; None: the graph runs once more."""
    graph = capture(function, inputs, calls)
    ahead = head_start(graph.replay)
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        if flush is None:
            graph.replay()
        else:
            flush.sum()  # a read: a write would leave dirty lines, and the contender would pay for their write-back
        torch.cuda._sleep(ahead)
        started.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return started.elapsed_time(ended) * 1e-3 / calls

    return sample


def capture(function: Callable[..., object], inputs: Sequence[tuple[Any, ...]], calls: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `calls` calls in a row, over the sets of inputs in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # load modules, create handles, fill the allocator
        for arguments in inputs[:3]:
            function(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in range(calls):
            function(*inputs[call % len(inputs)])
    torch.cuda.synchronize()
    return graph


def head_start(queue: Callable[[], object]) -> int:
    """Clock cycles that the GPU must sleep until the host has queued a sample: an event on an idle stream would time the host.

    Three times what queueing takes, for a graph of many kernels takes the host longer than one launch.
    """
    seconds = []
    for _ in range(3):  # the first time uploads the graph
        torch.cuda.synchronize()
        begun = time.perf_counter()
        queue()
        seconds.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    return int(MOST_CLOCK * max(LEAST_HEAD_START, 3 * min(seconds)))


def _eager_sampler(contender: Contender, arguments: tuple[Any, ...]) -> Sample:
    function = contender.function
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        torch.cuda.synchronize()
        started.record()
        for _ in range(EAGER_CALLS):
            function(*arguments)
        ended.record()
        ended.synchronize()
        return started.elapsed_time(ended) * 1e-3 / EAGER_CALLS

    return sample


def copy_bandwidth(settings: Settings, last_level_cache: int) -> float:
    """Bytes read plus bytes written per second by a copy on the device, between buffers far larger than the L2."""
    source = torch.ones(_large(settings, last_level_cache) // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / _median_time(lambda: target.copy_(source), settings)


def read_bandwidth(settings: Settings, last_level_cache: int) -> float:
    """Bytes per second of the faster of two reductions by torch, over a buffer far larger than the L2."""
    source = torch.ones(_large(settings, last_level_cache) // 4, device="cuda")
    return source.numel() * 4 / min(_median_time(read, settings) for read in (source.sum, source.max))


def matmul_rate(dtype: torch.dtype) -> float:
    """Flops per second of the product of two square matrices, by the fastest sample."""
    size = 4096
    left, right = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    torch.mm(left, right)  # creates the library's handle
    return 2 * size**3 / min(_times(lambda: torch.mm(left, right), 25))


def _large(settings: Settings, last_level_cache: int) -> int:
    return max(64 * 2**20 if settings.quick else 1 << 30, 4 * last_level_cache)


def _median_time(function: Callable[[], object], settings: Settings) -> float:
    return median(_times(function, 5 if settings.quick else 25))


def _times(function: Callable[[], object], count: int) -> list[float]:
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times, ahead = [], head_start(function)
    for _ in range(count):
        torch.cuda._sleep(ahead)
        started.record()
        function()
        ended.record()
        ended.synchronize()
        times.append(started.elapsed_time(ended) * 1e-3)
    return times


def count_kernels(function: Callable[..., object], arguments: tuple[Any, ...]) -> int | None:
    """The number of kernels and device copies of one call; None where the profiler sees no GPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    function(*arguments)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        function(*arguments)
        torch.cuda.synchronize()
    launched = sum(1 for event in trace.events() if event.device_type == DeviceType.CUDA)
    return launched or None
