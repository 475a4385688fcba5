"""``Scores``: the log probabilities of the new tokens, and the rows of logits that they were drawn from, step by step.

The law of the j-th token that a step emits is that of the row of node ``path[j]``, whatever the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.drafting.step import Step
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.ops.accept import AcceptResult, TokenLogprobs, accept_chain


class Scores:
    """Collects what a generation keeps of its steps. Everything stays on the device.

    Args:
        count: the alternatives of each token; None: no log probabilities.
        keeps_rows: True: the rows too.
        sampling: of the batch.
        from_accept: True: the accept step's own log probabilities are of the model's logits. False: logits processors change
            them before it, or it has none.
    """

    def __init__(self, count: int | None, *, keeps_rows: bool, sampling: BatchSampling, from_accept: bool) -> None:
        self._count, self._keeps_rows, self._sampling = count, keeps_rows, sampling
        self._options = {"return_logprobs": True, "top_logprobs": count} if from_accept and count is not None else {}
        self._owners: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._rows: list[tuple[Tensor, Tensor]] = []

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that ask ``accept_tree`` for log probabilities."""
        return self._options

    def add(
        self, steps: Sequence[Step | None], logits: Tensor, law: Tensor, result: AcceptResult, gained: Sequence[int]
    ) -> None:
        """Adds a step.

        Args:
            logits: ``[N, V]``, the model's, of the rows of ``steps``.
            law: the same behind the logits processors.
            gained: the tokens that each text has gained of those emitted.
        """
        places = [(b, j) for b, count in enumerate(gained) for j in range(count)]
        if not places:
            return
        sizes = torch.tensor([0, *(0 if step is None else len(step.tree) for step in steps)], device=logits.device)
        owners, depths = (torch.tensor(numbers, device=logits.device) for numbers in zip(*places, strict=True))
        rows = sizes.cumsum(0)[owners] + result.path[owners, depths]
        self._owners += [b for b, _ in places]
        if self._keeps_rows:
            self._rows.append((logits[rows], law[rows]))
        if self._count is None:
            return
        if self._options and result.logprobs is not None:
            self._logprobs.append(TokenLogprobs(*(part[owners, depths] for part in result.logprobs)))
        else:
            sampling = self._sampling.of_requests(owners)
            tokens = result.emitted[owners, depths]
            self._logprobs.append(logprobs_of(logits[rows], law[rows], tokens, self._count, sampling))

    def logprobs(self, requests: int) -> tuple[TokenLogprobs, ...] | None:
        """The log probabilities of each text."""
        if self._count is None:
            return None
        return self._of_texts(
            requests, TokenLogprobs(*(torch.cat(parts) for parts in zip(*self._logprobs, strict=True)))
        )

    def rows(self, requests: int) -> tuple[tuple[Tensor, Tensor], ...] | None:
        """The rows ``[n, V]`` of each text: the model's, and the same behind the logits processors."""
        if not self._keeps_rows:
            return None
        logits, law = (torch.cat(parts) for parts in zip(*self._rows, strict=True))
        return self._of_texts(requests, (logits, law))

    def _of_texts(self, requests: int, parts: Any) -> tuple[Any, ...]:
        """The parts of each text, in a tuple like ``parts``."""
        owners = torch.tensor(self._owners, device=parts[0].device)
        make = getattr(type(parts), "_make", tuple)
        return tuple(make([part[owners == b] for part in parts]) for b in range(requests))


def logprobs_of(rows: Tensor, law: Tensor, tokens: Tensor, count: int, sampling: BatchSampling) -> TokenLogprobs:
    """The log probabilities of a token for each row, if no accept step has them: "processed" by a chain of that one token under
    rule "typical" with threshold 0, which accepts every token that has a probability.

    Args:
        rows: ``[M, V]``, the model's logits.
        law: ``[M, V]``, the logits that the sampling parameters apply to.
        tokens: ``[M]``.
        sampling: of each row.
    """
    raw = rows.float().log_softmax(-1)
    best = rows.float().sort(descending=True, stable=True).indices[:, :count]
    best = torch.nn.functional.pad(best, (0, count - best.shape[1]), value=-1)
    top_raw = raw.gather(1, best.clamp(min=0)).masked_fill(best < 0, -torch.inf)
    best = best.masked_fill(top_raw == -torch.inf, -1)
    own, *processed = (_processed(law, column, sampling) for column in (tokens, *best.unbind(1)))
    top_processed = torch.stack(processed, 1) if processed else top_raw
    return TokenLogprobs(raw.gather(1, tokens[:, None])[:, 0], own, best, top_raw, top_processed)


def _processed(law: Tensor, tokens: Tensor, sampling: BatchSampling) -> Tensor:
    result = accept_chain(
        law[:, None].expand(-1, 2, -1),
        tokens[:, None],
        rule="typical",
        threshold=0.0,
        alpha=0.0,
        return_logprobs=True,
        positions=0,  # of noise that no number depends on: the token is given
        **sampling.keywords(),
    )
    assert result.logprobs is not None
    return result.logprobs.processed[:, 0].where(result.num_accepted > 0, -torch.inf)
