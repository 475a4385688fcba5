"""Reads padded prompts ``[B, T]`` into lists of tokens, and writes ``sequences``: the prompts, then the new tokens. Also the
tokens that end texts and that fill them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor

from pass_ext.ops.common.uploaded import uploaded


@dataclass(frozen=True)
class Prompts:
    """The tokens of each request, the ids of its padding, the caller's tensor, and 0 where that has padding."""

    texts: list[list[int]]
    padding: list[list[int]]
    input_ids: Tensor
    mask: Tensor

    def repeated(self, times: int) -> Prompts:
        """Each prompt ``times`` times in a row."""
        texts, padding = ([list(row) for row in rows for _ in range(times)] for rows in (self.texts, self.padding))
        return Prompts(texts, padding, *(x.repeat_interleave(times, dim=0) for x in (self.input_ids, self.mask)))

    def extended(self, new: Sequence[Sequence[int]], pad: int) -> Tensor:
        """``[B, T + most new]``: the input, then each request's new tokens, then padding."""
        longest, ids = max(map(len, new)), self.input_ids.long()
        return torch.cat([ids, ids.new_tensor([[*tokens, *[pad] * (longest - len(tokens))] for tokens in new])], dim=1)


def prompts_of(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    vocabulary: int,
    pad: int | None = None,
    ends: Collection[int] = (),
) -> Prompts:
    """Checks the prompts and removes their padding, which may lie left, right, or on both sides. Without attention_mask it is
    inferred as transformers does, from the id ``pad`` if that ends no text; inside a text, too."""
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids must be integers [B, T], got {type(input_ids).__name__}")
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"input_ids must be integers [B, T], got {input_ids.dtype} {list(input_ids.shape)}")
    for name, given in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if isinstance(given, Tensor) and given.is_meta:
            raise ValueError(f"{name} must hold numbers, got a tensor on the meta device, which has none")
    if attention_mask is None:
        mask = _inferred(input_ids.tolist(), pad, ends)
    else:
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
            came = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise ValueError(
                f"attention_mask must be a tensor [B, T] as input_ids, {list(input_ids.shape)}, got {came}"
            )
        mask = (attention_mask != 0).tolist()
    texts, padding, with_holes = [], [], []
    for b, (row, seen) in enumerate(zip(input_ids.tolist(), mask, strict=True)):
        if True not in seen:
            reason = "" if attention_mask is not None or not seen else f" but pad_token_id ({pad}); give attention_mask"
            raise ValueError(f"input_ids: prompt {b} has no tokens{reason}")
        first, last = seen.index(True), len(seen) - seen[::-1].index(True)
        if False in seen[first:last]:
            with_holes.append(b)
        texts.append([token for token, is_text in zip(row, seen, strict=True) if is_text])
        padding.append([token for token, is_text in zip(row, seen, strict=True) if not is_text])
        if min(texts[-1]) < 0 or max(texts[-1]) >= vocabulary:
            strange = next(token for token in texts[-1] if not 0 <= token < vocabulary)
            raise ValueError(f"input_ids: prompt {b} holds the id {strange}; the model's ids are 0 to {vocabulary - 1}")
    if not texts:
        raise ValueError("input_ids must hold at least one prompt, got none")
    if with_holes and attention_mask is not None:
        raise ValueError(
            f"attention_mask of prompt {with_holes[0]} has a hole: padding belongs to the left or the right"
        )
    if with_holes:
        warnings.warn(
            f"generate: without attention_mask every pad_token_id ({pad}) is padding, as in transformers; prompt "
            f"{with_holes[0]} has it between its tokens too and is read without; give attention_mask if it belongs to the text",
            stacklevel=3,
        )
    return Prompts(texts, padding, input_ids, uploaded(mask, input_ids.device))


def special_tokens(
    eos_token_id: int | Sequence[int] | Tensor | None, config: Any, model_config: Any, model_name: str
) -> tuple[frozenset[int], frozenset[int], int | None]:
    """The tokens that end texts here, these and those that usually do, and the token of padding.

    Args:
        eos_token_id: None: those of the configs.
        config: a ``GenerationConfig`` that comes before the model's own.
        model_config: None: it is no generating model of transformers.
    """
    if config is not None and model_config is None:
        raise TypeError(
            f"generate: generation_config must be None for {model_name}, no generating model of transformers, got "
            f"{type(config).__name__}; give eos_token_id and logits_processor instead"
        )

    def first_given(name: str) -> Any:
        values = (getattr(each, name, None) for each in (config, model_config))
        return next((value for value in values if value is not None), None)

    usual, pad = _token_ids(first_given("eos_token_id")), first_given("pad_token_id")
    ends = usual if eos_token_id is None else _token_ids(eos_token_id)
    pad = min(ends, default=None) if pad is None else _token_id("pad_token_id", pad)
    return ends, ends | usual, pad


def _token_ids(tokens: int | Sequence[int] | Tensor | None) -> frozenset[int]:
    if isinstance(tokens, Tensor) and (tokens.dim() > 1 or tokens.is_floating_point() or tokens.is_complex()):
        raise ValueError(f"generate: eos_token_id must be one id or some, got {tokens.dtype} {list(tokens.shape)}")
    ids = tokens.flatten().tolist() if isinstance(tokens, Tensor) else () if tokens is None else tokens
    ids = ids if isinstance(ids, (list, tuple, set, frozenset)) else [ids]
    return frozenset(_token_id("eos_token_id", token) for token in ids)


def _token_id(name: str, token: Any) -> int:
    try:
        number = index(token)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(token, bool) or not -(2**63) <= number < 2**63:
        raise TypeError(f"generate: {name} must be an id, a whole number of 64 bits, got {token!r}")
    return number


def _inferred(rows: Sequence[Sequence[int]], pad: int | None, ends: Collection[int]) -> list[list[bool]]:
    """The mask that transformers infers (``_prepare_attention_mask_for_generation``), and its warning where it cannot."""
    if pad is None or pad not in ends:
        return [[token != pad for token in row] for row in rows]
    if len(rows) > 1 and any(pad in row for row in rows):
        warnings.warn(
            f"generate: the prompts hold pad_token_id ({pad}), which ends texts too, so it is read as text and not as padding; "
            "give attention_mask",
            stacklevel=4,
        )
    return [[True] * len(row) for row in rows]


def warn_of_length(text: int, longest: int, most_positions: int) -> None:
    """Transformers' own warning, once, for a text of so many tokens that goes on after the model's positions. longest: the
    length at which generation stops anyway, which the warning leaves out."""
    if min(text, longest - 1) > most_positions:
        from transformers import MaxLengthCriteria

        MaxLengthCriteria(longest, most_positions)(torch.empty(1, min(text, longest - 1)), None)
