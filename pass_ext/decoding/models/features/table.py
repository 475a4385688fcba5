"""The features that decoding knows, and what those of one model have together. Nothing else names one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pass_ext.decoding.models.features.compressors import CompressedEntries
from pass_ext.decoding.models.features.distances import DistanceBiases
from pass_ext.decoding.models.features.feature import Feature, Pair
from pass_ext.decoding.models.features.hash_routers import HashRouters
from pass_ext.decoding.models.features.indexers import Indexers
from pass_ext.decoding.models.features.latents import LatentAttention
from pass_ext.decoding.models.features.lightning import Lightning
from pass_ext.decoding.models.features.ngram_layers import NgramLayers
from pass_ext.decoding.models.features.own_attention import OwnAttention
from pass_ext.decoding.models.features.per_layer_inputs import PerLayerInputs
from pass_ext.decoding.models.features.repeated_attention import RepeatedAttention
from pass_ext.decoding.models.features.scaled_queries import ScaledQueries
from pass_ext.decoding.models.features.states import RecurrentStates
from pass_ext.decoding.models.layer_kinds import HYBRID, NOTHING, PLAIN, STATES, kinds_of
from pass_ext.decoding.models.step_states import StatePlace

_OF_THEIR_OWN = (NgramLayers(), Lightning())
"""They keep states in code of their own."""
FEATURES: tuple[Feature, ...] = (
    PerLayerInputs(),
    HashRouters(),
    LatentAttention(),
    Indexers(),
    CompressedEntries(),
    DistanceBiases(),
    ScaledQueries(),
    RepeatedAttention(),
    OwnAttention(),
    *_OF_THEIR_OWN,
    RecurrentStates(_OF_THEIR_OWN),
)
"""Latents before indexers, whose keys lie after them."""
_ATTENDING = PLAIN.union(*(feature.kinds for feature in FEATURES))


def attending_layers(text: Any) -> dict[int, int] | None:
    """The layers that attend, where not all do -> their numbers from 0; None: all attend."""
    kinds = kinds_of(text)
    if set(kinds) <= _ATTENDING:
        return None
    attend = [layer for layer, kind in enumerate(kinds) if kind in _ATTENDING | HYBRID]
    return {layer: number for number, layer in enumerate(attend)}


def unknown_kinds(text: Any) -> list[str]:
    """The kinds of layers of which nobody knows what they keep of a text."""
    return sorted(set(kinds_of(text)) - _ATTENDING - STATES - NOTHING)


def first(reason: Callable[[Feature], str | None]) -> str | None:
    """The first feature's reason; None: there is none."""
    return next(filter(None, map(reason, FEATURES)), None)


def serve_features(shadow: Any, embedded: Callable[[Tensor], Tensor]) -> None:
    """As ``Feature.serve``."""
    for feature in FEATURES:
        feature.serve(shadow, embedded)


def widths_after(model: Any) -> dict[int, int]:
    """The layers that keep numbers after their keys -> how many after those of each KV head."""
    return {layer: width for feature in FEATURES for layer, width in feature.after(model).items()}


def places_of(model: Any) -> list[StatePlace]:
    """Where transformers keeps the model's states, in the order of their use. A layer that scans head by head has one place for
    all."""
    found = [places for feature in FEATURES for places in feature.states(model).values()]
    return sorted((place for places in found for place in places), key=lambda place: place.layer)


def computed_by(model: Any) -> list[str]:
    """The names of what computes the model's states."""
    return [name for feature in reversed(FEATURES) for name in feature.computed_by(model)]


def from_theirs(model: Any, cache: Any, pairs: Mapping[int, Pair], columns: Tensor) -> Mapping[int, Pair]:
    """As ``Feature.from_theirs``, of all layers."""
    for feature in FEATURES:
        pairs = {**pairs, **feature.from_theirs(model, cache, pairs, columns)}
    return pairs
