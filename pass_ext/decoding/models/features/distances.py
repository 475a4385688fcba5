"""Layers whose attention adds a learned bias by the distance from row to key (Inkling, T5), in a model's shadow.

    Inkling   a module mixes profiles of biases by a row's own states, and looks up the bias of each key
    T5        a table has a bias for each bucket of distances; that of the last bucket, of all farther keys, is taken from all,
              which changes no softmax

In the shadow they give attention the profiles, and attention looks up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.equivalence import difference_of
from pass_ext.decoding.models.features.distance_bias import DistanceBias
from pass_ext.decoding.models.features.feature import Feature
from pass_ext.decoding.models.layer_attention import Attending, LayerAttention
from pass_ext.decoding.models.modules import modules_of
from pass_ext.decoding.models.row_attention import attend_by
from pass_ext.ops import linear  # noqa: F401, which registers the op

_linear = torch.ops.pass_ext.linear_rows.default
_PROFILES, _BUCKETS = "rel_logits_proj", "relative_attention_num_buckets"
_COMPARED = 5  # rows


class DistanceBiases(Feature):
    def unserved(self, model: Any) -> str | None:
        for module in _modules(model):
            difference = difference_of(type(module).forward, None, partial(_looks_up, module))
            if difference is not None:
                return f"adds a bias by distance to its attention, by {type(module).__name__}, which {difference}"
        for part in _with_tables(model):
            form = part.relative_attention_num_buckets, part.relative_attention_max_distance
            difference = difference_of(type(part).compute_bias, form, partial(_counts_alike, part))
            if difference is not None:
                return f"adds a bias by distance to its attention, by {type(part).__name__}, which {difference}"
        return None

    def needs_no_positions(self, model: Any) -> bool:
        return bool(_with_tables(model))

    def untrained(self, model: Any, length: int) -> str | None:
        if not any(_modules(model)) and not _with_tables(model):
            return None
        return (
            "its attention takes distances from the numbers of rows, and in a call of many groups of slots the rows of a group "
            "do not follow its anchor"
        )

    def serve(self, shadow: Any, embedded: Callable[[Tensor], Tensor]) -> None:
        """These modules give attention what it looks up in."""
        for part in modules_of(shadow):
            module = part._modules.get(_PROFILES)
            if module is not None:
                module.forward = partial(_mixed, module)
                attend_by(part, _biased)
        for part in _with_tables(shadow):
            part.compute_bias = partial(_of_buckets, part)
        for part in modules_of(shadow):
            if _BUCKETS in vars(part):
                attend_by(part, _biased)


class ByDistance(Attending):
    """A layer's attention with biases ``[N or 1, heads, distances]``, added to the logits of keys 0, 1 … tokens back."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def attend(self, layer: LayerAttention) -> Tensor:
        options, count = layer.options, self._bias.shape[-1]
        if options["softcap"] or options["sinks"] is not None or options["chunk"] >= 0:
            raise ValueError(
                f"{layer.session.model.name} adds a bias by distance to attention with a softcap, sinks or chunks, which is "
                "not implemented, so pass_ext cannot decode this model"
            )
        bias = self._bias.expand(len(layer.q), -1, -1)
        layer.keep()
        q, keys, values, k, v = layer.rows(layer.q)
        window, room = options["window"], keys.shape[1]
        distances = layer.of_call(
            (DistanceBias, count, window), lambda: DistanceBias(layer.trees, layer.prefix_lens, room, count, window)
        )
        attention = partial(layer.attention, **options)
        return layer.cut(distances.attend(attention, q, bias, (keys, values), (k, v), options["scale"]))


def _biased(given: dict[str, Any]) -> ByDistance | None:
    """By the profiles, ``[1, heads, N or 1, distances]``."""
    bias = given.get("position_bias")
    return ByDistance(given.pop("position_bias")[0].transpose(0, 1)) if isinstance(bias, Tensor) else None


def _modules(model: nn.Module) -> Iterator[Any]:
    for part in modules_of(model):
        module = part._modules.get(_PROFILES)
        if module is not None:
            yield module


def _with_tables(model: nn.Module) -> list[Any]:
    """The layers of a decoder that have such a table; later ones may use it too."""
    return [
        part
        for part in modules_of(model)
        if _BUCKETS in vars(part)
        and part._modules.get("relative_attention_bias") is not None
        and getattr(part, "is_decoder", False)
    ]


def _of_buckets(part: Any, *_: Any, **__: Any) -> Tensor:
    """``[1, heads, 1, distances]``."""
    table, most = part.relative_attention_bias, part.relative_attention_max_distance
    distances = torch.arange(most + 1, device=table.weight.device)
    buckets = part._relative_position_bucket(
        -distances, bidirectional=False, num_buckets=part.relative_attention_num_buckets, max_distance=most
    )
    biases: Tensor = table(buckets)
    return (biases - biases[-1]).T[None, :, None]


@torch.no_grad()
def _counts_alike(part: Any) -> bool:
    """By the last row of a text that is a little longer than there are distances."""
    keys = part.relative_attention_max_distance + 5
    ours = _of_buckets(part)[0, :, 0].flip(1)
    theirs = part.compute_bias(1, keys, past_seen_tokens=keys - 1)[0, :, 0]
    theirs = theirs - theirs[:, :1]
    return torch.equal(ours, theirs[:, -ours.shape[1] :]) and not theirs[:, : keys - ours.shape[1]].any()


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
