"""``Case``: one line of a benchmark's table, with its contenders and inputs; ``Settings`` and ``Rates`` of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
Sample = Callable[[], float]  # takes one sample, in seconds


@dataclass(frozen=True)
class Contender:
    """One way to do the job; called with a case's inputs."""

    name: str
    function: Callable[..., Any]
    capturable: bool = True
    """A CUDA graph can record it: fixed shapes, no waiting for the GPU."""
    same_job: bool = True
    """False: shown for comparison, but it gets other inputs or does less, so it is neither checked nor raced."""


@dataclass(frozen=True)
class Case:
    """One line of the table. The first contender is ours."""

    labels: Mapping[str, str | int]
    contenders: Sequence[Contender]
    inputs: Sequence[tuple[Any, ...]]
    """Sets of arguments. Warm cache: the first, always. Cold cache: all in turn."""
    fewest_bytes: int | Sequence[int] | None = None
    """What one call must read and write at least: every byte once. Several: for each set of inputs its own."""
    grad: bool = False
    check_inputs: tuple[Any, ...] | None = None
    """Arguments on which the contenders must agree to the bit; default: the first and the last of `inputs`."""
    check: Callable[["Case"], None] | None = None
    """Instead of agreement to the bit, where contenders draw random numbers of their own: raises if they do other jobs."""
    reads: bool = False
    """The job reads much and writes next to nothing, so its rows are also held against the bandwidth of reading."""
    fewest_flops: int | None = None
    """What one call must multiply and add at least. With it rows are held against the limit: the longer of reading the
    fewest bytes and computing the fewest flops."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Contenders that are not timed on this line, and why: each gets a row without a number."""


@dataclass(frozen=True)
class Settings:
    """How long and how often; the `settings` entry of every result."""

    device: str
    quick: bool
    budget_seconds: float
    """For the rounds of one line; cold lines get three times as much, because emptying the cache takes most of it."""
    fewest_rounds: int
    most_rounds: int
    sweep_bytes: int
    """What is read between two cold samples."""
    seed: int = 0


def settings_for(device: str, quick: bool, last_level_cache: int) -> Settings:
    """The defaults. A cold sweep reads one and a half times the last-level cache, and on a GPU at least 512 MiB."""
    if quick:
        return Settings(device, quick, 0.1, fewest_rounds=5, most_rounds=200, sweep_bytes=64 * 2**20)
    sweep = max(512 * 2**20 if device == "cuda" else 64 * 2**20, last_level_cache * 3 // 2)
    budget = 0.8 if device == "cuda" else 2.0
    return Settings(device, quick, budget, fewest_rounds=21, most_rounds=5000, sweep_bytes=sweep)


@dataclass(frozen=True)
class Rates:
    """What the machine does at best, measured in this run; bytes per second on buffers that no cache holds."""

    copy: float
    """Read plus written."""
    read: float
    matmul: Mapping[str, float] = field(default_factory=dict)
    """Flops per second of a large product, by type of its elements; empty where a bench counts no flops."""

    def fewest_seconds(self, moved: int, flops: int) -> float:
        """The limit: nobody reads faster than the faster of reading and copying, or computes faster than the fastest
        product, of the inputs as they are or converted."""
        return max(moved / max(self.copy, self.read), flops / max(self.matmul.values()))
