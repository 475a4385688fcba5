"""transformers' logits processors, split into a law that the kernels sample from, and what must run on each node's logits.

``sampling_law`` takes the usual warpers off the end of the list: softmax over min-p of top-p of top-k of logits / temperature
is what the ops compute themselves. ``NodeProcessor`` runs the others; ``NodeCriteria`` stopping criteria. Called by
``custom_generate``.
"""

from __future__ import annotations

from collections import defaultdict
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
# These look at each row alone, so rows of all nodes with texts of one length go through them at once.
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
# These run the model, or count their calls: a node that is not accepted would leave traces.
_REFUSED = ("Guidance", "SynthID", "Whisper", "Codebooks", "Delay")


def sampling_law(processors: Sequence[Any], *, sample: bool) -> tuple[dict[str, Any], list[Any]]:
    """Keywords ``temperature, top_k, top_p, min_p`` for the ops, and the processors that are to run before, in order."""
    rest = list(processors)
    law: dict[str, Any] = {"temperature": 1.0 if sample else 0.0}
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
            law[ours] = value
    return law, rest


def _is_plain(warper: Any) -> bool:
    """Whether it does what the op does: hides tokens altogether, and keeps no more than it must."""
    keeps = 1 if type(warper).__name__ == "TopKLogitsWarper" else getattr(warper, "min_tokens_to_keep", 1)
    return getattr(warper, "filter_value", -inf) == -inf and keeps == 1 and getattr(warper, "top_p", 1.0) > 0


class NodeProcessor:
    """Runs processors on nodes as transformers would on whole batches: texts with their padding, ``[B, n]`` and one row per
    request where a processor may depend on which request a row is of.

    Args:
        processors: transformers' ``LogitsProcessor``s, or any callables of that kind.
        padding: each request's ids left of its prompt.
    """

    def __init__(self, processors: Sequence[Any], padding: Sequence[Sequence[int]]) -> None:
        for processor in processors:
            name = type(processor).__name__
            if any(part in name for part in _REFUSED):
                raise ValueError(
                    f"custom_generate: {name} does not work with pass_ext: it keeps state between calls or runs the model, and "
                    "candidates that are not accepted would disturb it"
                )
        self._processors, self._padding = list(processors), [list(own) for own in padding]
        self._rows_alone = all(
            type(processor).__name__ in _ROW_BY_ROW
            and not isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
            for processor in processors
        )

    def process_nodes(self, requests: Sequence[int], texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """Each row's logits after its text."""
        result = logits.clone()
        lengths = [len(self._padding[request]) + len(text) for request, text in zip(requests, texts, strict=True)]
        for rows in self._batches(requests, lengths):
            ids = torch.tensor([[*self._padding[requests[row]], *texts[row]] for row in rows], device=logits.device)
            index = torch.tensor(rows, device=logits.device)
            scores = logits[index].float()
            for processor in self._processors:
                scores = processor(ids, scores)
            own = [i for i, row in enumerate(rows) if self._rows_alone or requests[row] == i]
            result[index[own]] = scores[own].to(result.dtype)
        return result

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Not used: ``process_nodes`` is."""
        raise NotImplementedError

    def _batches(self, requests: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Rows that go through the processors together. Where B rows are due, a request without one lends another's."""
        by_length: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            by_length[length][request].append(row)
        if self._rows_alone:
            return [[row for rows in own.values() for row in rows] for own in by_length.values()]
        batches = []
        for own in by_length.values():
            for turn in range(max(map(len, own.values()))):
                some = next(rows[turn] for rows in own.values() if turn < len(rows))
                batches.append(
                    [own[b][turn] if turn < len(own.get(b, ())) else some for b in range(len(self._padding))]
                )
        return batches


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
