"""``torch_is_faster``: whether PyTorch multiplies a step's rows by some weights faster than ``linear_rows`` on this GPU.

    seconds = sum over ROWS of a product's fastest round, in a graph, with weights that come from memory

Measured once for each shape and GPU, then read from disk: another process takes the same products, so a text keeps its bits.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from pass_ext._library import kernels_hash
from pass_ext.checkpoint import cache_folder
from pass_ext.ops import linear  # noqa: F401, which registers the op

_log = logging.getLogger("pass_ext")
_OURS, _TORCHS = torch.ops.pass_ext.linear_rows.default, functional.linear
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
ROWS, _ROUNDS = (1, 16), 7

LAUNCH_BOUND = 8 << 20
"""A lighter weight is read in less time than a launch takes, and the layer ops need fewer launches: it is not measured."""


def torch_is_faster(weights: Sequence[Tensor]) -> bool:
    """True if PyTorch's products are measured faster for these weights together. False on the CPU and for light weights."""
    heavy = [w for w in weights if w.is_cuda and w.nbytes > LAUNCH_BOUND and w.dim() == 2 and w.dtype in FLOATS]
    times = [seconds_of(weight) for weight in heavy]
    return sum(torchs for _, torchs in times) < sum(ours for ours, _ in times)


_measured: dict[str, tuple[float, float]] = {}


def seconds_of(weight: Tensor) -> tuple[float, float]:
    """Seconds by ``linear_rows`` and by PyTorch."""
    gpu = torch.cuda.get_device_name(weight.device)
    key = f"{gpu}, {weight.dtype}, {list(weight.shape)}, torch {torch.__version__}, kernels {kernels_hash('cuda')}"
    if key not in _measured:
        _measured.update(_kept())
    if key not in _measured:
        ours, torchs = (sum(time_product(product, weight, rows) for rows in ROWS) for product in (_OURS, _TORCHS))
        _log.info(
            "a weight %s: %.1f us by linear_rows, %.1f us by PyTorch", list(weight.shape), 1e6 * ours, 1e6 * torchs
        )
        _measured[key] = ours, torchs
        _keep()
    return _measured[key]


@torch.no_grad()
def time_product(product: Callable[[Tensor, Tensor], Tensor], weight: Tensor, rows: int) -> float:
    """Seconds of one product in a graph, of the fastest round. Copies of a light weight push each other out of L2."""
    cached = 2 * torch.cuda.get_device_properties(weight.device).L2_cache_size
    weights = [weight, *(weight.clone() for _ in range(math.ceil(cached / weight.nbytes) - 1))]
    x, graph = weight.new_ones(rows, weight.shape[1]), torch.cuda.CUDAGraph()
    with torch.cuda.device(weight.device):
        product(x, weight)  # loads the kernel, which a capture may not
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for one in weights:
                product(x, one)
        best = math.inf
        for _ in range(_ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3)
    return best / len(weights)


def _path() -> Path:
    return cache_folder() / "products.json"


def _kept() -> dict[str, tuple[float, float]]:
    """The times on disk; none, with a line in the log, if the file is damaged."""
    try:
        return {key: (float(ours), float(torchs)) for key, (ours, torchs) in json.loads(_path().read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _log.warning("times of products in %s cannot be used, measuring again: %s", _path(), error)
        return {}


def _keep() -> None:
    """Writes the times to disk beside those that other processes have written; if it cannot, only logs that."""
    temporary = ""
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=_path().parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(_kept() | _measured, file)
        Path(temporary).replace(_path())
    except OSError as error:
        _log.info("times of products are not kept: %s", error)
        if temporary:
            Path(temporary).unlink(missing_ok=True)
