"""``Scores``: the log probabilities of the new tokens, and the supports they were drawn from, step by step.

The distribution of the j-th token that a step emits is that of the row of node ``path[j]``, whatever the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.accept import AcceptFunction
from pass_ext.decoding.arguments import instance, whole_number
from pass_ext.decoding.drafting.candidates import Candidates
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.ops.accept import MAX_TOP_LOGPROBS, AcceptResult, TokenLogprobs, TokenSupport, accept_chain
from pass_ext.ops.common.uploaded import uploaded


class Scores:
    """Collects the log probabilities and supports of a generation's new tokens. Everything stays on the device.

    count: the alternatives of each token; None: no log probabilities.
    room: for the ids of each support, enough for all; 0: no supports.
    from_accept: True: the accept step's own reports are of the model's logits. False: logits processors change them before it,
        or it has none.
    """

    def __init__(self, count: int | None, room: int, sampling: BatchSampling, *, from_accept: bool) -> None:
        self._count, self._room, self._sampling = count, room, sampling
        self.options: dict[str, Any] = {}
        """The keywords that ask ``accept_tree`` for its reports."""
        if from_accept and count is not None:
            self.options |= {"return_logprobs": True, "top_logprobs": count}
        if from_accept and room > 0:
            self.options |= {"support": room}
        self._owners: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._supports: list[TokenSupport] = []

    @property
    def reads_rows(self) -> bool:
        """True: whole rows of logits are needed, where ranks hold their columns."""
        return self._count is not None or not self.options

    @classmethod
    def of(
        cls,
        logprobs: int | None,
        support: bool,
        vocabulary: int,
        sampling: BatchSampling,
        accept: AcceptFunction,
        *,
        has_processors: bool,
        has_grammar: bool,
    ) -> Scores | None:
        """The scores that are asked for; None: none."""
        instance("generate: support", support, bool, "True or False")
        if logprobs is None and not support:
            return None
        if logprobs is not None:
            whole_number("generate: logprobs, if not None,", logprobs, 0, MAX_TOP_LOGPROBS)
        if has_processors and has_grammar:
            name, off, got = ("support", "False", "True") if logprobs is None else ("logprobs", "None", str(logprobs))
            raise ValueError(
                f"generate: {name} must be {off} with a grammar and logits processors together: its masks act after the rows "
                f"that would be read, got {got}"
            )
        room = _room(sampling, vocabulary) if support else 0
        return cls(logprobs, room, sampling, from_accept=accept.by_ops and not has_processors)

    def add(
        self,
        candidates: Sequence[Candidates | None],
        logits: Tensor,
        drawn_from: Tensor,
        result: AcceptResult,
        gained: Sequence[int],
    ) -> None:
        """Adds a step of these candidates: its logits ``[N, V]`` before and after the logits processors, and the number of
        emitted tokens that each text has gained."""
        places = [(b, j) for b, count in enumerate(gained) for j in range(count)]
        if not places:
            return
        sizes = uploaded([0, *(0 if part is None else len(part.rows) for part in candidates)], logits.device)
        owners, depths = (uploaded(numbers, logits.device) for numbers in zip(*places, strict=True))
        rows = sizes.cumsum(0)[owners] + result.path[owners, depths]
        self._owners += [b for b, _ in places]
        sampling = self._sampling if self.options else self._sampling.of_requests(owners)
        if self._count is not None:
            if self.options:
                assert result.logprobs is not None
                logprobs = TokenLogprobs(*(part[owners, depths] for part in result.logprobs))
            else:
                tokens = result.emitted[owners, depths]
                logprobs = logprobs_of(logits[rows], drawn_from[rows], tokens, self._count, sampling)
            self._logprobs.append(logprobs)
        if self._room > 0:
            if self.options:
                assert result.support is not None
                counts, ids = (part[owners, depths] for part in result.support)
            else:
                counts, ids = _support(drawn_from[rows], sampling, self._room)
            self._supports.append(TokenSupport(counts, ids[ids >= 0]))

    def logprobs(self, requests: int) -> tuple[TokenLogprobs, ...] | None:
        """The log probabilities of each text."""
        if self._count is None:
            return None
        parts = [torch.cat(steps) for steps in zip(*self._logprobs, strict=True)]
        owners = uploaded(self._owners, parts[0].device)
        return tuple(TokenLogprobs(*(part[owners == b] for part in parts)) for b in range(requests))

    def support(self, requests: int) -> tuple[TokenSupport, ...] | None:
        """The supports of each text's tokens, their ids one after the other."""
        if self._room == 0:
            return None
        counts, ids = (torch.cat(steps) for steps in zip(*self._supports, strict=True))
        owners = uploaded(self._owners, counts.device)
        each = owners.repeat_interleave(counts)
        return tuple(TokenSupport(counts[owners == b], ids[each == b]) for b in range(requests))


def _room(sampling: BatchSampling, vocabulary: int) -> int:
    """Room for every support that these parameters can leave."""
    if sampling.is_greedy:
        return 1
    if sampling.top_k is None or not bool((sampling.top_k > 0).all()):
        return vocabulary
    return min(int(sampling.top_k.max()), vocabulary)


def _support(drawn_from: Tensor, sampling: BatchSampling, room: int) -> TokenSupport:
    """The support of each row ``[M, V]``, if no accept step has it: that of a chain without drafts."""
    nothing = torch.zeros(len(drawn_from), 0, dtype=torch.int64, device=drawn_from.device)
    result = accept_chain(drawn_from[:, None], nothing, positions=0, support=room, **sampling.keywords())
    assert result.support is not None
    return TokenSupport(*(part[:, 0] for part in result.support))


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
