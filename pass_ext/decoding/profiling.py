"""Named ranges of a decoding step for profilers: ``pass_ext::draft``, ``verify``, ``accept``, ``commit``.

Ranges cost nothing unless a profiler is active.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_NOTHING = nullcontext()


def profiled(name: str) -> AbstractContextManager[object]:
    """The range ``pass_ext::<name>`` while a torch profiler is active or ``PASS_EXT_NVTX=1``, which adds an NVTX range on CUDA;
    otherwise nothing."""
    nvtx = os.environ.get("PASS_EXT_NVTX") == "1"
    if not nvtx and not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return _NOTHING
    return _range(f"pass_ext::{name}", nvtx and torch.cuda.is_available())


@contextmanager
def _range(name: str, nvtx: bool) -> Iterator[None]:
    with torch.profiler.record_function(name), torch.cuda.nvtx.range(name) if nvtx else _NOTHING:
        yield
