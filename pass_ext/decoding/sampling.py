"""Sampling parameters: ``SamplingParams`` as a user gives them, ``BatchSampling`` as the sampling ops take them.

    prob(v) = softmax over the support of logits / temperature, after top-k, top-p and min-p; temperature 0 is greedy

Draft and target are processed alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

Numbers = float | Sequence[float] | Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled. Each field is one number for all requests, or one for each.

    Args:
        temperature: 0 is greedy.
        top_k: 0 or None is off.
        top_p, min_p: None is off.
        seeds: integers; None: fresh seeds of torch's own generator, or of a ``torch.Generator``.
    """

    temperature: Numbers = 0.0
    top_k: Numbers | None = None
    top_p: Numbers | None = None
    min_p: Numbers | None = None
    seeds: Numbers | torch.Generator | None = None

    def for_batch(self, requests: int, device: torch.device, *, samples: int = 1) -> BatchSampling:
        """Checks the parameters and puts them into tensors on a device, those of each request ``samples`` times in a row: the
        k-th sample has the request's seed plus k."""
        generator = self.seeds if isinstance(self.seeds, torch.Generator) else None
        warm = _per_request("temperature", self.temperature, requests, torch.float32, device)
        most = _per_request("top_k", self.top_k, requests, torch.int32, device)
        nucleus = _per_request("top_p", self.top_p, requests, torch.float32, device)
        least = _per_request("min_p", self.min_p, requests, torch.float32, device)
        given = None if generator is not None else self.seeds
        seeds = _per_request("seeds", given, requests, torch.int64, device)
        if warm is not None and not bool((warm >= 0).all() & warm.isfinite().all()):
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if most is not None and not bool((most >= 0).all()):
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if nucleus is not None and not bool(((nucleus > 0) & (nucleus <= 1)).all()):
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if least is not None and not bool(((least >= 0) & (least <= 1)).all()):
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if warm is None or not bool(warm.any()):
            if samples != 1:
                raise ValueError(
                    f"num_return_sequences must be 1 at temperature 0, whose texts are all equal, got {samples}"
                )
            return BatchSampling(None, None, None, None, None)
        if seeds is None:
            where, count = generator.device if generator is not None else torch.device("cpu"), requests * samples
            fresh = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, device=where).to(device)
        else:
            fresh = (seeds[:, None] + torch.arange(samples, device=device)).flatten()
        return replace(BatchSampling(warm, most, nucleus, least, None).repeated(samples), seeds=fresh)


@dataclass(frozen=True)
class BatchSampling:
    """The parameters of a batch: ``[B]`` tensors on the device, None for off. Without ``temperature`` all are greedy."""

    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    seeds: Tensor | None

    @property
    def is_greedy(self) -> bool:
        """True: every request takes its most probable tokens."""
        return self.temperature is None

    def keywords(self) -> dict[str, Any]:
        """The parameters by the names that ``accept_tree`` and ``draft_sample`` give them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def of_requests(self, requests: Tensor) -> BatchSampling:
        """The parameters of the requests with these numbers ``[n]``, in this order."""
        if self.is_greedy:
            return self
        return replace(self, **{name: v[requests] for name, v in self.keywords().items() if v is not None})

    def repeated(self, times: int) -> BatchSampling:
        """Each request's parameters ``times`` times in a row."""
        if self.is_greedy:
            return self
        given = {name: v for name, v in self.keywords().items() if v is not None}
        return replace(
            self, **{name: v.repeat_interleave(times, output_size=times * len(v)) for name, v in given.items()}
        )


def _per_request(name: str, value: Any, requests: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    if value is None:
        return None
    limits = None if dtype.is_floating_point else torch.iinfo(dtype)
    try:
        tensor = torch.as_tensor(value)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        numbers = "numbers" if limits is None else f"integers from {limits.min} to {limits.max}"
        raise TypeError(f"{name} must be {numbers}, got {value!r}") from error
    strange = tensor.is_complex() or tensor.dtype == torch.bool
    if strange or (tensor.is_floating_point() and not dtype.is_floating_point):
        raise TypeError(f"{name} must be {'numbers' if dtype.is_floating_point else 'integers'}, got {tensor.dtype}")
    if tensor.dim() == 0:
        tensor = tensor.expand(requests)
    if tensor.shape != (requests,):
        raise ValueError(
            f"{name} must be one number, or one for each of the {requests} requests, got {list(tensor.shape)}"
        )
    if limits is not None and requests and not limits.min <= int(tensor.min()) <= int(tensor.max()) <= limits.max:
        raise ValueError(f"{name} must be integers from {limits.min} to {limits.max}, got {value}")
    return tensor.to(device, dtype).contiguous()
