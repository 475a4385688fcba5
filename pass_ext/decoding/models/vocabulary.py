"""What a draft model must have in common with its target, and its logits in the target's vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pass_ext.decoding.models.packed import Adapted

MOST_PADDING = 1024
"""Rows by which tables of one tokenizer may differ: they are padded to round numbers."""


def check_pair(target: Adapted, draft: Adapted) -> None:
    """Refuses vocabularies that cannot be the same."""
    own, other = target.table.shape[0], draft.table.shape[0]
    if abs(own - other) > MOST_PADDING:
        raise ValueError(
            f"the draft model's vocabulary has {other} tokens, the target's {own}: more than padding, so they do not share a "
            "tokenizer, and what one drafts means nothing to the other"
        )


def check_tokenizers(target: Any, draft: Any) -> None:
    """Refuses tokenizers that disagree about any number or any token; one may have more of them at its end."""
    own, other = ({number: token for token, number in one.get_vocab().items()} for one in (target, draft))
    wrong = sorted(number for number in own.keys() & other.keys() if own[number] != other[number])
    if wrong:
        number = wrong[0]
        raise ValueError(
            f"the draft model's tokenizer is another one: {number} is token {own[number]!r} for the target and "
            f"{other[number]!r} for the draft ({len(wrong)} of {len(own)} tokens differ)"
        )
    missing = sorted(own.keys() - other.keys())
    if len(missing) > MOST_PADDING:
        raise ValueError(
            f"the draft model's tokenizer is another one: it has no token {missing[0]} ({own[missing[0]]!r} for the target; "
            f"{len(missing)} are missing)"
        )


def in_vocabulary(logits: Tensor, vocabulary: int, device: torch.device) -> Tensor:
    """``[R, V of the target]`` on its device: padding is cut off, or becomes what cannot be drawn."""
    if logits.shape[1] > vocabulary:
        logits = logits[:, :vocabulary]
    elif logits.shape[1] < vocabulary:
        logits = F.pad(logits, (0, vocabulary - logits.shape[1]), value=float("-inf"))
    return logits.to(device)
