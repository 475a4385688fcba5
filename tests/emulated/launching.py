"""What every op on the emulator shares: a fresh order of threads per call, and launches whose numbers go by name.

The order of threads differs from call to call and is the same in every run of the tests.
"""

import itertools

import torch
from emulator import session
from torch import Tensor

seeds = itertools.count()
launches = itertools.count()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def multiprocessors() -> int:
    """Every other launch finds a GPU so large that all rows are summarised beforehand, the others one that has no room."""
    return next(launches) % 2 * 100_000


def given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def launch(name: str, numbers: dict[str, int], inputs: dict[str, Tensor], outputs: dict[str, Tensor], *rest: float):
    numbers |= {key: tensor.data_ptr() for key, tensor in (inputs | outputs).items() if key not in numbers}
    numbers["multiprocessors"] = multiprocessors()
    with session({}) as machine:
        size = getattr(machine, f"{name}_workspace")(numbers)
    workspace = torch.empty(size, dtype=torch.uint8)
    numbers["workspace"] = workspace.data_ptr()
    buffers = {key: (tensor, "in") for key, tensor in inputs.items()}
    buffers |= {key: (tensor, "out") for key, tensor in (outputs | {"workspace": workspace}).items()}
    with session(buffers, seed=next(seeds)) as machine:
        getattr(machine, name)(numbers, *rest)
    return tuple(outputs.values())
