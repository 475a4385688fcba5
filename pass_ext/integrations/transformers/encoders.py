"""What transformers prepares for a loop of a model with an encoder, in pass_ext's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pass_ext.decoding.models.cache import write_cache
from pass_ext.decoding.models.encoders import EncoderInputs
from pass_ext.decoding.models.parts import given_cache, unwrapped


def prepared_inputs(model: Any, prepared: Mapping[str, Any], given: Mapping[str, Any]) -> EncoderInputs:
    """The encoder's outputs; and its inputs, for the encoder of a draft model. given: what the caller wrote."""
    cache, main = given_cache(prepared), unwrapped(model).main_input_name
    read = {main: given.get("inputs") if given.get(main) is None else given[main]}
    if given.get("attention_mask") is not None:
        read["attention_mask"] = given["attention_mask"]
    cross = cache.cross_attention_cache if cache is not None and any(cache.is_updated.values()) else None
    return EncoderInputs(prepared["encoder_outputs"], prepared.get("attention_mask"), read, cross)


def with_cross(cache: Any, own: Any, cross: Any) -> Any:
    """The cache of a decoder beside an encoder: own, of its text; cross, of the encoder's outputs."""
    cache.self_attention_cache = own
    for number, layer in enumerate(cross.layers):
        if not cache.is_updated.get(number):
            write_cache(cache.cross_attention_cache, number, layer.keys, layer.values)
            cache.is_updated[number] = True
    return cache


def after_listening(processors: Sequence[Any], model: Any, ids: Tensor, prepared: Mapping[str, Any]) -> list[Any]:
    """The processors but for those that only notice whether there is speech, by the first logits: they are asked here."""
    rest = []
    for processor in processors:
        if type(processor).__name__ != "WhisperNoSpeechDetection":
            rest.append(processor)
            continue
        logits = None
        if processor.start_of_trans_offset <= 1:  # it would look at the scores of a loop's first step
            inputs = {name: prepared.get(name) for name in ("encoder_outputs", "decoder_attention_mask")}
            logits = model(decoder_input_ids=ids, **inputs, use_cache=False).logits[:, -1]
        processor(ids, logits)
    return rest
