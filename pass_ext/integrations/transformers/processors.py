"""transformers' logits processors and stopping criteria around the ops.

The ops compute softmax over min-p of top-p of top-k of logits / temperature, so warpers at the end of the list, in that order,
need not run. The processors before them run on each node's logits.

``NotedRows`` gives ``output_logits`` and ``output_scores``, a tensor ``[B, V]`` per new token: the model's logits in float32,
and the same after all processors and warpers. Rows of texts that have ended are 0: transformers puts there what the model says
after padding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.generation import Generation
from pass_ext.ops.common.uploaded import uploaded

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


class NotedRows:
    """A logits processor that changes nothing and notes the rows, in float32, that each new token is drawn from."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Tensor]] = defaultdict(list)
        self._latest: dict[int, dict[int, list[tuple[list[int], Tensor]]]] = {}
        self._first: dict[int, list[int]] = {}

    def process_nodes(self, requests: Sequence[int], texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """Notes each row with its text: the nodes that have become text are known at the next step."""
        roots = {
            b: min((text for a, text in zip(requests, texts, strict=True) if a == b), key=len) for b in {*requests}
        }
        for b, root in roots.items():
            self._first.setdefault(b, list(root))
            self._take(b, root)
        for b, text, row in zip(requests, texts, logits.clone(), strict=True):
            self._latest[b].setdefault(len(text), []).append((list(text), row))
        return logits

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Not implemented: ``process_nodes`` takes its place."""
        raise NotImplementedError

    def _take(self, request: int, text: Sequence[int]) -> None:
        """Keeps the rows that tokens of this text were drawn from."""
        for length, nodes in sorted(self._latest.pop(request, {}).items()):
            if length < len(text):
                self._rows[request] += [row for path, row in nodes if path == list(text[:length])][:1]
        self._latest[request] = {}

    def of(self, result: Generation) -> list[Tensor]:
        """The rows of each step."""
        columns = result.sequences.shape[1] - max(result.lengths)
        for b, length in enumerate(result.lengths):
            self._take(b, [*self._first[b], *result.sequences[b, columns : columns + length].tolist()])
        return list(
            torch.nn.utils.rnn.pad_sequence([torch.stack(self._rows[b]) for b in sorted(self._first)]).unbind(0)
        )


def step_scores(scores: list[Tensor], result: Generation, warpers: Sequence[Any]) -> tuple[Tensor, ...]:
    """The rows after the processors. warpers: those that ran as sampling parameters; they look at the scores alone."""
    first = result.sequences.shape[1] - len(scores)
    for step, rows in enumerate(scores):
        has_token = uploaded([length > step for length in result.lengths], rows.device, torch.bool)[:, None]
        for warper in warpers:
            rows = warper(result.sequences[:, : first + step], rows)
        scores[step] = rows.where(has_token, 0.0)
    return tuple(scores)
