"""``WholePrompts``: prompts that are more than text (pictures, sound, embeddings), read by the model's own forward.

    keys, values, states   of all tokens
    logits                 of each prompt's last token, from which the first new one is drawn
    offset                 of each text: position of a row - its index in the text, after the prompt. M-RoPE gives the rows of
                           a picture fewer positions than there are
    begin                  of each text: the first token after all rows that are no token's own, where drafters begin to read

A model that keeps states reads all but the last column, which decoding reads as that of any text: a state cannot go back.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pass_ext.decoding.models.cache import (
    full_cache,
    layers_that_attend,
    other_format,
    read_states,
    texts_in_cache,
)
from pass_ext.decoding.models.equivalence import MACHINE
from pass_ext.decoding.models.features.table import first, places_of
from pass_ext.decoding.models.limits import placeholder_ids
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.models.parts import cache_name, decoder_of, given_cache, unwrapped
from pass_ext.decoding.models.shadow import OurCall, our_call, shadow_of, tap_layers
from pass_ext.decoding.models.taps import Tap, Taps

INPUTS = frozenset(
    {
        *("mm_encoder_outputs", "inputs_embeds", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"),
        *("pixel_values", "pixel_mask", "pixel_attention_mask", "pixel_values_images", "pixel_values_local"),
        *("image_pixel_values", "image_attention_mask", "high_res_pixel_values", "num_local_patches", "image_patches"),
        *(
            "image_patches_indices",
            "image_sizes",
            "target_sizes",
            "batch_num_images",
            "image_num_crops",
            "tile_fine_mask",
        ),
        *(
            "image_grid_thw",
            "image_grid_hw",
            "image_position_ids",
            "spatial_shapes",
            "num_image_tokens",
            "image_merge_sizes",
        ),
        *("pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "image_sizes_videos", "video_position_ids"),
        *("target_sizes_videos", "video_merge_sizes", "video_compression_mask", "num_frames_per_video"),
        *("patches_grid", "image_token_pooling", "image_grids", "video_token_pooling", "video_grids"),
        *("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio", "downsample_mode", "sample"),
        *("input_features", "input_features_mask", "input_values", "input_values_mask", "padding_mask"),
        *("feature_attention_mask", "audio_features", "audio_feature_lengths", "audio_attention_mask"),
        *(
            "audio_input_features",
            "audio_embed_sizes",
            "audio_input_ids",
            "audio_input_ids_mask",
            "chunk_sample_lengths",
        ),
        *("use_audio_in_video", "video_second_per_grid", "interpolate_pos_encoding"),
    }
)
"""What a model takes of a prompt alone. Rows after it depend on its keys, values, states and positions only."""


def inputs_of(config: Any) -> frozenset[str]:
    """Those of ``INPUTS`` that a model of this config takes of a prompt alone. One of text alone adds ``token_type_ids`` to
    rows after the prompt too."""
    return INPUTS if config.sub_configs else frozenset({"inputs_embeds"})


def is_nothing(value: Any) -> bool:
    """True for None and for an empty container: transformers prepares ``mm_encoder_outputs={}`` where there is no picture."""
    return value is None or (isinstance(value, (Mapping, list, tuple)) and not value)


def parts_of(
    prompt: Mapping[str, Any], input_ids: Tensor, attention_mask: Tensor | None, model: Adapted
) -> tuple[Tensor | None, dict[str, Any]]:
    """The attention mask, and what the model reads beside ids and mask, of what a processor has given."""
    if not hasattr(model.model, "generate") or not hasattr(model.model, "config"):
        raise TypeError(
            f"generate: prompt must be None for {type(model.model).__name__}, no generating model of transformers, got "
            f"{', '.join(prompt)}"
        )
    rest = {name: value for name, value in prompt.items() if not is_nothing(value)}
    own, mask = rest.pop("input_ids", input_ids), rest.pop("attention_mask", attention_mask)
    for name, theirs, given in (("input_ids", own, input_ids), ("attention_mask", mask, attention_mask)):
        if given is not None and not (theirs is given or torch.equal(torch.as_tensor(theirs).to(given), given)):
            raise ValueError(f"generate: prompt has other {name} than the argument {name}: leave one of them out")
    known = inputs_of(unwrapped(model.model).config)
    for name, value in rest.items():
        if name not in known:
            raise ValueError(
                f"generate: prompt: the input {name} of {model.name} is not supported, got {type(value).__name__}: leave it out"
            )
    return mask, rest


# Of the model's inputs, those with a column for each token: their last dimension.
_BY_COLUMN = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "mm_token_type_ids",
    "moe_mm_token_type_ids",
)


def ids_of(inputs_embeds: Tensor, model: Adapted) -> Tensor:
    """Ids ``[B, T]`` for rows that came without: the last one's is the token whose row it is; before it stands any id, which
    drafters do not read."""
    ids = inputs_embeds.new_zeros(inputs_embeds.shape[:2], dtype=torch.int64)
    known = model.embed_tokens(torch.arange(len(model.table), device=model.table.device))
    for b, row in enumerate(inputs_embeds[:, -1].to(known)):
        found = (known == row).all(1).nonzero()
        if not len(found):
            raise ValueError(
                f"inputs_embeds must end with the row of a token of {model.name}'s table, or come with input_ids: the last row "
                f"may be read again by its id, and prompt {b} ends with a row that is no token's"
            )
        ids[b, -1] = found[0, 0]
    return ids


def check_embeddings(input_ids: Tensor, inputs: Mapping[str, Any]) -> None:
    """Refuses ``inputs_embeds`` of other rows than the ids'."""
    embeds = inputs.get("inputs_embeds")
    if embeds is not None and embeds.shape[:2] != input_ids.shape:
        raise ValueError(
            f"inputs_embeds must come with the input_ids of all its rows, {list(embeds.shape[:2])}, got "
            f"{list(input_ids.shape)}: drafts and logits processors read them, and the last row may be read again by its id. "
            "Where a row is no token's own give any id, such as a placeholder's"
        )


