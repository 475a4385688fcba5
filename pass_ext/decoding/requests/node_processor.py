"""``NodeProcessor``: runs transformers' logits processors on the nodes of trees, as transformers would on whole batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.requests.stateful_processors import explained

# These compute each row alone, so the rows of all nodes with equally long texts go through them in one call.
_ROW_BY_ROW = {
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}


class NodeProcessor:
    """Runs processors on nodes as transformers would on whole batches: texts include their padding, and a processor that may
    depend on the request gets ``[B, n]``, one row per request.

    Args:
        processors: transformers' ``LogitsProcessor``s, or any callables of that kind.
        padding: the ids left of each request's prompt.
    """

    def __init__(self, processors: Sequence[Any], padding: Sequence[Sequence[int]]) -> None:
        self.processors, self._padding = list(processors), [list(ids) for ids in padding]
        self._rows_alone = all(
            type(processor).__name__ in _ROW_BY_ROW
            and not isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
            for processor in processors
        )

    def process_nodes(self, requests: Sequence[int], texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """Processes each row's logits for its text."""
        result = logits.clone()
        lengths = [len(self._padding[request]) + len(text) for request, text in zip(requests, texts, strict=True)]
        for rows in self._batches(requests, lengths):
            ids = torch.tensor([[*self._padding[requests[row]], *texts[row]] for row in rows], device=logits.device)
            index = torch.tensor(rows, device=logits.device)
            scores = logits[index].float()
            for processor in self.processors:
                with explained(processor, ids):
                    scores = processor(ids, scores)
            filled = [i for i, row in enumerate(rows) if self._rows_alone or requests[row] == i]
            result[index[filled]] = scores[filled].to(result.dtype)
        return result

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Not implemented: ``process_nodes`` takes its place."""
        raise NotImplementedError

    def _batches(self, requests: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Rows that go through the processors in one call. A batch of B rows repeats another row for a request without one."""
        by_length: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            by_length[length][request].append(row)
        if self._rows_alone:
            return [[row for rows in by_request.values() for row in rows] for by_request in by_length.values()]
        batches = []
        for by_request in by_length.values():
            for turn in range(max(map(len, by_request.values()))):
                filler = next(rows[turn] for rows in by_request.values() if turn < len(rows))
                batches.append(
                    [
                        by_request[b][turn] if turn < len(by_request.get(b, ())) else filler
                        for b in range(len(self._padding))
                    ]
                )
        return batches
