"""``SamplingParams``: what the target's law is made of, one value per request, in the form that the sampling ops take.

prob(v) = softmax over the support of logits / temperature, after top-k, top-p and min-p; temperature 0 is greedy. Draft and
target are processed alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """``[B]`` tensors on the device, or None for off. ``temperature`` None: every request is greedy."""

    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    seeds: Tensor | None

    @classmethod
    def of(
        cls,
        requests: int,
        device: torch.device,
        *,
        temperature: Any = 0.0,
        top_k: Any = None,
        top_p: Any = None,
        min_p: Any = None,
        seeds: Any = None,
        generator: torch.Generator | None = None,
    ) -> SamplingParams:
        """From one number for all requests, or one for each: a sequence or a tensor. Fresh seeds where none are given."""
        warm = _per_request("temperature", temperature, requests, torch.float32, device)
        most = _per_request("top_k", top_k, requests, torch.int32, device)
        nucleus = _per_request("top_p", top_p, requests, torch.float32, device)
        least = _per_request("min_p", min_p, requests, torch.float32, device)
        own = _per_request("seeds", seeds, requests, torch.int64, device)
        if warm is not None and not bool((warm >= 0).all() & warm.isfinite().all()):
            raise ValueError(f"temperature must be 0 (greedy) or more, got {temperature}")
        if most is not None and not bool((most >= 0).all()):
            raise ValueError(f"top_k must be 0 (off) or more, got {top_k}")
        if nucleus is not None and not bool(((nucleus > 0) & (nucleus <= 1)).all()):
            raise ValueError(f"top_p must be in (0, 1], got {top_p}")
        if least is not None and not bool(((least >= 0) & (least <= 1)).all()):
            raise ValueError(f"min_p must be in [0, 1], got {min_p}")
        if warm is None or not bool(warm.any()):
            return cls(None, None, None, None, None)
        if own is None:
            where = generator.device if generator is not None else torch.device("cpu")
            fresh = torch.randint(-(2**63), 2**63 - 1, (requests,), generator=generator, device=where)
            own = _per_request("seeds", fresh, requests, torch.int64, device)
        return cls(warm, most, nucleus, least, own)

    def law(self) -> dict[str, Any]:
        """The keywords that ``accept_tree`` and ``draft_sample`` share."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p", "seeds")}


def _per_request(name: str, value: Any, requests: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    if value is None:
        return None
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be numbers, got {value!r}") from error
    if (
        tensor.is_complex()
        or tensor.dtype == torch.bool
        or (tensor.is_floating_point() and not dtype.is_floating_point)
    ):
        raise TypeError(f"{name} must be {'numbers' if dtype.is_floating_point else 'integers'}, got {tensor.dtype}")
    if tensor.dim() == 0:
        tensor = tensor.expand(requests)
    if tensor.shape != (requests,):
        raise ValueError(
            f"{name} must be one number, or one for each of the {requests} requests, got {list(tensor.shape)}"
        )
    return tensor.to(device, dtype).contiguous()
