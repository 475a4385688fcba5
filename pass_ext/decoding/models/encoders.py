"""Encoders beside decoders (Whisper, Bart): keys and values of an encoder's outputs, to which rows attend besides their text.

    cross attention   softmax(scale q K^T) V over all that the encoder has made of a request's input

The model's own code computes K and V of each layer, once per request: in a call on one token, whose cache has them. In a shadow
the layers find them in a cache again, and attention knows them by their identity.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import lru_cache
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.models.parts import cache_name, decoder_of, has_encoder, unwrapped
from pass_ext.decoding.models.shadow import shadow_of
from pass_ext.decoding.models.whole_prompts import INPUTS, is_nothing, naming_inputs
from pass_ext.ops.attention import padded_widths

ENCODER_INPUTS = INPUTS | {"encoder_outputs", "inputs", "decoder_input_ids", "decoder_attention_mask"}
"""What reaches a decoder by its encoder alone, and the decoder's beginning."""
_CROSS = {"encoder_attn", "crossattention"}  # what transformers' layers call their attention to an encoder
_OUTPUTS = "encoder_outputs", "encoder_hidden_states"
"""What the forward of a model calls its encoder's, and that of a decoder alone."""


class Encoded:
    """What rows see of an encoder's outputs.

    Args:
        layers: keys and values ``[B, S, heads, D]`` of each layer.
        lengths: ``[B]`` int32, how many of S a request sees.
        width: of the encoder's outputs.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], lengths: Tensor, width: int) -> None:
        self.width = width
        self.lengths, self.dims = lengths, (layers[0][0].shape[-1], layers[0][1].shape[-1])
        widths = padded_widths(*self.dims, lengths.device, in_codes=False)
        self.layers = [(pad(k, (0, widths[0] - k.shape[-1])), pad(v, (0, widths[1] - v.shape[-1]))) for k, v in layers]
        cut = [(k[..., : self.dims[0]], v[..., : self.dims[1]]) for k, v in self.layers]
        found = [SimpleNamespace(keys=k.transpose(1, 2), values=v.transpose(1, 2)) for k, v in cut]
        self._numbers = {id(layer.keys): number for number, layer in enumerate(found)}
        self.cache = _cache_of(found)
        """As transformers' layers take it: that of the text keeps nothing."""

    def layer_of(self, keys: Tensor) -> int | None:
        """The number of the layer whose keys these are, by identity; None: they are a text's."""
        return self._numbers.get(id(keys))

    def repeated(self, copies: int) -> Encoded:
        """Of requests that stand ``copies`` times, side by side."""
        if copies == 1:
            return self
        layers = [(k[..., : self.dims[0]], v[..., : self.dims[1]]) for k, v in self.layers]
        return Encoded(
            [(k.repeat_interleave(copies, 0), v.repeat_interleave(copies, 0)) for k, v in layers],
            self.lengths.repeat_interleave(copies),
            self.width,
        )


