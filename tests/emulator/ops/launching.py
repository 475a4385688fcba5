"""What every op on the emulator shares: a fresh order of threads per call, and launches whose numbers go by name.

The order of threads differs from call to call and is the same in every run of the tests.
"""

import itertools

import torch
from torch import Tensor

from emulator import session

seeds = itertools.count()
launches = itertools.count()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


COUNTERS = 2048


def multiprocessors() -> int:
    """Launches in turn find a GPU so large that all rows are scanned beforehand, and one so small that a single block works
    on all requests."""
    return next(launches) % 2 * 100_000


def given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def launch(name: str, numbers: dict[str, int], inputs: dict[str, Tensor], outputs: dict[str, Tensor], *rest: float):
    numbers |= {key: tensor.data_ptr() for key, tensor in (inputs | outputs).items() if key not in numbers}
    numbers["multiprocessors"] = multiprocessors()
    with session({}) as machine:
        size = getattr(machine, f"{name}_workspace")(numbers)
    workspace, counters = torch.empty(size, dtype=torch.uint8), torch.zeros(COUNTERS, dtype=torch.int32)
    numbers |= {"workspace": workspace.data_ptr(), "counters": counters.data_ptr()}
    buffers = {key: (tensor, "in") for key, tensor in inputs.items()}
    buffers |= {key: (tensor, "out") for key, tensor in (outputs | {"workspace": workspace}).items()}
    buffers["counters"] = (counters, "inout")
    with session(buffers, seed=next(seeds)) as machine:
        getattr(machine, name)(numbers, *rest)
    assert not counters.any(), "the counters are not zero again"
    return tuple(outputs.values())
