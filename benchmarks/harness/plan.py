"""``Plan``: the cases of one run, and ``Aim``: a promise judged from its rows."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from benchmarks.harness.cases import Case

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Aim:
    """Something the project promised, judged from the rows of this run."""

    aim: str
    met: bool | None
    """None: this run cannot tell."""
    measured: str


@dataclass(frozen=True)
class Plan:
    """What a bench wants measured for one set of options."""

    labels: list[str]
    """One short line per case, in order: for the progress display."""
    cases: Iterable[Case]
    counts_flops: bool = False
    """Cases tell their fewest flops, so the speed of a large product is measured too."""
    left_out: list[str] = field(default_factory=list)
    """What is not even planned, because it is too large or takes too long."""
