"""``EarlyExitDraft``: a model's own first k layers as its draft model.

pass_ext/modules/exit_adapter.py has the formula of its output and the trained adapter.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from torch import nn

from pass_ext.decoding.arguments import whole_number
from pass_ext.decoding.models.plain_tensors import is_plain
from pass_ext.modules.exit_adapter import ExitAdapter
from pass_ext.modules.files import HitRates


class ExitParts(NamedTuple):
    """The parts of a transformers model that an early exit uses."""

    decoder: Any
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Linear


def unwrapped(model: Any) -> Any:
    """The transformers model inside torch.compile's or peft's wrapper; its layers keep their adapters."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def exit_parts(model: Any) -> ExitParts:
    """Finds ``decoder.layers``, ``decoder.norm`` and the linear head that gives the logits; refuses models without them."""
    name = type(model).__name__
    known = "early exit takes models with decoder.layers, decoder.norm and a linear head (Llama's form)"
    if not all(hasattr(model, name) for name in ("get_decoder", "get_output_embeddings", "config")):
        raise TypeError(f"model must be a transformers model for causal language modelling, got {name}; {known}")
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    missing = [
        part
        for part, is_there in {
            "decoder.layers": isinstance(layers, nn.ModuleList),
            "decoder.norm": isinstance(norm, nn.Module),
            "a linear head": type(head) is nn.Linear,
            "its decoder as a direct part": getattr(model, model.base_model_prefix, None) is decoder,
        }.items()
        if not is_there
    ]
    if missing:
        raise ValueError(f"{name} has not: {', '.join(missing)}; {known}")
    patched = [part for part in (model, decoder, *layers) if "forward" in vars(part)]  # type: ignore[misc]
    if patched:
        raise ValueError(
            f"{type(patched[0]).__name__}.forward of this {name} was replaced (by device_map or a patching library), and early "
            "exit cannot run a part of the replacement"
        )
    config = model.config.get_text_config(decoder=True)
    attend = getattr(config, "num_hidden_layers", None) or len(layers)  # type: ignore[arg-type]
    if attend != len(layers):  # type: ignore[arg-type]
        raise ValueError(
            f"{name} attends {attend} times in its {len(layers)} layers, and early exit needs layers that attend once; "  # type: ignore[arg-type]
            f"{known}"
        )
    for option in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, option, None) not in (None, 0, 1):
            raise ValueError(
                f"{name} changes its logits behind its head ({option}), which early exit does not; {known}"
            )
    return ExitParts(decoder, layers, norm, head)  # type: ignore[arg-type]


class EarlyExitDraft:
    """The target's own first layers as a draft model: no second model, and no keys and values of its own.

    Args:
        model: the target, a transformers model of Llama's form (Llama, Qwen 2 and 3, Mistral, Gemma, Phi 3), or peft's or
            torch.compile's wrapper around such a model. The target's LoRA layers act in the draft too.
        layers: k, how many of its layers the draft runs; default: the adapter's.
        adapter: an ``ExitAdapter``, the path of its file, or a shipped name; None: no adapter.

    Attributes:
        model, layers, adapter: the arguments, with the model unwrapped and the adapter loaded.
    """

    def __init__(
        self, model: Any, layers: int | None = None, adapter: ExitAdapter | str | os.PathLike[str] | None = None
    ) -> None:
        model = unwrapped(model)
        parts = exit_parts(model)
        if adapter is not None and not isinstance(adapter, ExitAdapter):
            adapter = ExitAdapter.from_pretrained(adapter)
        if layers is None and adapter is None:
            raise ValueError(
                "EarlyExitDraft: give layers, how many of the model's layers the draft runs, or an adapter, got neither"
            )
        if adapter is not None:
            embedding = model.get_input_embeddings()
            embed = None if is_plain(embedding.weight) else embedding
            adapter.check_fits(embedding.weight, len(parts.layers), embed=embed)
            if layers not in (None, adapter.layers):
                raise ValueError(f"layers is {layers}, but the adapter was trained behind layer {adapter.layers}")
            layers = adapter.layers
        assert layers is not None
        whole_number("EarlyExitDraft: layers", layers, 1, len(parts.layers))
        self.model = model
        self.layers = layers
        self.adapter = adapter

    @property
    def hit_rates(self) -> HitRates | None:
        """The adapter's hit rates; None without an adapter."""
        return None if self.adapter is None else self.adapter.hit_rates

    def __repr__(self) -> str:
        adapter = "" if self.adapter is None else f", adapter=ExitAdapter({self.adapter.extra_repr()})"
        return f"EarlyExitDraft({type(self.model).__name__}, layers={self.layers}{adapter})"
