"""Adds learned offsets to the input of every decoder layer, per row: h_l <- h_l + offsets[l].

Look-ahead embeddings may have such vectors for their slots (``LookaheadEmbedding.deep``); rows of tokens get zeros, which
change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any

from torch import Tensor, nn


class LayerOffsets:
    """Inside ``attached`` layer l adds ``offsets[l]`` ([N, d], broadcast over the batch) to its input; None: nothing is added.

    Each thread has its own ``offsets``.
    """

    def __init__(self, model: Any) -> None:
        self._layers = decoder_layers(model)
        self._of_thread = local()

    @property
    def offsets(self) -> Tensor | Sequence[Tensor] | None:
        """``[N, d]`` by layer."""
        return getattr(self._of_thread, "offsets", None)

    @offsets.setter
    def offsets(self, offsets: Tensor | Sequence[Tensor] | None) -> None:
        self._of_thread.offsets = offsets

    @contextmanager
    def attached(self) -> Iterator[LayerOffsets]:
        """Registers a hook on every layer, and removes them afterwards."""
        hooks = [
            layer.register_forward_pre_hook(self._added(index), with_kwargs=True)
            for index, layer in enumerate(self._layers)
        ]
        try:
            yield self
        finally:
            self.offsets = None
            for hook in hooks:
                hook.remove()

    def _added(self, index: int) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            offsets = self.offsets
            if offsets is None:
                return None
            if inputs:
                return (inputs[0] + offsets[index], *inputs[1:]), named
            return inputs, {**named, "hidden_states": named["hidden_states"] + offsets[index]}

        return hook


def decoder_layers(model: Any) -> nn.ModuleList:
    """The layers of a transformers decoder."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in decoder_of(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{type(model).__name__} has no list of {count} layers that look-ahead slots could shift the input of"
    )


def decoder_of(model: Any) -> Any:
    """The module of a transformers model that has the layers and what is around them, without the output layer."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    inner = model._modules.get("model")
    return inner if decoder is model and inner is not None else decoder
