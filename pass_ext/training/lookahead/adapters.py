"""``adapters_in_training``: a frozen model's linear layers with the adapters of look-ahead slots, differentiable, in a forward
whose rows are all slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pass_ext.decoding.models.patching.layer_offsets import decoder_layers
from pass_ext.modules.slot_adapters import SlotAdapters
from pass_ext.ops.adapter import adapter_rows


@contextmanager
def adapters_in_training(model: Any, adapters: SlotAdapters | None, ids: Tensor) -> Iterator[None]:
    """Inside, linear layers with an adapter add its product to rows of ``ids``, any shape of N slots, as ``lookahead_embed``
    takes them."""
    hooks = []
    try:
        if adapters is not None:
            layers = decoder_layers(model)
            for place in adapters.places:
                number, _, name = place.partition(".")
                module = layers[int(number)].get_submodule(name)
                hooks.append(module.register_forward_hook(_added(*adapters.pair(place), adapters.scale, ids.flatten())))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _added(down: Tensor, up: Tensor, scale: float, ids: Tensor) -> Callable[..., Tensor]:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return adapter_rows(output, inputs[0], ids, down, up, scale)

    return hook
