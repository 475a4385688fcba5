"""``EMULATED``: the backend whose ops are csrc/cuda/*.cu on the emulator, CPU tensors in and out. ``on_gpu``: on which GPU.

Each call has another order of threads; every run of the tests has the same orders.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from emulator import NAMESPACE, session
from pass_ext import _library
from pass_ext.testing import rerouted_backend

# In turn so small that a single block works on all requests, and so large that all rows are scanned beforehand.
sizes = itertools.cycle((0, 100_000))
# Attention shares its keys among all blocks that run at once.
attention_sizes = itertools.cycle((7, 1, 16, 3))
seeds = itertools.count()


class Gpu(NamedTuple):
    """What the calls run on; None: another one in each call."""

    multiprocessors: int | None = None
    resident_blocks: int = 1
    """Of a kernel on a multiprocessor, where its launch asks."""
    seed: int | None = None
    """Of the order of threads."""


_gpu: ContextVar[Gpu] = ContextVar("gpu")


@contextmanager
def on_gpu(**gpu: int) -> Iterator[None]:
    """Calls inside run on this ``Gpu``."""
    token = _gpu.set(Gpu(**gpu))
    try:
        yield
    finally:
        _gpu.reset(token)


def emulated(name: str) -> Callable[..., Any]:
    """The op of this name: its host code says which bytes its kernels may touch."""

    def run(*arguments: Any, **named: Any) -> Any:
        count, resident_blocks, seed = _gpu.get(Gpu())
        if count is None:
            count = next(attention_sizes if name == "attention_tree" else sizes)
        with session({}, seed=next(seeds) if seed is None else seed) as machine:
            machine.set_gpu(count, resident_blocks)
            results = getattr(getattr(torch.ops, NAMESPACE), name)(*arguments, **named)
            assert machine.counters_are_zero(), "the counters are not zero again"
        return results

    return run


EMULATED = rerouted_backend(
    "emulated", {name: emulated(name) for name in _library.op_names() if name not in _library.CPU_ONLY}
)
