"""``Contender``, ``Case``, ``Settings``, ``Rates``: who is measured, on which inputs, how long, and the machine's speeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]  # of a result in JSON
Sample = Callable[[], float]  # takes one sample, in seconds
OURS = "pass_ext"
"""The name of our contender in every op benchmark."""


@dataclass(frozen=True)
class Contender:
    """One way to do a job: a name, and a function of the job's inputs."""

    name: str
    function: Callable[..., Any]
    capturable: bool = True
    """True if a CUDA graph can record it: fixed shapes, no waiting for the GPU."""
    same_job: bool = True
    """False: it gets other inputs or does less. Its time is shown for comparison; it is not checked and sets no gain."""

    def __call__(self, *inputs: Any) -> Any:
        """Calls the function. Timing code calls ``function`` itself, without this step."""
        return self.function(*inputs)


@dataclass(frozen=True)
class Case:
    """One line of a table: labels, contenders (ours first) and inputs."""

    labels: Mapping[str, str | int]
    contenders: Sequence[Contender]
    inputs: Sequence[tuple[Any, ...]]
    """Sets of arguments. With warm caches the first set is used every time, with cold caches all sets in turn."""
    check: Callable[["Case"], None]
    """Raises if a contender does another job; before the case is measured."""
    fewest_bytes: int | Sequence[int] | None = None
    """Bytes that one call must read and write, each once; a sequence: for each set of inputs."""
    reads: bool = False
    """True for a job that writes next to nothing: its rows are compared with the read bandwidth too."""
    fewest_flops: int | None = None
    """Flops that one call must compute. With it rows are compared with the limit: the longer of reading the fewest bytes and
    computing the fewest flops."""
    flops_dtype: str | None = None
    """The type in which the flops are computed whatever the inputs' is; None: the faster of theirs and float32."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Contender -> the reason why it is not timed on this line; its row has no number."""


@dataclass(frozen=True)
class Settings:
    """Numbers of rounds, time budget and cache sweep of a run: the `settings` entry of its result."""

    device: str
    quick: bool
    budget_seconds: float
    """For the rounds of one line. Cold lines get three times as much: sweeping the caches takes most of it."""
    fewest_rounds: int
    most_rounds: int
    sweep_bytes: int
    """Bytes read between two cold samples."""
    seed: int = 0


def settings_for(device: str, quick: bool, last_level_cache: int) -> Settings:
    """The settings of a run. A cold sweep reads 1.5 times the last-level cache, on a GPU at least 512 MiB."""
    if quick:
        return Settings(device, quick, 0.1, fewest_rounds=5, most_rounds=200, sweep_bytes=64 * 2**20)
    sweep = max(512 * 2**20 if device == "cuda" else 64 * 2**20, last_level_cache * 3 // 2)
    budget = 0.8 if device == "cuda" else 2.0
    return Settings(device, quick, budget, fewest_rounds=21, most_rounds=5000, sweep_bytes=sweep)


@dataclass(frozen=True)
class Rates:
    """The machine's own speeds, measured in the same run: bytes per second on buffers that no cache holds."""

    copy: float
    """Read plus written."""
    read: float
    matmul: Mapping[str, float] = field(default_factory=dict)
    """Type -> flops per second of a large product; empty where a benchmark counts no flops."""

    def fewest_seconds(self, moved: int, flops: int, dtype: str | None = None) -> float:
        """The limit of a job: its bytes at the faster of reading and copying, or its flops at the fastest product in that
        type (None: in any), whichever takes longer."""
        rate = self.matmul[dtype] if dtype else max(self.matmul.values())
        return max(moved / max(self.copy, self.read), flops / rate)
