"""Queries scaled by their place in the text (Llama 4, Inkling), in a model's shadow.

A layer takes a row's place for the number of keys in its cache plus the number of the row in the call. In the shadow it is
given a cache that says how far each row is after.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.features.feature import Feature
from pass_ext.decoding.models.modules import modules_of
from pass_ext.decoding.models.shadow import own_call

_SCALES = "attn_temperature_tuning"
"""A setting of a layer that multiplies queries by a function of their place; in steps, the first of ``floor_scale`` tokens."""
_LOG_SCALES = "log_scaling_n_floor"
"""The same in the config of a layer whose function is a logarithm, if not None."""


class ScaledQueries(Feature):
    def unserved(self, model: Any) -> str | None:
        """A layer that takes no cache cannot be told where a row is."""
        if any(_scales(part) and _cache_argument(part) is None for part in modules_of(model)):
            return f"scales attention by the number of the row ({_SCALES}), not by position"
        return None

    def untrained(self, model: Any, length: int) -> str | None:
        if not any(_scales(part) and length >= getattr(part, "floor_scale", 0) for part in modules_of(model)):
            return None
        return (
            "its attention takes positions from the numbers of rows, and in a call of many groups of slots the rows of a group "
            "do not follow its anchor"
        )

    def serve(self, shadow: Any, embedded: Callable[[Tensor], Tensor]) -> None:
        for part in modules_of(shadow):
            argument = _cache_argument(part) if _scales(part) else None
            if argument is not None:
                part.forward = partial(_at_its_places, part.forward, argument)


def _scales(part: Any) -> bool:
    own = vars(part)
    return bool(own.get(_SCALES)) or ("scaling" in own and getattr(own.get("config"), _LOG_SCALES, None) is not None)


def _cache_argument(module: nn.Module) -> str | None:
    names = inspect.signature(type(module).forward).parameters
    return next((name for name in ("cache", "past_key_values", "past_key_value") if name in names), None)


def _at_its_places(forward: Callable[..., Any], argument: str, /, *inputs: Any, **named: Any) -> Any:
    return forward(*inputs, **{**named, argument: _RowPlaces(own_call("these queries are").positions)})


class _RowPlaces:
    """Stands where such a layer expects its cache, and keeps nothing: row i is ``positions[i] - i`` tokens after."""

    def __init__(self, positions: Tensor) -> None:
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, *_: Any) -> Tensor:
        return self._before

    get_query_offset = get_seq_length

    def get_mask_sizes(self, rows: int, *_: Any) -> tuple[int, int]:
        return rows, 0

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """The convolutions of a call have their states elsewhere."""

    def update_conv_state(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        return states
