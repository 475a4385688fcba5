"""``HiddenInjection``: adds to the rows of look-ahead slots a linear function of the hidden state of their anchor's row.

    h[slot i] <- h[slot i] + up[i] (down a)      low rank; down is random and up zero before training
    h[slot i] <- h[slot i] + up[i] a             a full matrix for each slot, zero before training

at the input of each of some layers; a is the hidden state of the anchor, the token row behind which the slots stand, at the
same layer's input. Vectors per layer (``LookaheadEmbedding.deep``) are the constant form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.cache_name import given_cache
from pass_ext.decoding.models.patching.layer_offsets import decoder_layers

RowsHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class HiddenInjection(nn.Module):
    """The matrices of each layer. rank: r of ``down`` [r, d] and ``up`` [L, d, r]; None: ``up`` [L, d, d] alone."""

    def __init__(self, layers: Sequence[int], slots: int, dim: int, rank: int | None) -> None:
        super().__init__()
        self.slots = slots
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for layer in map(str, layers):
            if rank is not None:
                self.down[layer] = nn.Parameter(torch.randn(rank, dim) * dim**-0.5)
            self.up[layer] = nn.Parameter(torch.zeros(slots, dim, dim if rank is None else rank))

    def term(self, layer: int, anchors: Tensor) -> Tensor:
        """``[B, A * L, d]`` that the rows of A groups get, whose anchors' hidden states are ``anchors`` [B, A, d]."""
        up = self.up[str(layer)]
        x = anchors.to(up.dtype)
        if str(layer) in self.down:
            x = x @ self.down[str(layer)].T
        return torch.einsum("bar,ldr->bald", x, up).flatten(1, 2).to(anchors.dtype)

    @contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        """Inside, a forward into an empty cache is text, whose hidden states stay for the forwards of slots behind it."""
        layers, hooks = decoder_layers(model), []
        try:
            for name in self.up:
                hooks.append(layers[int(name)].register_forward_pre_hook(self._hook(int(name)), with_kwargs=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, layer: int) -> RowsHook:
        text: list[Tensor] = []

        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            hidden = inputs[0]
            if not given_cache(named).get_seq_length(layer):
                text[:] = [hidden]
                return None
            # Slot i of the group behind anchor a stands at position a + 1 + i.
            anchors = named["position_ids"][:, :: self.slots] - 1
            rows = text[0].gather(1, anchors[..., None].expand(-1, -1, hidden.shape[-1]))
            return (hidden + self.term(layer, rows), *inputs[1:]), named

        return hook
