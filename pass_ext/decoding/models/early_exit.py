"""``EarlyExitDraft``: a model's own first k layers as its draft model, ``head(norm(adapter(h)))`` after them.

pass_ext/modules/exit_adapter.py has the formula and the trained adapter. Layers, embeddings, norm and head are the target's own
objects, so its keys and values equal the target's, layer by layer.
"""

from __future__ import annotations

import copy
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.decoding.arguments import whole_number
from pass_ext.decoding.models.features.table import first
from pass_ext.decoding.models.module_ops import is_plain
from pass_ext.decoding.models.packed import StepAttend
from pass_ext.decoding.models.parts import has_encoder, number_of_layers, unwrapped
from pass_ext.decoding.models.shadow import shadow_of
from pass_ext.decoding.models.slots import CallSlots
from pass_ext.decoding.models.transformers import TransformersModel
from pass_ext.modules.exit_adapter import ExitAdapter
from pass_ext.modules.files import HitRates
from pass_ext.weights.form import packed_rows
from pass_ext.weights.layers import PackedLinear, table_of


class ExitParts(NamedTuple):
    """The parts of a transformers model that an early exit uses."""

    decoder: Any
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Linear | PackedLinear


def exit_parts(model: Any) -> ExitParts:
    """Finds ``decoder.layers``, ``decoder.norm`` and the linear head that gives the logits; refuses models without them."""
    name = type(model).__name__
    known = "early exit takes models with decoder.layers, decoder.norm and a linear head (Llama's form)"
    if not all(hasattr(model, name) for name in ("get_decoder", "get_output_embeddings", "config")):
        raise TypeError(f"model must be a transformers model for causal language modelling, got {name}; {known}")
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, norm_name(model), None)
    base, beside = getattr(model, model.base_model_prefix, None), "decoder" if has_encoder(model) else "language_model"
    missing = [
        part
        for part, is_there in {
            "decoder.layers": isinstance(layers, nn.ModuleList),
            "decoder.norm": isinstance(norm, nn.Module),
            "a linear head": type(head) in (nn.Linear, PackedLinear),
            # beside encoders it is a part of the base model, which gives it the rows that it gets
            "its decoder as a direct part": decoder in (base, getattr(base, beside, None)),
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
    reason = first(lambda feature: feature.uncut(model))
    if reason is not None:
        raise ValueError(f"{name} {reason}, which early exit cannot cut; {known}")
    attend = number_of_layers(model.config) or len(layers)  # type: ignore[arg-type]
    if attend != len(layers):  # type: ignore[arg-type]
        raise ValueError(
            f"{name} attends {attend} times in its {len(layers)} layers, and early exit needs layers that attend once; "  # type: ignore[arg-type]
            f"{known}"
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise ValueError(
            f"{name} has layers that share the keys of others (num_kv_shared_layers), which early exit cannot cut; {known}"
        )
    for option in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, option, None) not in (None, 0, 1):
            raise ValueError(f"{name} changes its logits after its head ({option}), which early exit does not; {known}")
    return ExitParts(decoder, layers, norm, head)  # type: ignore[arg-type]


def norm_name(model: Any) -> str:
    """Where a decoder has its last norm; beside an encoder it has another name."""
    return "layer_norm" if has_encoder(model) else "norm"


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
        if adapter is not None and has_encoder(model):
            raise ValueError(
                f"EarlyExitDraft: adapter must be None for {type(model).__name__}, which has an encoder: adapters are trained "
                "on texts alone"
            )
        if adapter is not None:
            embedding = model.get_input_embeddings()
            table = table_of(embedding)
            embed = None if table is embedding.weight and is_plain(table) else embedding
            adapter.check_fits(table, len(parts.layers), embed=embed)
            if layers not in (None, adapter.layers):
                raise ValueError(f"layers is {layers}, but the adapter was trained after layer {adapter.layers}")
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


class EarlyExitModel(TransformersModel):
    """The first k layers of a model as a draft model.

    Attributes:
        shares_layers: k; ``attend`` is called for layers 0 to k - 1. Their keys and values of a text equal those of the
            ``shared_model``.
        vocabulary: ``[S]`` int64, the tokens that the head is computed for; all others have logits of -inf. None: all.
    """

    def __init__(self, draft: EarlyExitDraft) -> None:
        self.shares_layers, self.shared_model, self.hit_rates = draft.layers, draft.model, draft.hit_rates
        self.vocabulary: Tensor | None = None
        head = exit_parts(draft.model).head
        cut = first_layers(draft.model, draft.layers)
        if draft.adapter is not None:
            dtype = table_of(draft.model.get_input_embeddings()).dtype
            adapter = copy.deepcopy(draft.adapter).to(head.weight.device, dtype).requires_grad_(False)
            decoder = cut.get_decoder()
            decoder.norm = nn.Sequential(adapter, decoder.norm)
            if adapter.vocabulary is not None:
                if not is_plain(head.weight):
                    raise ValueError(
                        f"EarlyExitDraft: the adapter's vocabulary takes {len(adapter.vocabulary)} rows of the model's head, "
                        f"which must be a plain tensor in memory, got {type(head.weight).__name__} on {head.weight.device}; "
                        "use an adapter for the whole vocabulary"
                    )
                self.vocabulary = adapter.vocabulary.to(head.weight.device, torch.int64)
                cut.set_output_embeddings(rows_of_head(head, self.vocabulary))
        super().__init__(cut)
        self._tokens = (
            table_of(draft.model.get_input_embeddings()).shape[0] if self.vocabulary is None else head.out_features
        )

    def __call__(
        self, rows: Tensor, positions: Tensor, attend: StepAttend, wanted: Tensor | None, slots: CallSlots | None = None
    ) -> Tensor:
        """Calls the layers as ``Adapted`` does; the logits are as wide as the target's."""
        logits = super().__call__(rows, positions, attend, wanted, slots)
        if self.vocabulary is None:
            return logits
        return logits.new_full((len(logits), self._tokens), -torch.inf).index_copy_(1, self.vocabulary, logits)


def rows_of_head(head: nn.Linear | PackedLinear, vocabulary: Tensor) -> nn.Linear | PackedLinear:
    """A head for these tokens only, in their order; its weights are a copy."""
    if isinstance(head, PackedLinear):
        bias = None if head.bias is None else head.bias.detach()[vocabulary]
        return PackedLinear(packed_rows(head.weight, vocabulary), len(vocabulary), bias, head.order)
    fewer = nn.Linear(head.in_features, len(vocabulary), bias=head.bias is not None, device="meta")
    fewer.weight = nn.Parameter(head.weight.detach()[vocabulary], requires_grad=False)
    if head.bias is not None:
        fewer.bias = nn.Parameter(head.bias.detach()[vocabulary], requires_grad=False)
    return fewer


def first_layers(model: Any, count: int) -> Any:
    """The model without its later layers, sharing all weights; hooks on the model and its layers stay with the model."""
    part = shadow_of(model)
    decoder = part.get_decoder()
    decoder.layers = decoder.layers[:count]
    config = part.config.get_text_config(decoder=True)  # a copy, of a model with an encoder
    if has_encoder(part):
        part.config.decoder_layers = count
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    for module in (part, decoder, *decoder.layers):
        for name, hooks in vars(module).items():
            if name.startswith(("_forward_hooks", "_forward_pre_hooks")):
                vars(module)[name] = type(hooks)()
    return part
