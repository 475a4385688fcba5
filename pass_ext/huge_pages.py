"""``to_huge_pages``: a model's weights in memory that Linux maps by pages of 2 MiB.

    pages that a call walks through = bytes of the weights / bytes of a page

A decoding step reads every weight once. In the file that transformers maps, a page has 4 KiB: the processor looks up an address
for every 4 KiB, and reads ahead of itself no further.
"""

from __future__ import annotations

import mmap
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)

_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGE = 2 << 20
_ALIGNMENT = 64  # bytes: a cache line
_CONTAINERS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of cgroups v2 and v1, as a container sees its own: the folder, its files of limit and use, and what of the use is files."""


def to_huge_pages(model: Model) -> Model:
    """The model, its parameters in CPU memory moved to huge pages where the system has some; every number stays the same.

    ``load_checkpoint`` does it. For a model that was loaded otherwise, call it before the first generation, and before anything
    keeps the parameters' memory, as other processes and views do.

    Parameters that share their memory with another tensor or process stay, and so do tensor subclasses. All stay where Linux is
    told to use no huge pages, on other systems, and where the machine or the container has not as much memory left as the
    weights take: a mapped file can be dropped from memory, the copy cannot.
    """
    tensors = [*model.parameters(), *model.buffers()]
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors if _is_plain(tensor))
    moved = [
        parameter
        for parameter in model.parameters()
        if _is_plain(parameter)
        and not parameter.is_shared()
        and parameter.is_contiguous()
        and users[parameter.untyped_storage().data_ptr()] == 1
        and parameter.untyped_storage().nbytes() == parameter.nbytes > 0
        and (parameter.data_ptr() % _PAGE or parameter.nbytes < _PAGE)
    ]
    places, size = [], 0
    for parameter in moved:
        places.append(size)
        size += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
    if size < _PAGE or not _has_huge_pages() or size > _free_bytes():
        return model
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a limit of the process, or a kernel without huge pages
        return model
    for parameter, place in zip(moved, places, strict=True):
        copy = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=place)
        parameter.data = copy.view(parameter.shape).copy_(parameter.data)
    return model


def mapped(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Zeros in a mapping of their own, its whole pages of 2 MiB huge ones, where ``to_huge_pages`` leaves them.

    They take memory when they are written to, and the system has it back with the tensor. What ``malloc`` gives stays with the
    process, in pieces between others.
    """
    size, place = shape.numel() * dtype.itemsize, 0
    pages = size // _PAGE if _has_huge_pages() else 0
    memory = mmap.mmap(-1, size + _PAGE * bool(pages), flags=mmap.MAP_PRIVATE)
    if pages:
        place = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _PAGE
        memory.madvise(mmap.MADV_HUGEPAGE, place, pages * _PAGE)
    return torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=place).view(shape)


def _is_plain(tensor: Tensor) -> bool:
    is_ours = type(tensor) in (Tensor, nn.Parameter)
    return is_ours and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _has_huge_pages() -> bool:
    try:
        return "[never]" not in _SWITCH.read_text()
    except OSError:
        return False


def _free_bytes() -> int:
    """Memory that this process can have without swapping, as far as the system says; files in memory count as free."""
    free = [_number("/proc/meminfo", "MemAvailable:") << 10] if Path("/proc/meminfo").exists() else [0]
    for folder, most, used, file in _CONTAINERS:
        with suppress(OSError, ValueError):  # not in such a container, or without a limit
            limit, used_bytes = (int(Path(folder, name).read_text()) for name in (most, used))
            free.append(limit - used_bytes + _number(f"{folder}/memory.stat", file))
    return min(free)


def _number(path: str, name: str) -> int:
    lines = map(str.split, Path(path).read_text().splitlines())
    return next((int(line[1]) for line in lines if line and line[0] == name), 0)