class EncoderInputs:
    """The encoder's side of the prompts of a batch.

    Args:
        outputs: of the encoder; None: it has not read them yet.
        mask: ``[B, S]``, 0 where an input is padding; None: nowhere.
        given: what a processor gives; {}: not known.
        cross: transformers' cache of the keys and values of these outputs, from an earlier call; None: there was none.
    """

    def __init__(self, outputs: Any, mask: Tensor | None, given: Mapping[str, Any], cross: Any = None) -> None:
        self._outputs, self._mask, self._given, self._earlier = outputs, mask, given, cross
        self.keeps_cross = False
        """The cache of the first call is wanted."""
        self.cross: Any = None
        """That cache, once the target's decoder was called."""

    @classmethod
    def of_processor(cls, given: Mapping[str, Any], model: Adapted) -> EncoderInputs:
        """Of what a processor gives."""
        inner = unwrapped(model.model)
        encoder, forward = (signature(type(part).forward).parameters for part in (inner.get_encoder(), inner))
        known = {*encoder, inner.main_input_name, "attention_mask", "encoder_outputs"} & {*forward}
        given = {name: value for name, value in given.items() if not is_nothing(value)}
        for name, value in given.items():
            if name not in known or name.startswith(("output_", "use_cache", "return_dict")):
                raise ValueError(
                    f"generate: prompt: the input {name} of {model.name} is not supported, got {type(value).__name__}: leave "
                    "it out; the decoder's beginning is input_ids"
                )
        if given.get(inner.main_input_name) is None and given.get("encoder_outputs") is None:
            raise ValueError(
                f"generate: prompt must have {inner.main_input_name}, which the encoder of {model.name} reads, got "
                f"{', '.join(given)}"
            )
        return cls(given.get("encoder_outputs"), given.get("attention_mask"), given)

    def of_draft(self, draft: Adapted) -> Encoded:
        """Of a draft model: its own encoder reads what a processor gave; a decoder alone, or where that is not known, has the
        outputs of the target's."""
        inner = unwrapped(draft.model)
        if not has_encoder(inner) or self._given.get(inner.main_input_name) is None:
            return self.read(draft)
        return EncoderInputs(None, self._given.get("attention_mask"), self._given).read(draft)

    @torch.no_grad()
    def read(self, model: Adapted) -> Encoded:
        """Calls the model's own encoder, if its outputs are not known, and its decoder on one token."""
        from transformers import DynamicCache, EncoderDecoderCache

        shadow = shadow_of(unwrapped(model.model))
        decoder, outputs, names = decoder_of(shadow), self._outputs, [*self._given] or ["encoder_outputs"]
        with naming_inputs(model.model, names):
            if outputs is None:
                outputs = self._outputs = self._encoded(shadow)
            if isinstance(outputs, Tensor):
                outputs = _outputs_of(outputs)
            hidden = outputs[0]
            batch, rows = hidden.shape[:2]
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            forward = signature(type(shadow).forward).parameters
            name, prefix, masks = _arguments_of(shadow)
            has_mask = "encoder_attention_mask" in signature(type(decoder).forward).parameters
            mask = self._mask if has_mask and masks in forward else None
            if mask is not None and mask.shape != (batch, rows):
                raise ValueError(
                    f"attention_mask must be of the encoder's outputs, {[batch, rows]}, got {[*mask.shape]}"
                )
            shadow(
                use_cache=True,
                return_dict=True,
                **{
                    f"{prefix}input_ids": torch.zeros(batch, 1, dtype=torch.long, device=hidden.device),
                    name: _outputs_for(outputs, name, prefix),
                    cache_name(type(shadow).forward): cache,
                },
                **({} if mask is None else {masks: mask}),
            )
        layers = [
            (layer.keys.transpose(1, 2), layer.values.transpose(1, 2))  # type: ignore[union-attr]
            for layer in cache.cross_attention_cache.layers
        ]
        if self.keeps_cross and self.cross is None:
            self.cross = cache.cross_attention_cache
        if self._earlier is not None:
            self._check_earlier(layers, model.name)
        rows = layers[0][0].shape[1]
        seen = torch.ones(batch, rows, dtype=torch.bool, device=hidden.device) if mask is None else mask.bool()
        lengths = seen.sum(1, dtype=torch.int32)
        if not bool(seen.all()):  # padding comes last
            order = seen.to(torch.int8).sort(dim=1, descending=True, stable=True).indices[..., None, None]
            layers = [(k.gather(1, order.expand_as(k)), v.gather(1, order.expand_as(v))) for k, v in layers]
        return Encoded(layers, lengths, hidden.shape[-1])

    def _check_earlier(self, layers: Sequence[tuple[Tensor, Tensor]], name: str) -> None:
        """Refuses a cache of another input, of which the target's decoder would have read the text."""
        earlier, self._earlier = self._earlier.layers, None
        pairs = zip(earlier, layers, strict=len(earlier) == len(layers))
        if len(earlier) != len(layers) or not all(
            layer.keys.shape[2] >= keys.shape[1]
            and torch.allclose(layer.keys[:, :, : keys.shape[1]].transpose(1, 2).to(keys), keys, rtol=0.05, atol=0.05)
            for layer, (keys, _) in pairs
        ):
            raise ValueError(
                f"past_key_values must be of the input that the encoder of {name} reads now, got keys of another one"
            )

    def _encoded(self, shadow: Any) -> Any:
        encoder = shadow.get_encoder()
        known = signature(type(encoder).forward).parameters
        inputs = {name: value for name, value in self._given.items() if name in known}
        main = shadow.main_input_name
        if main not in inputs and main in self._given:
            inputs[main] = self._given[main]
        return encoder(**inputs, return_dict=True)


