"""Converts a launch's critical path to microseconds.

    time = launch + sum over events (count * cycles) / clock

once with every constant low and once with every constant high. Rows of logits and the cache are also read at the memory's
bandwidth: the low time is the longer of path and bytes, the high time their sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.kernel_code.bounds import BANDWIDTH, CLOCK


class Range(NamedTuple):
    """A number's lower and upper bound."""

    low: float
    high: float

    def __add__(self, other: Range) -> Range:  # type: ignore[override]
        return Range(self.low + other.low, self.high + other.high)


class Cost(NamedTuple):
    """Cycles of one event, and their source."""

    low: float
    high: float
    source: str


COSTS = {
    "instruction": Cost(2, 4, "one warp alone; half of its instructions, or all, wait 4 cycles for the one before "
                        "(Jia et al., Dissecting the NVIDIA Volta GPU Architecture, arXiv:1804.06826)"),
    "memory_load": Cost(690, 1_584, "GH200, measured (github.com/markdewing/AI_kernels, latency); 0.8 µs under load, assumed"),
    "l2_load": Cost(281, 594, "GH200, same source; 0.3 µs is assumed for the far half under load"),
    "l1_load": Cost(40, 40, "GH200, same source"),
    "shared_load": Cost(24, 33, "assumed, around the 29 cycles of Hopper (Luo et al., arXiv:2402.13499)"),
    "shared_atomic": Cost(33, 100, "assumed: a load and a store; four lanes on one word"),
    "warp_operation": Cost(22, 30, "assumed, around a shuffle on Volta (arXiv:1804.06826)"),
    "block_barrier": Cost(20, 60, "assumed"),
    "fence": Cost(281, 1_188, "assumed: one round trip to L2, or two slow ones"),
    "atomic": Cost(281, 594, "assumed: equal to a load from L2"),
    "matrix_product": Cost(16, 33, "33 cycles alone (arXiv:2402.13499), two side by side"),
}  # fmt: skip
"""Event of tests/emulator/critical_path.h -> its cost. A GPU run should correct the assumed costs."""
LAUNCH = Range(1.0, 2.0)
"""Microseconds of a launch in a CUDA graph: from the end of the kernel before it to its first instruction, and its end.
Assumed."""
PORT = Range(64.0, 32.0)
"""Bytes that a multiprocessor reads from L2 in a cycle, for the low time and for the high. Assumed: two sectors of 32 bytes,
and one."""
COLD = Range(0.0, 100.0)
"""Cycles for each 128 bytes of code that run for the first time, a cost stated apart. Low: an instruction cache holds them.
High: a third of a load from L2, as if the next lines came along. Assumed."""
INSTRUCTIONS_OF_LINE = 8


def middle(event: str) -> float:
    """The cycles that the emulator uses to choose the longest path: the geometric mean of low and high."""
    return (COSTS[event].low * COSTS[event].high) ** 0.5


def time_of(least: Mapping[str, float], most: Mapping[str, float], per_host: Range) -> Range:
    """Microseconds of a path. ``per_host``: GPU instructions per instruction of the emulator."""

    def sum_of(counts: Mapping[str, float], side: int) -> float:
        cycles = sum(count * COSTS[event][side] for event, count in counts.items() if event != "instruction")
        return 1e6 / CLOCK * (cycles + counts["instruction"] * per_host[side] * COSTS["instruction"][side])

    return Range(sum_of(least, 0), sum_of(most, 1))


def difference(whole: Mapping[str, int], begin: Mapping[str, int]) -> dict[str, int]:
    """The events of a path behind its beginning."""
    return {event: max(count - begin.get(event, 0), 0) for event, count in whole.items()}


def with_bytes(path: Range, count: float) -> Range:
    """The time of a path during which ``count`` bytes come from memory."""
    byte_time = 1e6 * count / BANDWIDTH
    return Range(max(path.low, byte_time), path.high + byte_time)


def cold_code(launches: list[dict[str, Any]], per_host: Range) -> float:
    """The most microseconds that code costs if no cache holds it."""
    instructions = sum(launch["code"] for launch in launches) * per_host.high
    return 1e6 / CLOCK * COLD.high * instructions / INSTRUCTIONS_OF_LINE
