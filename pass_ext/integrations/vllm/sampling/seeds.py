"""``seed_of``: the seed of one request of vLLM, which stays the same for the request's life."""

from __future__ import annotations

from typing import Any

import torch

_FRESH = "pass_ext_seed"


def seed_of(request: Any) -> int:
    """The user's seed, or a fresh one from torch's default generator; an int64, kept at the runner's state of the request.

    Ranks of a tensor-parallel group agree: vLLM seeds the default generator alike in each.
    """
    seed = request.sampling_params.seed
    if seed is not None:
        return (seed + 2**63) % 2**64 - 2**63  # torch takes seeds up to 2^64 - 1 too
    if not hasattr(request, _FRESH):
        setattr(request, _FRESH, int(torch.randint(-(2**63), 2**63 - 1, ())))
    fresh: int = getattr(request, _FRESH)
    return fresh
