"""``added_to_layers``: while it is open, every decoder layer's input gets a learned offset per row.

h_l <- h_l + offsets[l]. Called with a look-ahead embedding's ``deep`` vectors by ``slots`` and by decoders.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def added_to_layers(model: Any, offsets: Tensor) -> Iterator[None]:
    """Adds ``offsets[l]`` ([N, d], broadcast over the batch) to layer l's input rows in every forward inside the block."""
    layers = model.get_decoder().layers
    if len(layers) != len(offsets):
        raise ValueError(f"offsets must have a row per layer of the model ({len(layers)}), got {len(offsets)}")
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, offset=offset: (inputs[0] + offset, *inputs[1:]))
        for layer, offset in zip(layers, offsets, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
