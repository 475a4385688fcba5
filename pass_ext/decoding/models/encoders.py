"""Encoders beside decoders (Whisper, Bart): keys and values of an encoder's outputs, to which rows attend besides their text.

    cross attention   softmax(scale q K^T) V over all that the encoder has made of a request's input

The model's own code computes K and V of each layer, once per request: in a call on one token, whose cache has them. In a shadow
the layers find them in a cache again, and attention knows them by their identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.models.parts import cache_name, decoder_of, unwrapped
from pass_ext.decoding.models.shadow import shadow_of
from pass_ext.decoding.models.whole_prompts import INPUTS, is_nothing, naming_inputs
from pass_ext.ops.attention import padded_widths

ENCODER_INPUTS = INPUTS | {"encoder_outputs", "inputs", "decoder_input_ids", "decoder_attention_mask"}
"""What reaches a decoder by its encoder alone, and the decoder's beginning."""
_CROSS = {"encoder_attn", "crossattention"}  # what transformers' layers call their attention to an encoder


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
    """

    def __init__(self, outputs: Any, mask: Tensor | None, given: Mapping[str, Any]) -> None:
        self._outputs, self._mask, self._given = outputs, mask, given

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
        """Of a draft model: its own encoder reads what a processor gave; where that is not known, its decoder reads the same
        outputs."""
        if self._given.get(unwrapped(draft.model).main_input_name) is None:
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
                outputs = self._encoded(shadow)
            hidden = outputs if isinstance(outputs, Tensor) else outputs[0]
            batch, rows = hidden.shape[:2]
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            forward = signature(type(shadow).forward).parameters
            has_mask = "encoder_attention_mask" in signature(type(decoder).forward).parameters
            mask = self._mask if has_mask and "attention_mask" in forward else None
            if mask is not None and mask.shape != (batch, rows):
                raise ValueError(
                    f"attention_mask must be of the encoder's outputs, {[batch, rows]}, got {[*mask.shape]}"
                )
            shadow(
                decoder_input_ids=torch.zeros(batch, 1, dtype=torch.long, device=hidden.device),
                encoder_outputs=(hidden,),
                use_cache=True,
                return_dict=True,
                **{cache_name(type(shadow).forward): cache},
                **({} if mask is None else {"attention_mask": mask}),
            )
        layers = [
            (layer.keys.transpose(1, 2), layer.values.transpose(1, 2))  # type: ignore[union-attr]
            for layer in cache.cross_attention_cache.layers
        ]
        seen = torch.ones(batch, rows, dtype=torch.bool, device=hidden.device) if mask is None else mask.bool()
        lengths = seen.sum(1, dtype=torch.int32)
        if not bool(seen.all()):  # padding comes last
            order = seen.to(torch.int8).sort(dim=1, descending=True, stable=True).indices[..., None, None]
            layers = [(k.gather(1, order.expand_as(k)), v.gather(1, order.expand_as(v))) for k, v in layers]
        return Encoded(layers, lengths, hidden.shape[-1])

    def _encoded(self, shadow: Any) -> Any:
        encoder = shadow.get_encoder()
        known = signature(type(encoder).forward).parameters
        inputs = {name: value for name, value in self._given.items() if name in known}
        main = shadow.main_input_name
        if main not in inputs and main in self._given:
            inputs[main] = self._given[main]
        return encoder(**inputs, return_dict=True)


def check_draft(draft: Adapted, target: Adapted) -> None:
    """Refuses a draft model that would miss what its layers attend to."""
    if draft.has_encoder and not target.has_encoder:
        raise ValueError(
            f"draft_model must have no encoder for {target.name}, which has none, got {type(unwrapped(draft.model)).__name__}"
        )
    parts = draft.model.modules() if isinstance(draft.model, torch.nn.Module) else ()
    if target.has_encoder and not draft.has_encoder and any(_CROSS & part._modules.keys() for part in parts):
        raise ValueError(
            f"draft_model must have the encoder that its layers attend to, got {type(unwrapped(draft.model)).__name__}: load "
            "it with AutoModelForSpeechSeq2Seq or AutoModelForSeq2SeqLM"
        )


def some_inputs(model: Adapted) -> EncoderInputs:
    """Inputs of one request, as long as the model takes or 256 rows, to measure calls by."""
    encoder, table = unwrapped(model.model).get_encoder(), model.table
    rows = getattr(encoder.config, "max_source_positions", 256)
    return EncoderInputs(table.new_zeros(1, rows, encoder.config.hidden_size), None, {})


def decoder_inputs(model: Any, encoded: Encoded, rows: Tensor, seen: Tensor) -> dict[str, Any]:
    """The arguments of a shadow's call on rows ``[N, d]``."""
    hidden = rows.new_zeros(1, 1, encoded.width)  # nobody reads them: keys and values are in the cache
    return {
        "encoder_outputs": (hidden,),
        "decoder_inputs_embeds": rows[None],
        "decoder_attention_mask": seen,
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
