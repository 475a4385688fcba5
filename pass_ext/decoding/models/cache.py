"""Reads and writes keys and values of transformers' caches layer by layer, in 4.57, 5.17, 5.23 and 5.24 alike; states in 5.24.

``keys [B, H, S, D]`` hold the S committed columns, padding included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.models.features.table import FEATURES, from_theirs
from pass_ext.decoding.models.parts import unwrapped
from pass_ext.decoding.models.step_states import StatePlace

FULL_LAYERS = ("DynamicLayer", "StaticLayer")
SLIDING_LAYERS = (
    "DynamicSlidingWindowLayer",
    "StaticSlidingWindowLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
)
STATE_LAYERS = (
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndStaticFullAttentionLayer",
    "DummyLayer",
)


def other_format(model: Any) -> str:
    """The content of the model's cache if it is not what a session's is; else ""."""
    inner = unwrapped(model)
    if model.config.model_type == "jetmoe":
        return "keys and values before they are repeated for its experts"
    return next(filter(None, (feature.other_format(inner) for feature in FEATURES)), "")


def full_cache(config: Any) -> Any:
    """An empty ``DynamicCache`` for a model of this config that keeps the keys of all tokens, also where the model's own
    drops those before a window, and the first call's as they are, where the model's own copies them."""
    from transformers import DynamicCache, cache_utils

    cache: Any = DynamicCache(config=config.get_text_config(decoder=True))
    for number, layer in enumerate(cache.layers):
        if type(layer).__name__ == "DynamicSlidingWindowLayer":
            cache.layers[number] = cache_utils.DynamicLayer()
        elif type(layer).__name__ in SLIDING_LAYERS:
            cache.layers[number] = cache_utils.LinearAttentionAndFullAttentionLayer(
                getattr(layer, "number_of_states", 1)
            )
    for layer in cache.layers:
        if type(layer).__name__ == "DynamicLayer":
            layer.update = partial(_first_update, layer)
    return cache


def _first_update(layer: Any, keys: Tensor, values: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """A layer's ``update`` in the first call, which keeps keys and values as they are."""
    del layer.update  # they hold each other: the cache's memory would wait for the garbage collector
    if any(x.untyped_storage().nbytes() > x.nbytes for x in (keys, values)):  # a part would keep the whole
        updated: tuple[Tensor, Tensor] = layer.update(keys, values, *others, **named)
        return updated
    _initialize(layer, keys, values)
    layer.keys, layer.values = keys, values
    return keys, values


def layers_that_attend(cache: Any) -> list[int]:
    """The numbers of a cache's layers that have keys."""
    empty = ("DummyLayer", "LinearAttentionLayer")
    return [number for number, layer in enumerate(cache.layers) if type(layer).__name__ not in empty]


def texts_in_cache(
    cache: Any, layers: Iterable[int], starts: Tensor, count: int, model: Any
) -> list[tuple[Tensor, Tensor]]:
    """The cached keys and values ``[B, n, H, D]`` of the first n tokens of every text, which begin at columns ``starts``, as a
    session has them. Views of the cache, if its texts begin at one column."""
    columns = starts[:, None] + torch.arange(count, device=starts.device)
    last = cache_length(cache, next(iter(layers))) - 1
    columns = columns.clamp(max=last)
    first, *others = starts.tolist()
    are_together = set(others) <= {first} and first + count <= last + 1
    pairs = {}
    for layer in layers:
        cached = (x.transpose(1, 2) for x in read_cache(cache, layer))
        keys, values = (x[:, first : first + count] if are_together else gathered(x, columns) for x in cached)
        pairs[layer] = keys, values
    return list(from_theirs(unwrapped(model), cache, pairs, columns).values())


