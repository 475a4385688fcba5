"""transformers' logits processors and stopping criteria around the ops.

The ops compute softmax over min-p of top-p of top-k of logits / temperature, so warpers at the end of the list, in that order,
need not run. The processors before them run on each node's logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

# Warpers in the order in which the ops apply them: class, its attribute, the op's parameter.
_WARPERS = (
    ("TemperatureLogitsWarper", "temperature", "temperature"),
    ("TopKLogitsWarper", "top_k", "top_k"),
    ("TopPLogitsWarper", "top_p", "top_p"),
    ("MinPLogitsWarper", "min_p", "min_p"),
)


def sampling_parameters(processors: Sequence[Any], *, sample: bool) -> tuple[dict[str, Any], list[Any]]:
    """The ops' parameters ``temperature, top_k, top_p, min_p``, and the processors that still have to run, in order."""
    rest = list(processors)
    parameters: dict[str, Any] = {"temperature": 1.0 if sample else 0.0}
    if rest and type(rest[-1]).__name__ == "LogitNormalization":  # it changes neither arg-max nor softmax
        rest.pop()
    rank = len(_WARPERS)
    while rest:
        kind = next((i for i, (name, _, _) in enumerate(_WARPERS) if type(rest[-1]).__name__ == name), rank)
        if kind >= rank or not _is_plain(rest[-1]):
            break
        rank, (_, attribute, parameter) = kind, _WARPERS[kind]
        value = getattr(rest.pop(), attribute)
        if sample:
            parameters[parameter] = value
    return parameters, rest


def _is_plain(warper: Any) -> bool:
    """True if the warper computes the same as the op: it hides tokens with -inf, and may keep a single token."""
    least_kept = 1 if type(warper).__name__ == "TopKLogitsWarper" else getattr(warper, "min_tokens_to_keep", 1)
    return getattr(warper, "filter_value", -inf) == -inf and least_kept == 1 and getattr(warper, "top_p", 1.0) > 0


class NodeCriteria:
    """Asks stopping criteria about one text with its padding; any of them can end it."""

    def __init__(self, criteria: Sequence[Any], padding: Sequence[Sequence[int]]) -> None:
        self._criteria, self._padding = list(criteria), [list(ids) for ids in padding]

    def stops(self, request: int, text: Sequence[int]) -> bool:
        """True if the text of this request ends here."""
        ids = torch.tensor([[*self._padding[request], *text]])
        return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self._criteria)

    def __call__(self, ids: Tensor, scores: Any) -> bool:
        """Not used: the loop calls ``stops``."""
        raise NotImplementedError
