"""P-EAGLE: an EAGLE-3 head that drafts all tokens in one call.

    row of the text's last token      as in EAGLE-3                                   logits of the first draft
    rows below it, one for each       the embedding of a mask token, and              logits of the second, the third …
    further draft                     fc(mask_hidden) in place of a state

So the drafts of one step do not depend on each other: all nodes of one depth have the same distribution.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from pass_ext.decoding.drafting.heads.eagle3 import Eagle3Head
from pass_ext.decoding.drafting.heads.head import Masks, TargetFacts


class PEagleHead(Eagle3Head):
    """The head, as ``Eagle3Head``."""

    kind = "P-EAGLE"

    def __init__(self, config: Mapping[str, Any], target: TargetFacts, has: Collection[str] = ()) -> None:
        super().__init__(config, target, has)
        token = config.get("mask_token_id")
        if not isinstance(token, int) or not 0 <= token < self.target_vocabulary:
            raise ValueError(f"its mask_token_id must be a token of the model, got {token!r}")
        self._mask_token = token
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(self.taps) * self.target_width))

    @property
    def masks(self) -> Masks:
        states = self.mask_hidden.view(1, len(self.taps), self.target_width)
        return Masks(self._mask_token, self.take(states))
