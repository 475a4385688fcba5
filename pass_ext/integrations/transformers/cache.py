"""Keys and values of transformers' caches, read and written layer by layer, in 4.57, 5.17 and 5.23 alike.

``keys [B, H, S, D]`` of the S committed columns, padding included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cache_length(cache: Any, layer: int = 0) -> int:
    """Committed columns of one layer of a ``DynamicCache`` or ``StaticCache``. Waits for the device where it is static.

    transformers 4.57 keeps no length of a static cache: there it is the columns of the first head that are not all zeros.
    """
    return int(_layer(cache, layer).get_seq_length()) if layer < len(getattr(cache, "layers", ())) else 0


def read_cache(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """``(keys, values)``, each ``[B, H, length, D]``: views of the cache, not copies."""
    own = _layer(cache, layer)
    length = int(own.get_seq_length())
    if length == 0:
        raise ValueError(f"read_cache: layer {layer} is empty")
    return own.keys[:, :, :length], own.values[:, :, :length]


def write_cache(cache: Any, layer: int, keys: Tensor, values: Tensor) -> None:
    """Makes ``keys`` and ``values``, ``[B, H, length, D]``, the whole content of a layer.

    A dynamic layer takes the tensors themselves. A static one is written in place, its addresses stay, and columns behind
    the content are cleared.
    """
    if layer >= len(getattr(cache, "layers", ())) and getattr(cache, "layer_class_to_replicate", None) is not None:
        cache.layers.extend(cache.layer_class_to_replicate() for _ in range(layer + 1 - len(cache.layers)))
    own = _layer(cache, layer)
    if keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"write_cache: keys and values must be [B, H, length, D], got {list(keys.shape)} and {list(values.shape)}"
        )
    if not own.is_initialized:
        _initialize(own, keys, values)
    if not hasattr(own, "max_cache_len"):
        own.keys, own.values = keys, values
        return
    length = keys.shape[2]
    expected = [*own.keys.shape[:2], own.max_cache_len, own.keys.shape[3]]
    if length > own.max_cache_len or list(keys.shape[:2]) != expected[:2] or keys.shape[3] != expected[3]:
        raise ValueError(f"write_cache: layer {layer} is static and holds {expected}, got keys {list(keys.shape)}")
    with torch.no_grad():
        for place, given in ((own.keys, keys), (own.values, values)):
            place[:, :, :length].copy_(given)
            place[:, :, length:].zero_()
        if hasattr(own, "cumulative_length"):  # transformers 5; its address must stay
            own.cumulative_length.fill_(length)


def _initialize(layer: Any, keys: Tensor, values: Tensor) -> None:
    try:
        layer.lazy_initialization(keys, values)
    except TypeError:  # transformers 4.57 takes the keys alone
        layer.lazy_initialization(keys)


def _layer(cache: Any, index: int) -> Any:
    """A full-attention layer of a cache that keeps plain tensors on the model's device; others are refused by name."""
    from transformers.cache_utils import DynamicLayer, StaticLayer

    if not hasattr(cache, "layers"):
        raise TypeError(f"a cache must be a DynamicCache or StaticCache of transformers, got {type(cache).__name__}")
    if getattr(cache, "offloading", False):
        raise ValueError(f"{type(cache).__name__} moves its layers to the CPU (offloading); use one without")
    if index >= len(cache.layers):
        raise ValueError(
            f"this {type(cache).__name__} has {len(cache.layers)} layers so far, layer {index} is none of them"
        )
    layer = cache.layers[index]
    if type(layer) not in (DynamicLayer, StaticLayer):
        raise ValueError(
            f"layer {index} of this {type(cache).__name__} is a {type(layer).__name__}; only DynamicLayer and StaticLayer, "
            "which keep all keys and values as they are, can be read and written"
        )
    return layer
