"""``Scores``: the log probabilities of the new tokens, step by step.

The distribution of the j-th token that a step emits is that of the row of node ``path[j]``, whatever the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.accept import AcceptFunction
from pass_ext.decoding.arguments import whole_number
from pass_ext.decoding.drafting.candidates import StepRows
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.ops.accept import MAX_TOP_LOGPROBS, AcceptResult, TokenLogprobs, accept_chain


class Scores:
    """Collects the log probabilities of a generation's new tokens, each with ``count`` alternatives. Everything stays on the
    device.

    from_accept: True: the accept step's own log probabilities are of the model's logits. False: logits processors change them
    before it, or it has none.
    """

    def __init__(self, count: int, sampling: BatchSampling, *, from_accept: bool) -> None:
        self._count, self._sampling = count, sampling
        self.options: dict[str, Any] = {"return_logprobs": True, "top_logprobs": count} if from_accept else {}
        """The keywords that ask ``accept_tree`` for log probabilities."""
        self._owners: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    @classmethod
    def of(
        cls,
        logprobs: int | None,
        sampling: BatchSampling,
        accept: AcceptFunction,
        *,
        has_processors: bool,
        has_grammar: bool,
    ) -> Scores | None:
        """The scores that are asked for; None: none."""
        if logprobs is None:
            return None
        whole_number("generate: logprobs, if not None,", logprobs, 0, MAX_TOP_LOGPROBS)
        if has_processors and has_grammar:
            raise ValueError(
                "generate: logprobs must be None with a grammar and logits processors together: its masks act after the rows "
                f"that would be read, got {logprobs}"
            )
        return cls(logprobs, sampling, from_accept=accept.by_ops and not has_processors)

    def add(
        self,
        steps: Sequence[StepRows | None],
        logits: Tensor,
        drawn_from: Tensor,
        result: AcceptResult,
        gained: Sequence[int],
    ) -> None:
        """Adds a step with its logits ``[N, V]`` before and after the logits processors, and the number of emitted tokens that
        each text has gained."""
        places = [(b, j) for b, count in enumerate(gained) for j in range(count)]
        if not places:
            return
        sizes = torch.tensor([0, *(0 if step is None else len(step.tree) for step in steps)], device=logits.device)
        owners, depths = (torch.tensor(numbers, device=logits.device) for numbers in zip(*places, strict=True))
        rows = sizes.cumsum(0)[owners] + result.path[owners, depths]
        self._owners += [b for b, _ in places]
        if self.options and result.logprobs is not None:
            self._logprobs.append(TokenLogprobs(*(part[owners, depths] for part in result.logprobs)))
        else:
            sampling = self._sampling.of_requests(owners)
            tokens = result.emitted[owners, depths]
            self._logprobs.append(logprobs_of(logits[rows], drawn_from[rows], tokens, self._count, sampling))

    def logprobs(self, requests: int) -> tuple[TokenLogprobs, ...]:
        """The log probabilities of each text."""
        parts = [torch.cat(steps) for steps in zip(*self._logprobs, strict=True)]
        owners = torch.tensor(self._owners, device=parts[0].device)
        return tuple(TokenLogprobs(*(part[owners == b] for part in parts)) for b in range(requests))


def logprobs_of(rows: Tensor, drawn_from: Tensor, tokens: Tensor, count: int, sampling: BatchSampling) -> TokenLogprobs:
    """The log probabilities of a token for each row, if no accept step has them: "processed" by a chain of that one token under
    rule "typical" with threshold 0, which accepts every token that has a probability.

    Args:
        rows: ``[M, V]``, the model's logits.
        drawn_from: ``[M, V]``, the logits that the sampling parameters apply to.
        tokens: ``[M]``.
        sampling: of each row.
    """
    raw = rows.float().log_softmax(-1)
    best = rows.float().sort(descending=True, stable=True).indices[:, :count]
    best = torch.nn.functional.pad(best, (0, count - best.shape[1]), value=-1)
    top_raw = raw.gather(1, best.clamp(min=0)).masked_fill(best < 0, -torch.inf)
    best = best.masked_fill(top_raw == -torch.inf, -1)
    own, *processed = (_processed(drawn_from, column, sampling) for column in (tokens, *best.unbind(1)))
    top_processed = torch.stack(processed, 1) if processed else top_raw
    return TokenLogprobs(raw.gather(1, tokens[:, None])[:, 0], own, best, top_raw, top_processed)


def _processed(drawn_from: Tensor, tokens: Tensor, sampling: BatchSampling) -> Tensor:
    result = accept_chain(
        drawn_from[:, None].expand(-1, 2, -1),
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
