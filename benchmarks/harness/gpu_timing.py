"""How one sample is taken on a GPU: many calls in one CUDA graph, timed by events, caches warm or flushed; and eagerly.

Graph replay gives the GPU's own time per call; eager gives what a Python loop sees, mostly the host's launch work. Both
are reported.
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
    """For each way to measure, (how, cache), a sampler per contender. What no graph can hold runs eagerly only."""
    calls = MOST_CALLS
    moved = case.fewest_bytes
    if moved:
        calls = max(8, min(MOST_CALLS, BYTES_PER_REPLAY // (moved if isinstance(moved, int) else max(moved))))
    capturable = [contender for contender in case.contenders if contender.capturable]
    warm = [case.inputs[0]]
    yield ("graph", "warm"), _graph_samplers(capturable, warm, calls, None)
    flush = torch.ones(settings.sweep_bytes // 4, device="cuda")
    # Every call of a replay has inputs of its own; the flush before the replay makes all of them cold.
    calls = min(calls, len(case.inputs))
    yield ("graph", "cold"), _graph_samplers(capturable, case.inputs, calls, flush)
    yield ("eager", "warm"), {c.name: _eager_sampler(c, case.inputs[0]) for c in case.contenders}


def _graph_samplers(
    contenders: Sequence[Contender], inputs: Sequence[tuple[Any, ...]], calls: int, flush: Tensor | None
) -> dict[str, Sample]:
    """One for each that can be captured. Ours, the first, must be; somebody else's failure is told and has no number."""
    samplers = {}
    for contender in contenders:
        try:
            samplers[contender.name] = _graph_sampler(contender, inputs, calls, flush)
        except RuntimeError as error:
            if contender is contenders[0]:
                raise
            print(f"{contender.name} in no CUDA graph: {str(error).splitlines()[0]}", file=sys.stderr)
            torch.cuda.synchronize()
    return samplers


def _graph_sampler(contender: Contender, inputs: Sequence[tuple[Any, ...]], calls: int, flush: Tensor | None) -> Sample:
    graph = capture(contender.function, inputs, calls)
    ahead = head_start(graph.replay)
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        if flush is None:
            graph.replay()
        else:
            flush.sum()  # reading leaves no dirty lines whose write-back would be charged to the contender
        torch.cuda._sleep(ahead)
        started.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return started.elapsed_time(ended) * 1e-3 / calls

    return sample


def capture(function: Callable[..., object], inputs: Sequence[tuple[Any, ...]], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls in a row, over the sets of inputs in turn; results are dropped as in a loop."""
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
    """Cycles for which the GPU must sleep so that the host has queued all of this before the GPU comes to it: an event on a
    starved stream would time the host. A graph with many kernels takes the host longer than one launch does.
    """
    took = []
    for _ in range(3):  # the first time uploads the graph
        torch.cuda.synchronize()
        begun = time.perf_counter()
        queue()
        took.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    return int(MOST_CLOCK * max(LEAST_HEAD_START, 3 * min(took)))


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
    """Bytes read plus bytes written per second by a device-to-device copy, both buffers far larger than the L2."""
    source = torch.ones(_large(settings, last_level_cache) // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / _median_time(lambda: target.copy_(source), settings)


def read_bandwidth(settings: Settings, last_level_cache: int) -> float:
    """Bytes per second that the better of torch's reductions reads, from a buffer far larger than the L2."""
    source = torch.ones(_large(settings, last_level_cache) // 4, device="cuda")
    return source.numel() * 4 / min(_median_time(read, settings) for read in (source.sum, source.max))


def matmul_rate(dtype: torch.dtype) -> float:
    """Flops per second of the product of two square matrices, the fastest of all."""
    size = 4096
    one, other = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    torch.mm(one, other)  # creates the library's handle
    return 2 * size**3 / min(_times(lambda: torch.mm(one, other), 25))


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
    """How many kernels and device copies one call launches; None where the profiler sees no GPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    function(*arguments)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        function(*arguments)
        torch.cuda.synchronize()
    launched = sum(1 for event in trace.events() if event.device_type == DeviceType.CUDA)
    return launched or None
