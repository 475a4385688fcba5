"""Layers that add features of the last n tokens of a text (Qwen4's per-layer embeddings), in a model's shadow.

A layer looks up the n-gram that ends at each token, and mixes what it finds with that of earlier tokens by a convolution, whose
taps are ``step`` tokens apart. In a tree the tokens before a row are its ancestors and, beyond the root, the end of the text:
both, tokens and inputs of the convolution, are states, moved after the accepted rows like those of other convolutions.
A look-ahead slot counts as the token that ends texts, beyond which no n-gram reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pass_ext.decoding.models.equivalence import difference_of
from pass_ext.decoding.models.features.feature import Feature
from pass_ext.decoding.models.modules import modules_of
from pass_ext.decoding.models.parts import decoder_of
from pass_ext.decoding.models.shadow import own_call
from pass_ext.decoding.models.step_states import StatePlace, StepStates

_COMPARED = 16  # rows
_MOST_APART = 7  # tokens between taps; convolution_tree has 8 taps at most


class NgramLayers(Feature):
    def unserved(self, model: Any) -> str | None:
        for part in _parts(model):
            name, (step,), taps = type(part).__name__, part.conv1d.dilation, part.conv1d.kernel_size
            if step > _MOST_APART:
                return (
                    f"has {name}, whose convolution has taps {step} tokens apart, and pass_ext decodes that up to "
                    f"{_MOST_APART} tokens"
                )
            form = step, taps, part.ple_embedding.context_len
            difference = difference_of(type(part).forward, form, partial(_computes_alike, part))
            if difference is not None:
                return (
                    f"looks up n-grams of tokens in {name}, which {difference}; pass_ext knows the layer of transformers 5.24, "
                    "so it cannot decode this model"
                )
        return None

    def untrained(self, model: Any, length: int) -> str | None:
        return (
            "its layers look up n-grams of tokens (ple_layer_ids), and slots are no tokens" if _parts(model) else None
        )

    def states(self, model: Any) -> Mapping[nn.Module, list[StatePlace]]:
        return {part: _places(part) for part in _parts(model)}

    def serve(self, shadow: Any, embedded: Callable[[Tensor], Tensor]) -> None:
        """Modules that look up n-grams take the rows of a call."""
        parts = _parts(shadow)
        for part in parts:
            tokens, inputs = _places(part)
            embedding = part.ple_embedding
            embedding.forward = partial(_looked_up, _states_of_call, tokens, embedding.context_len, embedding.forward)
            part._short_conv = partial(_convolved, _states_of_call, inputs, part.conv1d)
        if parts:
            decoder_of(shadow).reverse_embedding = _ids_of_call


def _parts(model: nn.Module) -> list[Any]:
    """The modules that look up n-grams."""
    return [part for part in modules_of(model) if "ple_embedding" in part._modules]


def _places(part: Any) -> list[StatePlace]:
    """Of tokens, and of inputs of the convolution."""
    return [
        StatePlace(part.layer_idx, "tokens", 2, part.ple_embedding.eos_token_id),
        StatePlace(part.layer_idx, "inputs", 1),
    ]


def _states_of_call() -> Any:
    return own_call("these n-grams are").attend.states


def _ids_of_call(_: Tensor) -> Tensor:
    """In place of a search for each row in the table of embeddings."""
    call = own_call("these n-grams are")
    ids: Tensor = call.attend.ids
    return ids[None]


def _looked_up(
    states: Callable[[], Any],
    place: StatePlace,
    before: int,
    forward: Callable[..., Tensor],
    /,
    input_ids: Tensor,
    cache: Any = None,
) -> Tensor:
    """ids ``[1, N]``, of slots negative -> ``[1, N, D]``. Each row's last tokens are a text to the module's own forward."""
    ids = torch.where(input_ids[0] < 0, place.zero, input_ids[0])
    x = (ids - place.zero).float()[:, None]
    rows = torch.cat((*states().earlier(place, x, 1, before)[::-1], x), 1)
    return forward(rows.long() + place.zero, None)[None, :, -1]


def _convolved(
    states: Callable[[], Any], place: StatePlace, conv1d: nn.Conv1d, /, hidden_states: Tensor, cache: Any = None
) -> Tensor:
    """``[1, N, C]`` -> ``[1, N, C]``."""
    x, weight = hidden_states[0].contiguous(), conv1d.weight[:, 0]
    earlier: list[Tensor] = states().earlier(place, x, conv1d.dilation[0], weight.shape[1] - 1)
    out = x.new_zeros(x.shape, dtype=torch.float32)
    for tap, inputs in enumerate((*earlier[::-1], x)):
        out = out + inputs * weight[:, tap].float()
    return functional.silu(out).to(x.dtype)[None]


@torch.no_grad()
def _computes_alike(part: Any) -> bool:
    """Compares a few rows as one text."""
    embedding, generator = part.ple_embedding, torch.Generator().manual_seed(0)
    like, most = part.conv1d.weight, max(2, embedding.unigram_vocab_size)
    ids = torch.randint(most, (_COMPARED,), generator=generator).to(like.device)
    ids[_COMPARED // 2] = embedding.eos_token_id
    hidden = torch.randn(1, _COMPARED, len(like), generator=generator).to(like)
    parents = torch.arange(-1, _COMPARED - 1, dtype=torch.int32, device=like.device)
    step = StepStates([], [], 1, parents, parents.new_tensor([0, _COMPARED]), is_first=True, is_prompt=True)
    tokens, inputs = _places(part)
    found = _looked_up(lambda: step, tokens, embedding.context_len, embedding.forward, ids[None])
    convolved, theirs = _convolved(lambda: step, inputs, part.conv1d, hidden), part._short_conv(hidden, None)
    most_off = (1e-4 if like.dtype == torch.float32 else 2e-2) * float(theirs.abs().max())
    return torch.equal(found, embedding(ids[None], None)) and torch.allclose(
        convolved, theirs, rtol=0.0, atol=most_off + 1e-6
    )
