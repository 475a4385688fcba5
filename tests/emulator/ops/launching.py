"""``emulated``: an op of csrc/cuda/*.cu on the emulator; and what the launches of all ops share.

Each call has another order of threads; every run of the tests has the same orders.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from emulator import NAMESPACE, session

seeds = itertools.count()
launches = itertools.count()
COUNTERS = 4096  # kCounters of engine.h


def multiprocessors() -> int:
    """The size of the GPU, in turn so large that all rows are scanned beforehand, and so small that a single block works on
    all requests."""
    return next(launches) % 2 * 100_000


def emulated(name: str) -> Callable[..., Any]:
    """The op of this name: its host code says which bytes its kernels may touch."""

    def run(*arguments: Any, **named: Any) -> Any:
        with session({}, seed=next(seeds)) as machine:
            machine.set_multiprocessors(multiprocessors())
            results = getattr(getattr(torch.ops, NAMESPACE), name)(*arguments, **named)
            assert machine.counters_are_zero(), "the counters are not zero again"
        return results

    return run


def given(**tensors: Tensor | None) -> dict[str, Tensor]:
    """The tensors that are not None."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
