"""What look-ahead slots have beside their embeddings, in training: a frozen model's linear layers with their adapters, and its
layers' inputs with their vectors, differentiable, in a forward whose rows are all slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.parts import decoder_layers, sizes_of
from pass_ext.decoding.models.slots import with_vectors
from pass_ext.modules.slot_adapters import AdapterSize, SlotAdapters
from pass_ext.ops.adapter import adapter_rows

# Kind -> the last parts of the names that transformers gives such layers.
KINDS: dict[str, tuple[str, ...]] = {
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "qkv": ("qkv_proj", "query_key_value", "attn.c_attn"),
    "o": ("o_proj", "out_proj", "self_attn.dense", "attention.dense", "attn.c_proj"),
    "gate": ("gate_proj",),
    "up": ("up_proj", "fc1", "dense_h_to_4h", "mlp.c_fc"),
    "gate_up": ("gate_up_proj",),
    "down": ("down_proj", "fc2", "dense_4h_to_h", "mlp.c_proj"),
}


@contextmanager
def adapters_in_training(
    model: Any, adapters: SlotAdapters | None, ids: Tensor, offsets: Sequence[Tensor] = ()
) -> Iterator[None]:
    """Inside, linear layers with an adapter add its product to rows of ``ids``, any shape of N slots, as ``lookahead_embed``
    takes them; layer l adds ``offsets[l]``, ``[N, d]`` for all texts, to its input, if there are any."""
    hooks = []
    try:
        if offsets:
            for layer, offset in zip(decoder_layers(model), offsets, strict=True):
                hooks.append(layer.register_forward_pre_hook(_shifted(offset), with_kwargs=True))
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


def _shifted(offset: Tensor) -> Callable[..., Any]:
    def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if inputs:
            return (with_vectors(inputs[0], offset), *inputs[1:]), named
        return inputs, {**named, "hidden_states": with_vectors(named["hidden_states"], offset)}

    return hook


def _added(down: Tensor, up: Tensor, scale: float, ids: Tensor) -> Callable[..., Tensor]:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if len(down) > 1:
            return adapter_rows(output, inputs[0], ids, down, up, scale)
        # All rows are slots. adapter_rows would look, and a host would wait for its GPU.
        x, rows = inputs[0].flatten(0, -2), output.flatten(0, -2)
        narrow = x @ down.flatten(0, 1).T.to(x.dtype)
        return torch.addmm(rows, narrow, up.flatten(0, 1).to(x.dtype), alpha=scale).view(output.shape)

    return hook


def adapter_sizes(model: Any, ranks: int | Mapping[str, int]) -> dict[str, AdapterSize]:
    """The adapters of a model's linear layers: by one rank for all, or by the ranks of some kinds (``KINDS``).

    The experts of a mixture get none: their rows are not the call's.
    """
    by_kind = dict.fromkeys(KINDS, ranks) if isinstance(ranks, int) else dict(ranks)
    if unknown := sorted(set(by_kind).difference(KINDS)):
        raise ValueError(f"ranks must be of the kinds {', '.join(KINDS)}, got {', '.join(unknown)}")
    sizes: dict[str, AdapterSize] = {}
    for number, layer in enumerate(decoder_layers(model)):
        for name, module in layer.named_modules():
            rank, size = by_kind.get(_kind_of(name) or "", 0), sizes_of(module)
            if rank and size is not None and "experts" not in name.split("."):
                sizes[f"{number}.{name}"] = AdapterSize(*size, rank)
    if not sizes:
        raise ValueError(f"{type(model).__name__} has no linear layer of the kinds {', '.join(by_kind)}")
    return sizes


def _kind_of(name: str) -> str | None:
    for kind, endings in KINDS.items():
        if any(name == ending or name.endswith(f".{ending}") for ending in endings):
            return kind
    return None
