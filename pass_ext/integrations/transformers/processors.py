"""transformers' logits processors, split into sampling parameters of the ops and what must run on each node's logits.

``sampling_parameters`` takes the usual warpers off the end of the list: the ops compute softmax over min-p of top-p of top-k of
logits / temperature themselves. ``NodeCriteria`` asks transformers' stopping criteria about one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

# Warpers in the order in which the ops apply them: class, its attribute, our name for it.
_WARPERS = (
    ("TemperatureLogitsWarper", "temperature", "temperature"),
    ("TopKLogitsWarper", "top_k", "top_k"),
    ("TopPLogitsWarper", "top_p", "top_p"),
    ("MinPLogitsWarper", "min_p", "min_p"),
)


def sampling_parameters(processors: Sequence[Any], *, sample: bool) -> tuple[dict[str, Any], list[Any]]:
    """Keywords ``temperature, top_k, top_p, min_p`` for the ops, and the processors that are to run before, in order."""
    rest = list(processors)
    parameters: dict[str, Any] = {"temperature": 1.0 if sample else 0.0}
    if rest and type(rest[-1]).__name__ == "LogitNormalization":  # neither arg-max nor softmax notices
        rest.pop()
    rank = len(_WARPERS)
    while rest:
        kind = next((i for i, (name, _, _) in enumerate(_WARPERS) if type(rest[-1]).__name__ == name), rank)
        if kind >= rank or not _is_plain(rest[-1]):
            break
        rank, (_, attribute, ours) = kind, _WARPERS[kind]
        value = getattr(rest.pop(), attribute)
        if sample:
            parameters[ours] = value
    return parameters, rest


def _is_plain(warper: Any) -> bool:
    """Whether it does what the op does: hides tokens altogether, and keeps no more than it must."""
    keeps = 1 if type(warper).__name__ == "TopKLogitsWarper" else getattr(warper, "min_tokens_to_keep", 1)
    return getattr(warper, "filter_value", -inf) == -inf and keeps == 1 and getattr(warper, "top_p", 1.0) > 0


class NodeCriteria:
    """Asks stopping criteria about one text with its padding; any of them ends it."""

    def __init__(self, criteria: Sequence[Any], padding: Sequence[Sequence[int]]) -> None:
        self._criteria, self._padding = list(criteria), [list(own) for own in padding]

    def stops(self, request: int, text: Sequence[int]) -> bool:
        """Whether the text of this request ends here."""
        ids = torch.tensor([[*self._padding[request], *text]])
        return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self._criteria)

    def __call__(self, ids: Tensor, scores: Any) -> bool:
        """Not used: ``stops`` is."""
        raise NotImplementedError