def gathered(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows ``rows[b]`` of each request b: ``[B, n, H, D]`` to ``[B, len, H, D]``."""
    return tensor[torch.arange(len(rows), device=tensor.device)[:, None], rows.to(tensor.device)]


def cache_length(cache: Any, layer: int = 0) -> int:
    """The number of committed columns in one layer of a ``DynamicCache`` or ``StaticCache``.

    A static cache needs a synchronisation with the device. transformers 4.57 stores no length in a static cache: there it is
    the number of columns of the first head that are not all zeros.
    """
    return int(_layer(cache, layer).get_seq_length()) if layer < len(getattr(cache, "layers", ())) else 0


def read_cache(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """The keys and values of one layer, each ``[B, H, length, D]``: views of the cache, not copies."""
    source = _layer(cache, layer)
    length = int(source.get_seq_length())
    if length == 0:
        raise ValueError(f"read_cache: layer {layer} is empty")
    return source.keys[:, :, :length], source.values[:, :, :length]


def write_cache(cache: Any, layer: int, keys: Tensor, values: Tensor) -> None:
    """Replaces the content of one layer by ``keys`` and ``values``, each ``[B, H, length, D]``.

    A dynamic layer stores the tensors themselves. A static layer is overwritten in place, so that its addresses stay, and its
    columns after the content are cleared.
    """
    if layer >= len(getattr(cache, "layers", ())) and getattr(cache, "layer_class_to_replicate", None) is not None:
        cache.layers.extend(cache.layer_class_to_replicate() for _ in range(layer + 1 - len(cache.layers)))
    target = _layer(cache, layer)
    if keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"write_cache: keys and values must be [B, H, length, D], got {list(keys.shape)} and {list(values.shape)}"
        )
    if not target.is_initialized:
        _initialize(target, keys, values)
    if not hasattr(target, "max_cache_len"):
        target.keys, target.values = keys, values
        return
    length = keys.shape[2]
    expected = [*target.keys.shape[:2], target.max_cache_len, target.keys.shape[3]]
    if length > target.max_cache_len or list(keys.shape[:2]) != expected[:2] or keys.shape[3] != expected[3]:
        raise ValueError(f"write_cache: layer {layer} is static and holds {expected}, got keys {list(keys.shape)}")
    with torch.no_grad():
        for buffer, content in ((target.keys, keys), (target.values, values)):
            buffer[:, :, :length].copy_(content)
            buffer[:, :, length:].zero_()
        if hasattr(target, "cumulative_length"):  # transformers 5; in place, because its address must stay
            target.cumulative_length.fill_(length)


def read_states(cache: Any, places: Sequence[StatePlace]) -> list[Tensor]:
    """The states at these places of a cache, as ``pass_ext`` has them: ``[B, ...]``."""
    states = []
    for place in places:
        layer = cache.layers[place.layer]
        kept = layer.conv_states if place.is_convolution else layer.recurrent_states
        state = kept[place.number]
        heads = state.unbind(1) if place.form == "channels" and state.dim() == 4 else [state]
        states += [place.to_ours(each) for each in heads]
    return states


def write_states(cache: Any, places: Sequence[StatePlace], states: Sequence[Tensor]) -> None:
    """Replaces the states at these places of a cache, one for each. Several recurrent states of a place are its heads."""
    for place, group in groupby(zip(places, states, strict=True), key=lambda pair: pair[0]):
        theirs = [place.to_theirs(state) for _, state in group]
        state, layer = theirs[0] if len(theirs) == 1 else torch.stack(theirs, 1), cache.layers[place.layer]
        if place.is_convolution:
            layer.has_previous_state[place.number] = False  # the layer takes the window as a text's beginning
            layer.update_conv_state(state, place.number, conv_kernel_size=state.shape[-1])
        else:
            layer.update_recurrent_state(state, place.number)


def _initialize(layer: Any, keys: Tensor, values: Tensor) -> None:
    try:
        layer.lazy_initialization(keys, values)
    except TypeError:  # transformers 4.57 has one parameter
        layer.lazy_initialization(keys)


def _layer(cache: Any, index: int) -> Any:
    """A full-attention layer of a cache that holds plain tensors on the model's device; raises for other caches."""
    from transformers.cache_utils import DynamicLayer, StaticLayer

    if not hasattr(cache, "layers"):
        raise TypeError(f"a cache must be a DynamicCache or StaticCache of transformers, got {type(cache).__name__}")
    if getattr(cache, "offloading", False):
        raise ValueError(f"{type(cache).__name__} moves its layers to the CPU (offloading); use one without")
    if index >= len(cache.layers):
        raise ValueError(f"this {type(cache).__name__} has {len(cache.layers)} layers so far, got layer {index}")
    layer = cache.layers[index]
    kinds = (DynamicLayer, StaticLayer, *indexed_layers(), *_hybrid_layers())
    if type(layer) not in kinds:
        raise ValueError(
            f"layer {index} of this {type(cache).__name__} is a {type(layer).__name__}; only DynamicLayer and StaticLayer, "
            "which hold all keys and values unchanged, can be read and written"
        )
    return layer


def indexed_layers() -> list[type]:
    """Layers with keys, values and the keys of an indexer."""
    from transformers import cache_utils

    registered = getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", {}).get("minimax_m3_sparse")
    return [x for x in (getattr(cache_utils, "DynamicIndexedLayer", None), registered) if x is not None]


def _hybrid_layers() -> list[type]:
    """Layers with keys, values and a state."""
    from transformers import cache_utils

    names = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndStaticFullAttentionLayer")
    return [getattr(cache_utils, name) for name in names if hasattr(cache_utils, name)]
