"""Layers whose attention adds a learned bias by the distance from row to key (Inkling), in a model's shadow.

A module there mixes profiles of biases by a row's own states, and looks up the bias of each key. In the shadow it gives
attention the mixed profiles, and attention looks up.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.equivalence import difference_of
from pass_ext.ops import linear  # noqa: F401, which registers the op

_linear = torch.ops.pass_ext.linear_rows.default
_PROFILES = "rel_logits_proj"
_COMPARED = 5  # rows


def give_profiles(shadow: nn.Module) -> None:
    """Has these modules of a model's shadow give attention what it looks up in."""
    for module in _modules(shadow):
        module.forward = partial(_mixed, module)


def mixes_profiles(attention: nn.Module) -> bool:
    """True if a layer's attention has such a module."""
    return attention._modules.get(_PROFILES) is not None


def profiles_of(attention: nn.Module, bias: Any) -> Tensor | None:
    """The biases ``[N, heads, distances]`` of a shadow's layer that gives attention this position_bias; None: it has others."""
    return bias[0].transpose(0, 1) if isinstance(bias, Tensor) and mixes_profiles(attention) else None


def unserved(model: nn.Module) -> str | None:
    """Why such a bias cannot be added, to follow the model's name; None: it can."""
    for module in _modules(model):
        difference = difference_of(type(module).forward, None, partial(_looks_up, module))
        if difference is not None:
            return f"adds a bias by distance to its attention, by {type(module).__name__}, which {difference}"
    return None


def _modules(model: nn.Module) -> Iterator[Any]:
    for part in model.modules():
        module = part._modules.get(_PROFILES)
        if module is not None:
            yield module


def _mixed(module: Any, relative_states: Tensor, *_: Any) -> Tensor:
    """relative_states ``[1, N, heads, d]`` -> ``[1, heads, N, distances]``."""
    states, profiles = relative_states[0], module.proj.T.contiguous()
    mixed: Tensor = _linear(states.flatten(0, 1), profiles, None)
    return mixed.view(*states.shape[:2], -1).transpose(0, 1)[None]


@torch.no_grad()
def _looks_up(module: Any) -> bool:
    """By a few rows, near keys and those where the biases end."""
    like, heads, count = module.proj, 2, module.proj.shape[1]
    states = torch.randn(1, _COMPARED, heads, len(like), generator=torch.Generator().manual_seed(0)).to(like)
    rows = torch.arange(_COMPARED, device=like.device) + count - 2
    keys = torch.cat((torch.arange(4, device=like.device), rows))
    distances = rows[:, None] - keys
    mixed = _mixed(module, states)[0]
    ours = mixed.gather(2, distances.clamp(0, count - 1).expand(heads, -1, -1))
    ours = ours.masked_fill((distances < 0) | (distances >= count), 0.0)
    theirs = module(states, rows, keys)[0]
    most = 1e-4 if like.dtype == torch.float32 else 5e-2
    return torch.allclose(ours.float(), theirs.float(), rtol=0.0, atol=most * float(mixed.abs().max()))
