"""What a session takes of its texts that its own calls have not read.

take_past      keys, values and states of the first n tokens of each text, the caller's
take_read      those that the model's own forward has made of prompts that are more than text
take_encoded   what rows see of an encoder's outputs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.models.cached_rows import is_front, padded, split_after, with_after
from pass_ext.decoding.models.encoders import EncoderInputs
from pass_ext.decoding.models.whole_prompts import ReadPrompts
from pass_ext.decoding.session.session import Layers, Session
from pass_ext.ops.attention import padded_widths
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.ops.quantize import CODE_HEADER, MOST_OF_CODES, quantize_rows


def take_past(session: Session, texts: Sequence[Sequence[int]], samples: int = 1) -> list[int]:
    """Takes the keys, values and states of ``past`` -> how many tokens of each text they are of.

    samples: texts of each prompt.
    Existing caches are written in place, because recorded calls read them there.
    """
    if session.past is None:
        return [0] * len(texts)
    (past, given_lengths, *rest), session.past = session.past, None
    states = rest[0] if rest else ()
    offsets = rest[1] if len(rest) > 1 else None
    lengths = _lengths_of(given_lengths, len(texts), samples)
    for text, held in zip(texts, lengths, strict=True):
        if len(text) <= held:
            raise ValueError(f"past holds {held} tokens, so prompts must be longer, got {len(text)}")
    _put(session, past, lengths, states, samples)
    if offsets is not None:
        given = offsets.tolist() if isinstance(offsets, Tensor) else list(offsets)
        if samples * len(given) != len(texts):
            raise ValueError(f"past: its offsets must be one for each of {len(texts) // samples} prompts, got {given}")
        _stand(session, [offset for offset in given for _ in range(samples)])
    return lengths


def take_read(session: Session, read: ReadPrompts, samples: int) -> list[int]:
    """Takes what the model's own forward has made of prompts -> how many tokens of each text that is of. samples: texts of
    each prompt."""
    lengths, offsets, session.begins = (
        [number for number in numbers for _ in range(samples)] for numbers in (read.lengths, read.offsets, read.begins)
    )
    if any(lengths):  # with states, of prompts of one token nothing is read yet
        _put(session, read.layers, lengths, read.states, samples)
    if read.states and session.wants_states:
        session.read = lengths, [state.clone() for state in session.states]
    session.read_logits = None if read.logits is None else read.logits.repeat_interleave(samples, 0)
    _stand(session, offsets)
    if session.text_states is not None:
        session.text_states.begin([states for states in read.hidden for _ in range(samples)])
    return lengths


def take_encoded(session: Session, inputs: EncoderInputs, samples: int) -> None:
    """Takes what the model's encoder makes of the inputs of prompts. samples: texts of each."""
    encoded = inputs.read(session.model)
    if samples * len(encoded.lengths) != session.requests:
        raise ValueError(
            f"{session.model.name}: the encoder's inputs must be of {session.requests // samples} prompts, as many as "
            f"input_ids has rows, got {len(encoded.lengths)}"
        )
    session.encoder_inputs, session.encoded = inputs, encoded.repeated(samples)
    session.forget_recorded()


def _put(session: Session, past: Layers, lengths: Sequence[int], states: Sequence[Tensor], samples: int) -> None:
    """Takes keys and values of the first tokens of each text, and the states after them."""
    length = max(lengths)
    first = session.is_new
    if session.model.keeps_states != bool(states):
        raise ValueError(
            "past must be (keys and values, number of tokens, states), as this model has layers that keep a state"
            if session.model.keeps_states
            else "past must have no states, as no layer of this model keeps one"
        )
    if not (past or states) or (not first and len(past) != len(session.caches)):
        raise ValueError(f"past must be of each layer, {len(session.caches) or '1 or more'}, got {len(past)}")
    session.hold(min(length, session.capacity))
    for layer, given in enumerate(past):
        is_shared = is_front(given[1], given[0])
        pair = list(given) if samples == 1 else [x.repeat_interleave(samples, 0) for x in given]
        for x in pair:
            if x.dim() != 4 or x.shape[0] != session.requests or x.shape[1] < length:
                raise ValueError(
                    f"past: keys and values of layer {layer} must be [{session.requests}, {length} or more, heads, D], got "
                    f"{list(x.shape)}"
                )
        header = CODE_HEADER if pair[0].dtype in MOST_OF_CODES else 0
        after, count = None, session.model.widths_after.get(layer, 0)
        if count:
            dtype = session.model.table.dtype if header else pair[0].dtype
            pair[0], after = split_after(pair[0], count, dtype)
        dims = pair[0].shape[-1] - header, pair[1].shape[-1] - header
        widths = padded_widths(*dims, session.device, in_codes=bool(header) or session.cache_dtype is not None)
        rows = [padded(x[:, :length], header + width) for x, width in zip(pair, widths, strict=True)]
        if session.cache_dtype is not None and not header:
            rows = [quantize_rows(x, session.cache_dtype) for x in rows]
        if after is not None:
            rows[0] = with_after(rows[0], after[:, :length].to(session.model.table.dtype))
        if first:
            session.add_layer(rows[0][0], None if is_shared else rows[1][0], dims)
        session.check_rows(layer, *(x[0] for x in rows))
        for cache, x in zip(session.parts(layer), rows, strict=False):
            cache[:, :length] = x
    if states:
        _put_states(session, states, samples, first=first)
    session.prefix_lens.copy_(uploaded(lengths, session.device))
    session.state_lens.copy_(session.prefix_lens)


def _put_states(session: Session, given: Sequence[Tensor], samples: int, *, first: bool) -> None:
    """Takes the states of ``past``."""
    copies = [x.repeat_interleave(samples, 0) for x in given]  # a copy for one sample too
    shapes = [(session.requests, *x.shape[1:]) for x in (copies if first else session.states)]
    if [x.shape for x in copies] != shapes:
        raise ValueError(
            f"past: its states must be {[list(shape) for shape in shapes]}, got {[list(x.shape) for x in copies]}"
        )
    if first:
        session.states += copies
    for state, x in zip(session.states, copies, strict=True):
        state.copy_(x)


def _stand(session: Session, offsets: Sequence[int]) -> None:
    """Sets each text's position of a row less its index in the text."""
    if not any(offsets):
        return
    if session.model.rope_limit is not None and max(offsets) > 0:
        raise ValueError(
            f"{session.model.name} changes its rotary frequencies after {session.model.rope_limit} tokens, and a prompt has "
            f"more positions than tokens: {max(offsets)} more"
        )
    if session.offsets is None:
        session.offsets = torch.zeros_like(session.prefix_lens)
        session.forget_recorded()
    session.offsets.copy_(uploaded(offsets, session.device))


def _lengths_of(given: int | Sequence[int], texts: int, samples: int) -> list[int]:
    """The number of tokens that ``past`` has of each text."""
    lengths: list[Any] = (
        [n for n in given for _ in range(samples)] if isinstance(given, (list, tuple)) else [given] * texts
    )
    if len(lengths) != texts or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in lengths):
        raise ValueError(f"past must be of 1 token or more, got {given!r}")
    return lengths