class ReadPrompts(NamedTuple):
    """What the model's own forward has made of prompts: of the first ``lengths[b]`` tokens of each."""

    layers: list[tuple[Tensor, Tensor]]
    """Keys and values ``[B, n, heads, D]`` of each layer that attends."""
    lengths: list[int]
    states: list[Tensor]
    offsets: list[int]
    begins: list[int]
    hidden: list[Tensor]
    """``[n, taps, d]`` of each text, from its begin on; none without taps."""
    logits: Tensor | None
    """``[B, V]``, of the last tokens; None: these were not read."""


class WholePrompts:
    """Prompts as transformers' ``generate`` has prepared them for a loop.

    Args:
        input_ids: ``[B, T]``, padded on the left.
        mask: ``[B, T]``, 0 for padding.
        config: the generation config.
        inputs: what the loop gets for the model.
        names: those of ``INPUTS`` that the caller gave.
    """

    def __init__(
        self, input_ids: Tensor, mask: Tensor, config: Any, inputs: Mapping[str, Any], names: Sequence[str]
    ) -> None:
        self._ids, self._mask, self._config, self._inputs, self._names = input_ids, mask, config, inputs, names
        self.copies = 1
        """Texts of each prompt that transformers has made rows of, and that are read once."""
        if bool((mask[:, -1] == 0).any()):
            raise ValueError(
                f"prompts with {', '.join(names)} must be padded on the left, where transformers expects padding: set "
                "processor.tokenizer.padding_side = 'left'"
            )
        check_embeddings(input_ids, inputs)

    def once(self, copies: int, config: Any) -> WholePrompts:
        """The prompts without the copies that transformers has made for ``num_return_sequences``, in whatever they can be told
        apart; else these."""
        cache = given_cache(self._inputs)
        if copies < 2 or any(getattr(layer, "keys", None) is not None for layer in getattr(cache, "layers", ())):
            return self
        inputs = {name: _without_copies(value, copies) for name, value in self._inputs.items()}
        ids, encoded = self._ids[::copies], dict[str, Any]()
        for name, outputs in (self._inputs.get("mm_encoder_outputs") or {}).items():
            counts = ids.eq(getattr(config, f"{name}_token_id", None) or -1).sum(1).tolist()
            encoded[name] = _outputs_without_copies(outputs, counts, copies)
        known = [value is not None or self._inputs[name] is None for name, value in inputs.items()]
        if not all(known) or None in encoded.values():
            return self
        inputs |= {"mm_encoder_outputs": encoded} if encoded else {}
        found = WholePrompts(ids, self._mask[::copies], self._config, inputs, self._names)
        found.copies = copies
        return found

    @classmethod
    def prepared(cls, model: Any, input_ids: Tensor, mask: Tensor, inputs: Mapping[str, Any]) -> WholePrompts:
        """Has transformers prepare prompts, with what a processor gives beside their ids."""
        names, inner = list(inputs) or ["input_ids"], unwrapped(model)

        def take(
            given: Any,
            ids: Tensor,
            *,
            generation_config: Any,
            logits_processor: Any,
            stopping_criteria: Any,
            **named: Any,
        ) -> WholePrompts:
            if given is not inner:
                raise ValueError(
                    f"{type(inner).__name__} gives prompts with {', '.join(names)} to the generate of its "
                    f"{type(given).__name__}: call the model's own generate with custom_generate=pass_ext.custom_generate(…)"
                )
            return cls(ids, mask, generation_config, named, names)

        alone = dict(max_new_tokens=1, num_return_sequences=1, num_beams=1, do_sample=False)
        with naming_inputs(model, names):
            found: WholePrompts = model.generate(
                input_ids=input_ids, attention_mask=mask, **inputs, **alone, custom_generate=take
            )
        return found

    def read(self, model: Adapted, taps: Sequence[Tap]) -> ReadPrompts:
        """Calls the model's own forward."""
        inner, name, lengths = unwrapped(model.model), model.name, self._mask.sum(1).tolist()
        kept = other_format(inner)
        if kept:
            raise ValueError(
                f"{name} caches {kept}, which pass_ext cannot read, so prompts must be text alone, got {', '.join(self._names)}"
            )
        if model.numbers == {}:
            raise ValueError(
                f"{name} has layers with states alone, whose cache does not tell how many tokens it is of, so prompts must be "
                f"text alone, got {', '.join(self._names)}"
            )
        shadow, cut = shadow_of(inner), 1 if model.keeps_states else 0
        notes = _Notes()
        decoder = decoder_of(shadow)
        decoder.forward = partial(_noted, decoder.forward, notes)
        tapped = Taps(taps) if taps else None
        if tapped is not None:
            tap_layers(shadow)
        cache = given_cache(self._inputs)
        if cache is None or not int(cache.get_seq_length()):
            cache = full_cache(inner.config)
        with naming_inputs(model.model, self._names):
            columns, logits = self._call(shadow, cache, cut, tapped)
        starts = (self._mask.shape[1] - self._mask.sum(1)).long()
        held = [length - cut for length in lengths]
        attending = layers_that_attend(cache) if model.numbers is None else list(model.numbers)
        layers = texts_in_cache(cache, attending, starts, max(held), inner)
        states = read_states(cache, places_of(inner)) if model.keeps_states else []
        own = self._own_rows(model, notes, columns, cut)
        begins = [_after(own[b, start:].tolist()) for b, start in enumerate(starts.tolist())]
        if any(begin == length for begin, length in zip(begins, lengths, strict=True)):
            raise ValueError(
                f"{name}: prompts must end with a token, whose row is its own in the table of embeddings, got one that ends in "
                f"a row of {', '.join(self._names)}"
            )
        hidden = [] if tapped is None else self._hidden(tapped.states, self._ids.shape[1] - cut, begins)
        return ReadPrompts(
            layers, held, states, self._offsets(model, notes, cut), begins, hidden, None if cut else logits
        )

    def _call(self, shadow: Any, cache: Any, cut: int, taps: Taps | None) -> tuple[int, Tensor]:
        """Reads all but the last ``cut`` columns that the cache does not hold -> their number, and the logits ``[B, V]`` of the
        last one."""
        inputs, config = dict(self._inputs), copy.copy(self._config)
        for name in ("cache", "past_key_values"):
            inputs.pop(name, None)
        total = self._ids.shape[1] - cut
        inputs |= {cache_name(type(shadow).forward): cache, "use_cache": True}
        ids = self._ids[:, :total]
        if cut:
            for name in _BY_COLUMN:
                if isinstance(inputs.get(name), Tensor) and inputs[name].shape[-1] == total + cut:
                    inputs[name] = inputs[name][..., :total]
            if inputs.get("inputs_embeds") is not None:
                inputs["inputs_embeds"] = inputs["inputs_embeds"][:, :total]
            if getattr(config, "_mask_length", None) is not None:
                config._mask_length -= cut
        columns = total - int(cache.get_seq_length())
        seen = torch.ones(len(ids), columns, dtype=torch.bool, device=ids.device)
        with nullcontext() if taps is None else our_call(OurCall(None, seen=seen, taps=taps)):
            if hasattr(shadow, "_prefill"):
                outputs = shadow._prefill(ids, config, inputs)
            else:  # transformers 4
                inputs = shadow._get_initial_cache_position(ids.shape[1], ids.device, inputs)
                outputs = shadow(**shadow.prepare_inputs_for_generation(ids, **inputs), return_dict=True)
        return columns, outputs.logits[:, -1].clone()  # some models keep those of all columns

    def _own_rows(self, model: Adapted, notes: _Notes, columns: int, cut: int) -> Tensor:
        """``[B, T]``, True where a row was its token's own in the table, as the rows after the prompt are. Of columns that
        were in the cache it is not known."""
        config = unwrapped(model.model).config
        rows = notes.ids if notes.rows is None else notes.rows
        if rows is None or rows.shape[1] != columns:
            raise ValueError(
                f"{model.name} makes {'unknown' if rows is None else rows.shape[1]} rows of {columns} ids with "
                f"{', '.join(self._names)}: give ids with a placeholder for every row, as its processor of today makes them"
            )
        own = torch.zeros_like(self._mask, dtype=torch.bool)
        end = self._ids.shape[1] - cut
        ids = self._ids[:, end - columns : end].flatten().to(model.table.device)
        if notes.rows is None:  # the decoder itself embeds, and may put a picture in
            is_own = ~torch.isin(ids, ids.new_tensor(placeholder_ids(config, len(model.table))))
        else:
            rows = rows.flatten(0, 1)
            is_own = (rows == model.embed_tokens(ids).to(rows)).all(1)
        own[:, end - columns : end] = is_own.view(len(own), columns).to(own.device)
        own[:, end:] = True  # read again as tokens
        return own

    def _offsets(self, model: Adapted, notes: _Notes, cut: int) -> list[int]:
        """Each text's position of rows after the prompt less their index."""
        total, lengths = self._mask.shape[1], self._mask.sum(1).tolist()
        if notes.positions is None:  # the decoder counts columns
            return [total - length for length in lengths]
        given, positions, end = self._inputs.get("position_ids"), notes.positions, total - cut
        if cut and given is not None and given.dim() == positions.dim() and given.shape[-1] == total:
            positions, end = given, total
        if positions.dim() == 3 and len(positions) == 4:
            positions = positions[1:]  # in front are indices in the text
        axes = positions.reshape(-1, *positions.shape[-2:]).expand(-1, len(lengths), -1)
        places = slice(end - axes.shape[-1], end)
        is_text, index = (
            self._mask[:, places].to(axes.device) != 0,
            (self._mask.cumsum(1) - 1)[:, places].to(axes.device),
        )
        reason = first(lambda feature: feature.unplaced(unwrapped(model.model)))
        if reason is not None and bool(((axes != index) & is_text).any()):
            raise ValueError(
                f"{model.name}: {reason}, which is no position after {', '.join(self._names)}: prompts must be text alone"
            )
        # After a prompt a model counts on from the largest position, which is the last token's.
        largest = axes.where(is_text, -1).amax((0, 2))
        if end == total and bool((axes[:, :, -1] != largest).any()):
            raise ValueError(
                f"{model.name}: the last token of each prompt must have its largest position, got {axes[:, :, -1].tolist()}"
            )
        return [int(last) - (end - total + length - 1) for last, length in zip(largest, lengths, strict=True)]

    def _hidden(self, states: Tensor, end: int, begins: Sequence[int]) -> list[Tensor]:
        """The states ``[B * columns, taps, d]`` of columns before ``end`` by text, from its begin on."""
        by_text = states.unflatten(0, (len(begins), -1))
        first = end - by_text.shape[1]
        starts = (self._mask.shape[1] - self._mask.sum(1)).tolist()
        columns = zip(by_text, starts, begins, strict=True)
        return [own[start + begin - first :] for own, start, begin in columns]


