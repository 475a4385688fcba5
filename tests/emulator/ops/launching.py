"""``launch``: runs a function of launches/*.cpp that needs a workspace and counters; and what launches of all ops share.

Each call has another order of threads; every run of the tests has the same orders.
"""

import itertools

import torch
from torch import Tensor

from emulator import session

seeds = itertools.count()
launches = itertools.count()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pointers(buffers: dict[str, tuple[Tensor, str]]) -> dict[str, int]:
    """Where the tensors of a session's buffers lie."""
    return {name: tensor.data_ptr() for name, (tensor, _) in buffers.items()}


COUNTERS = 4096  # kCountersOfSlot of cuda/counters.h


def multiprocessors() -> int:
    """The size of the GPU, in turn so large that all rows are scanned beforehand, and so small that a single block works on
    all requests."""
    return next(launches) % 2 * 100_000


def given(**tensors: Tensor | None) -> dict[str, Tensor]:
    """The tensors that are not None."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def launch(
    name: str, numbers: dict[str, float], inputs: dict[str, Tensor], outputs: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    """Asks `<name>_workspace`, if there is one, for the bytes of the workspace and runs `name`; returns the outputs."""
    numbers |= {key: tensor.data_ptr() for key, tensor in (inputs | outputs).items() if key not in numbers}
    numbers["multiprocessors"] = multiprocessors()
    with session({}) as machine:
        size = getattr(machine, f"{name}_workspace", lambda _: 0)(numbers)
    workspace, counters = torch.empty(size, dtype=torch.uint8), torch.zeros(COUNTERS, dtype=torch.int32)
    numbers |= {"workspace": workspace.data_ptr(), "counters": counters.data_ptr()}
    buffers = {key: (tensor, "in") for key, tensor in inputs.items()}
    buffers |= {key: (tensor, "out") for key, tensor in (outputs | {"workspace": workspace}).items()}
    buffers["counters"] = (counters, "inout")
    with session(buffers, seed=next(seeds)) as machine:
        getattr(machine, name)(numbers)
    assert not counters.any(), "the counters are not zero again"
    return tuple(outputs.values())
