"""Compares the vocabularies of target and draft, and fits the draft's logits to the target's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pass_ext.decoding.models.packed import Adapted

MOST_PADDING = 1024
"""The most rows by which two tables of one tokenizer may differ: tables are padded to round numbers."""


def check_pair(target: Adapted, draft: Adapted) -> None:
    """Refuses vocabularies whose sizes differ by more than padding."""
    target_size, draft_size = target.table.shape[0], draft.table.shape[0]
    if abs(target_size - draft_size) > MOST_PADDING:
        raise ValueError(
            f"the draft model's vocabulary has {draft_size} tokens, the target's {target_size}: more than padding, so they do "
            "not share a tokenizer, and the draft's tokens mean nothing to the target"
        )


def check_tokenizers(target: Any, draft: Any) -> None:
    """Refuses tokenizers that disagree about the token of any number; either may have more tokens at its end."""
    of_target, of_draft = ({number: token for token, number in t.get_vocab().items()} for t in (target, draft))
    wrong = sorted(number for number in of_target.keys() & of_draft.keys() if of_target[number] != of_draft[number])
    if wrong:
        number = wrong[0]
        raise ValueError(
            f"the draft model's tokenizer is another one: {number} is token {of_target[number]!r} for the target and "
            f"{of_draft[number]!r} for the draft ({len(wrong)} of {len(of_target)} tokens differ)"
        )
    missing = sorted(of_target.keys() - of_draft.keys())
    if len(missing) > MOST_PADDING:
        raise ValueError(
            f"the draft model's tokenizer is another one: it has no token {missing[0]} ({of_target[missing[0]]!r} for the "
            f"target; {len(missing)} are missing)"
        )


def in_vocabulary(logits: Tensor, vocabulary: int, device: torch.device) -> Tensor:
    """Cuts padding off the logits, or pads them with -inf -> ``[R, V of the target]`` on ``device``."""
    if logits.shape[1] > vocabulary:
        logits = logits[:, :vocabulary]
    elif logits.shape[1] < vocabulary:
        logits = F.pad(logits, (0, vocabulary - logits.shape[1]), value=float("-inf"))
    return logits.to(device)
