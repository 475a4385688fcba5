"""Compares the ranks' arguments in debug mode: ranks that disagree would wait for each other, or decide differently."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pass_ext import _library
from pass_ext.distributed.exchange import Gather, Steps

_LOCAL = ("rank", "target_logits", "draft_logits", "allowed", "draft_allowed", "logits")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def agreed(op: str, arguments: Mapping[str, Any]) -> Steps[None]:
    """Raises ValueError on every rank if a rank's arguments are not those of rank 0; names both. Does nothing outside debug
    mode. One exchange of 8 bytes for each argument."""
    if not _library.debug_enabled():
        return
    prints = _fingerprints(arguments)
    device = next(value for value in arguments.values() if isinstance(value, Tensor)).device
    everyone = (yield Gather(torch.tensor(list(prints.values()), device=device))).tolist()
    for rank, others in enumerate(everyone):
        for name, first, other in zip(prints, everyone[0], others, strict=True):
            if first != other:
                raise ValueError(
                    f"pass_ext.distributed.{op}: {name} must be the same on all ranks, got another on rank {rank} than on "
                    "rank 0"
                )


def _fingerprints(arguments: Mapping[str, Any]) -> dict[str, int]:
    """One number for each argument, and for the shape and dtype of those whose columns differ from rank to rank."""
    prints = {}
    for name, value in arguments.items():
        if name in ("target", "draft"):
            prefix = "" if name == "target" else "draft_"
            prints.update({prefix + part: _hash(number) for part, number in zip(_SAMPLING, value, strict=True)})
        elif name in _LOCAL[1:]:
            described = None if value is None else (str(value.dtype), tuple(value.shape[:-1]))
            prints[f"the shape or dtype of {name}"] = _hash(described)
        elif name == "layout":
            prints["vocab_start or vocab_size"] = _hash(value)
        elif name != "rank":
            prints[name] = _hash(value)
    return prints


def _hash(value: Any) -> int:
    if isinstance(value, Tensor):
        return zlib.crc32(repr((str(value.dtype), tuple(value.shape), value.tolist())).encode())
    return zlib.crc32(repr(value).encode())
