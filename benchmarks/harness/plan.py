"""``Plan``: the cases of one run. ``Aim``: a promise, judged from the run's rows."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from benchmarks.harness.cases import Case

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Aim:
    """A promise of the project, and what the rows of a run say about it."""

    aim: str
    met: bool | None
    """None: the rows of this run do not tell."""
    measured: str


@dataclass(frozen=True)
class Plan:
    """The cases that a benchmark measures with given options."""

    labels: list[str]
    """A short line per case, in order, for the progress display."""
    cases: Iterable[Case]
    counts_flops: bool = False
    """True if cases have `fewest_flops`: then the speed of a large product is measured too."""
    left_out: list[str] = field(default_factory=list)
    """Cases that are not planned: too large, or too slow."""
