"""``plan_of``: what ``OwnForward`` needs of a transformers model, found by the names of its parts.

A guess: ``comparison.py`` compares the numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from pass_ext.decoding.models.patching.few_rows import is_plain_linear
from pass_ext.decoding.models.patching.known_parts import Norm, norm_of
from pass_ext.decoding.models.patching.layer_offsets import decoder_layers, decoder_of
from pass_ext.decoding.models.patching.layer_parts import LayerParts, parts_of


class Unlike(Exception):
    """The reason why our ops do not compute a model's forward."""


class StackArguments(NamedTuple):
    """What ``layer_stack`` takes of all layers, which are alike."""

    weights: list[Tensor]
    parts: int
    windows: list[int]
    numbers: tuple[Any, ...]
    """Head size, eps, form, activation, scale, attention's scale and softcap."""
    key_heads: int


class ModelPlan(NamedTuple):
    """A model's parts: tensors and numbers, no modules."""

    layers: list[LayerParts]
    attention: list[dict[str, Any]]
    """Options of each layer's attention."""
    kinds: list[tuple[str, ...]]
    """What the rotary embedding takes behind rows and positions, kind by kind of layers."""
    rotates: list[int]
    """The kind of each layer, from 1; 0: it does not rotate."""
    norm: Norm | None
    """The final norm, if it is one that the op of the layers knows and so is the head; else None."""
    head: Tensor | None
    rows_scale: float
    divisor: float
    cap: float
    stack: StackArguments | None
    """None: layers are computed one by one."""


def plan_of(model: Any, attention: Sequence[dict[str, Any]]) -> ModelPlan:
    """The plan of a model whose layers attend with these options. Raises ``Unlike``."""
    decoder = decoder_of(model)
    layers, kinds, rotates = layers_of(model), *_kinds(decoder, model)
    config = model.config.get_text_config(decoder=True)
    stack = _stack_of(layers, attention)
    norm, head = _ends(decoder, model.get_output_embeddings(), None if stack is None else stack.numbers[1:3])
    return ModelPlan(
        layers,
        list(attention),
        kinds,
        rotates,
        norm,
        head,
        float(vars(decoder).get("embedding_multiplier", 1.0)),
        float(getattr(config, "logits_scaling", None) or 1.0),
        float(getattr(config, "final_logit_softcapping", None) or 0.0),
        stack,
    )


def layers_of(model: Any) -> list[LayerParts]:
    """The layers taken apart. Raises ``Unlike``, before anything was computed."""
    decoder = decoder_of(model)
    if not isinstance(getattr(decoder, "rotary_emb", None), nn.Module) or not isinstance(
        getattr(decoder, "norm", None), nn.Module
    ):
        raise Unlike("it has no rotary embedding and final norm by Llama's names")
    if not isinstance(model.get_output_embeddings(), nn.Module):
        raise Unlike("it has no output layer")
    found: list[LayerParts] = []
    try:
        layers = decoder_layers(model)
    except ValueError as error:
        raise Unlike(str(error)) from error
    for number, layer in enumerate(layers):
        parts = parts_of(layer)
        if parts is None or parts.layer != number:
            raise Unlike(f"layer {number} ({type(layer).__name__}) has other parts than the layer ops")
        found.append(parts)
    replaced = next((part for part in (model, decoder, decoder.rotary_emb) if "forward" in vars(part)), None)
    if replaced is not None:
        raise Unlike(f"somebody has replaced {type(replaced).__name__}.forward")
    return found


def _kinds(decoder: Any, model: Any) -> tuple[list[tuple[str, ...]], list[int]]:
    """The kinds of layers by rotary embedding, and each layer's, from 1."""
    count = len(decoder_layers(model))
    if "layer_type" not in inspect.signature(type(decoder.rotary_emb).forward).parameters:
        return [()], [1] * count
    types = list(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [])[:count]
    if len(types) != count:
        raise Unlike("its rotary embedding asks for kinds of layers, which its config does not give")
    names = sorted(set(types), key=types.index)
    return [(name,) for name in names], [1 + names.index(name) for name in types]


def _ends(decoder: Any, head: Any, form: tuple[Any, ...] | None) -> tuple[Norm | None, Tensor | None]:
    """Final norm and head, if the op of the layers knows them; else (None, None)."""
    norm = None if "forward" in vars(decoder.norm) else norm_of(decoder.norm)
    if (
        form is None
        or norm is None
        or (norm.eps, norm.form) != form
        or not is_plain_linear(head)
        or head._parameters["bias"] is not None
    ):
        return None, None
    return norm, head.weight


def _stack_of(layers: Sequence[LayerParts], attention: Sequence[dict[str, Any]]) -> StackArguments | None:
    """The arguments for all layers; None on a GPU, or if they differ in what the op takes once."""
    weights: list[Tensor] = []
    alike = set()
    for parts, options in zip(layers, attention, strict=True):
        (before, (head_dim, eps, form)), after = parts.before, parts.after
        tensors = (*before, *after[:-4])
        weights += [tensor for tensor in tensors if tensor is not None]
        scale = options.get("scale")
        numbers = (
            head_dim,
            eps,
            form,
            *after[-2:],
            head_dim**-0.5 if scale is None else scale,
            options.get("softcap", 0.0),
        )
        present = sum(1 << i for i, tensor in enumerate(tensors) if tensor is not None)
        alike.add((present, numbers, after[-4:-2] == (eps, form)))
    if len(alike) != 1 or not all(weight.is_cpu for weight in weights):  # the op is for the CPU
        return None
    present, numbers, _ = alike.pop()
    windows = [options.get("window", -1) for options in attention]
    return StackArguments(weights, present, windows, numbers, layers[0].before[0][3].shape[0] // numbers[0])
