"""``SampledStep``: what one step of vLLM's runner V1 sampled, for a proposer that looks at more than tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from pass_ext.decoding.sampling import BatchSampling


class SampledStep(NamedTuple):
    """One step of B requests. Request b has ``drafts[b] + 1`` rows of logits, the root's first, all requests' back to back."""

    request_ids: Sequence[str]
    """``[B]``, vLLM's names of the requests."""
    logits: Tensor
    """``[N, V]``, the model's own, after grammar masks and before penalties."""
    tokens: Tensor
    """``[N]`` int64: each row's input token; -1 for a root, whose token no decision needs."""
    drafts: Sequence[int]
    """``[B]``, the drafted tokens of each request."""
    emitted: Tensor
    """``[B, max(drafts) + 1]``: the tokens that the step gave, then -1."""
    positions: Tensor
    """``[B]`` int64: the text position of the first emitted token, the prompt's first token having 0."""
    sampling: BatchSampling
    """The requests' sampling parameters and seeds."""