def listening(draft: Adapted, target: Adapted) -> Adapted:
    """The draft model; where its layers attend to an encoder that it has not, as one that attends to the target's outputs.
    Refuses what could not hear as the target does."""
    if draft.has_encoder and not target.has_encoder:
        raise ValueError(
            f"draft_model must have no encoder for {target.name}, which has none, got {type(unwrapped(draft.model)).__name__}"
        )
    parts = draft.model.modules() if isinstance(draft.model, torch.nn.Module) else ()
    if not target.has_encoder or draft.has_encoder or not any(_CROSS & part._modules.keys() for part in parts):
        return draft
    inner, encoder = unwrapped(draft.model), unwrapped(target.model).get_encoder()
    if not set(_OUTPUTS) & signature(type(inner).forward).parameters.keys():
        raise ValueError(
            f"draft_model must have the encoder that its layers attend to, got {type(inner).__name__}: load it with "
            "AutoModelForSpeechSeq2Seq or AutoModelForSeq2SeqLM"
        )
    if inner.config.hidden_size != encoder.config.hidden_size:
        raise ValueError(
            f"draft_model must attend to rows of {encoder.config.hidden_size} numbers, which the encoder of {target.name} "
            f"makes, got {type(inner).__name__} for {inner.config.hidden_size}"
        )
    found = copy.copy(draft)
    found.has_encoder = True
    return found


def some_inputs(model: Adapted) -> EncoderInputs:
    """Inputs of one request, as long as the model takes or 256 rows, to measure calls by."""
    inner = unwrapped(model.model)
    config = (inner.get_encoder() if has_encoder(inner) else inner).config
    rows = getattr(config, "max_source_positions", 256)
    return EncoderInputs(model.table.new_zeros(1, rows, config.hidden_size), None, {})


def _outputs_of(hidden: Tensor) -> Any:
    """As an encoder gives them. Some decoders attend to the pooled ones."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=hidden)


def _outputs_for(outputs: Any, name: str, prefix: str) -> Any:
    """The encoder's outputs as a model's forward takes them: a decoder alone takes their rows."""
    return outputs[0] if name != _OUTPUTS[0] else outputs if prefix else (outputs[0],)


def _arguments_of(model: Any) -> tuple[str, str, str]:
    """What a model's forward calls the encoder's outputs, what its names of the decoder's inputs begin with, and what it calls
    the mask of the outputs."""
    known = signature(type(model).forward).parameters
    alone = "decoder_input_ids" not in known
    name = next(name for name in _OUTPUTS if name in known)
    return name, "" if alone else "decoder_", "encoder_attention_mask" if alone else "attention_mask"


def decoder_inputs(model: Any, encoded: Encoded, rows: Tensor, seen: Tensor) -> dict[str, Any]:
    """The arguments of a shadow's call on rows ``[N, d]``."""
    hidden = rows.new_zeros(1, 1, encoded.width)  # nobody reads them: keys and values are in the cache
    name, prefix, _ = _arguments_of(unwrapped(model))
    return {
        name: _outputs_for(_outputs_of(hidden), name, prefix),
        f"{prefix}inputs_embeds": rows[None],
        f"{prefix}attention_mask": seen,
        "use_cache": True,
        cache_name(type(unwrapped(model)).forward): encoded.cache,
        "return_dict": True,
    }


@lru_cache
def _passing_cache() -> Any:
    from transformers import DynamicCache

    class PassingCache(DynamicCache):
        """A cache of the text that keeps nothing: attention has its keys elsewhere."""

        def update(  # type: ignore[override]
            self, keys: Tensor, values: Tensor, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            return keys, values

    return PassingCache


def _cache_of(layers: list[Any]) -> Any:
    from transformers import DynamicCache, EncoderDecoderCache

    cache: Any = EncoderDecoderCache(_passing_cache()(), DynamicCache())
    cache.cross_attention_cache = SimpleNamespace(layers=layers)
    cache.is_updated = dict.fromkeys(range(len(layers)), True)
    return cache
