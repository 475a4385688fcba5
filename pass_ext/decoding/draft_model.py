"""What a draft model must have in common with its target, and its logits in the target's vocabulary.

Called by ``model_drafter`` and the methods.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pass_ext.decoding.model import Adapted

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
    """Refuses tokenizers that number any token differently."""
    own, other = target.get_vocab(), draft.get_vocab()
    wrong = sorted((number, token) for token, number in own.items() if other.get(token, number) != number)
    missing = sorted((number, token) for token, number in own.items() if token not in other)
    if wrong:
        number, token = wrong[0]
        raise ValueError(
            f"the draft model's tokenizer is another one: token {token!r} is {number} for the target and {other[token]} "
            f"for the draft ({len(wrong)} tokens differ)"
        )
    if len(missing) > MOST_PADDING:
        number, token = missing[0]
        raise ValueError(
            f"the draft model's tokenizer is another one: it has no token {token!r} ({number} for the target; "
            f"{len(missing)} are missing)"
        )


def in_vocabulary(logits: Tensor, vocabulary: int, device: torch.device) -> Tensor:
    """``[R, V of the target]`` on its device: padding is cut off, or becomes what cannot be drawn."""
    if logits.shape[1] > vocabulary:
        logits = logits[:, :vocabulary]
    elif logits.shape[1] < vocabulary:
        logits = F.pad(logits, (0, vocabulary - logits.shape[1]), value=float("-inf"))
    return logits.to(device)
