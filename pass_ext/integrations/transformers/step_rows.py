"""``NotedRows``: ``output_logits`` and ``output_scores`` of transformers, a tensor ``[B, V]`` per new token.

logits   the model's, in float32          scores   the same after all logits processors and warpers

Rows of texts that have ended are 0: transformers puts there what the model says after padding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.generation import Generation


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
        has_token = torch.tensor([length > step for length in result.lengths], device=rows.device)[:, None]
        for warper in warpers:
            rows = warper(result.sequences[:, : first + step], rows)
        scores[step] = rows.where(has_token, 0.0)
    return tuple(scores)