def _without_copies(value: Any, copies: int) -> Any:
    """A tensor of which each row stands ``copies`` times, or each column of 3D positions, with each once; None: it is none."""
    if not isinstance(value, Tensor):
        return value
    for axis in (0, 1) if value.dim() == 3 else (0,):
        once = value.index_select(axis, torch.arange(0, value.shape[axis], copies, device=value.device))
        if torch.equal(once.repeat_interleave(copies, axis), value):
            return once
    return None


def _outputs_without_copies(outputs: Any, counts: Sequence[int], copies: int) -> Any:
    """An encoder's outputs, of which those of each text stand ``copies`` times, with those of each once. counts: the rows of
    each text. None: they cannot be told apart."""
    entries, kept, at = getattr(outputs, "pooler_output", None), list[int](), 0
    deep = getattr(outputs, "deepstack_features", None)
    if entries is None or (deep is not None and any(len(features) != len(entries) for features in deep)):
        return None
    sizes = list(map(len, entries))
    for count in counts:
        first = at
        while at < len(sizes) and sum(sizes[first:at]) < count:
            at += 1
        if sum(sizes[first:at]) != count:
            return None
        kept += range(first, at)
        at += (copies - 1) * (at - first)
    if at != len(sizes):
        return None
    found = copy.copy(outputs)
    found.pooler_output = entries[kept] if isinstance(entries, Tensor) else [entries[i] for i in kept]
    if deep is not None:
        found.deepstack_features = [[features[i] for i in kept] for features in deep]
    return found


class _Notes:
    """What the decoder got: rows ``[B, n, d]``, or ids, and positions."""

    rows: Tensor | None = None
    ids: Tensor | None = None
    positions: Tensor | None = None


def _noted(forward: Any, notes: _Notes, *inputs: Any, **named: Any) -> Any:
    notes.rows, notes.positions = named.get("inputs_embeds"), named.get("position_ids")
    notes.ids = named.get("input_ids", inputs[0] if inputs else None)
    return forward(*inputs, **named)


def _after(own: Sequence[bool]) -> int:
    """The number of tokens up to the last row that is no token's own."""
    return len(own) - next((back for back, is_own in enumerate(reversed(own)) if not is_own), len(own))


class naming_inputs:
    """Inside, an error of the model's own code names the model and what it was given."""

    def __init__(self, model: Any, names: Sequence[str]) -> None:
        self._model, self._names = model, names

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, MACHINE):
            return
        raise ValueError(
            f"{type(self._model).__name__} cannot read prompts with {', '.join(self._names)}; give what the model's own "
            f"processor makes of text and pictures together: {type(error).__name__}: {error}"
        ) from error
