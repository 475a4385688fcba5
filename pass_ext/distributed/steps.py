"""Steps on shards: which rounds a rank answers, and what it makes of all answers. Generators, see exchange.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pass_ext.distributed.exchange import Add, Gather, Steps
from pass_ext.distributed.rounds import rounds_of
from pass_ext.distributed.shards import Shard
from pass_ext.ops.accept import AcceptResult
from pass_ext.ops.shard import answer_shape, is_summed, shard_best, shard_combine, shard_local

SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p")
_NO_TOKEN = (-(1 << 23), -1, -(1 << 23))  # logit -inf, id -1, log probability or another logit -inf


@dataclass(frozen=True)
class Trees:
    """The arguments of ``accept_tree`` that no rank holds a part of, as the ops take them."""

    tokens: Tensor
    parents: Tensor
    cu_nodes: Tensor
    max_depth: int
    rule: str
    draft_rows: Tensor | None
    target_sampling: tuple[Tensor | None, ...]
    draft_sampling: tuple[Tensor | None, ...]
    seeds: Tensor | None
    positions: Tensor | None
    residuals: int
    """Rounds of residual sums, see rounds.py."""
    greedy: bool
    """True: every request is, for certain."""

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters by the names of the ops."""
        target = dict(zip(SAMPLING_NAMES, self.target_sampling, strict=True))
        draft = zip(SAMPLING_NAMES, self.draft_sampling, strict=True)
        return target | {f"draft_{name}": number for name, number in draft}

    def rounds(self) -> list[str]:
        """The rounds before "finish"."""
        _, top_k, top_p, _ = zip(self.target_sampling, self.draft_sampling, strict=True)
        return rounds_of(
            self.rule,
            greedy=self.greedy,
            top_k=any(number is not None for number in top_k),
            top_p=any(number is not None for number in top_p),
            residuals=self.residuals,
        )


def accept_steps(trees: Trees, shard: Shard) -> Steps[AcceptResult]:
    """``accept_tree`` on a shard."""
    shard = yield from shard.aligned()
    _, result = yield from _combined(trees, shard, trees.rounds(), "finish")
    return result


def gathered_accept_steps(accept: Any, shard: Shard) -> Steps[AcceptResult]:
    """``accept(logits, ...)`` on the gathered logits of all ranks."""
    return accept(*(yield from shard.whole()))


def best_steps(trees: Trees, shard: Shard, k: int, **drafting: Any) -> Steps[tuple[Tensor, Tensor]]:
    """``draft_sample`` on a shard; ``trees`` has a request of one node for each row. drafting: arguments of ``shard_best``."""
    shard = yield from shard.aligned()
    rounds = trees.rounds()
    state, _ = yield from _combined(trees, shard, rounds[: rounds.index("masses") + 1], "races")
    rows = len(shard.logits[0])
    if shard.columns:
        words = shard_best(shard.logits[0], state, k, vocab_start=shard.start, allowed=shard.allowed[0], **drafting)
    else:
        words = state.new_tensor(_NO_TOKEN, dtype=torch.int32).expand(rows, k, 3)
    return merged_best((yield Gather(words)), drafting["mode"])


def merged_best(words: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Tokens and log probabilities ``[R, k]`` from the words of all ranks, ``[ranks, R, k, 3]``: the best scores, the lowest id
    of equals."""
    floats = words.view(torch.float32)
    scores, tokens, logprobs = floats[..., 0], words[..., 1], floats[..., 2]
    k = words.shape[2]
    if mode == "with":  # every place is a race of its own
        best = scores.argmax(0, keepdim=True)
        return tokens.gather(0, best)[0].long(), logprobs.gather(0, best)[0]
    # Ranks come in the order of their ids, and each rank's tokens in that of its scores and ids.
    scores, tokens, logprobs = (part.transpose(0, 1).flatten(1) for part in (scores, tokens, logprobs))
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return tokens.gather(1, order).long(), logprobs.gather(1, order)


def _combined(trees: Trees, shard: Shard, rounds: list[str], last: str) -> Steps[tuple[Tensor, AcceptResult]]:
    state: Tensor | None = None
    _, *drafts = shard.logits
    shapes = shard.logits if shard.columns else tuple(matrix.new_zeros(len(matrix), 1) for matrix in shard.logits)
    for round, following in zip(rounds, [*rounds[1:], last], strict=True):
        answers = _answers(trees, shard, round, state)
        answers = yield (Add if is_summed(round) else Gather)(answers)
        state, result = shard_combine(
            shapes[0], trees.tokens, trees.parents, trees.cu_nodes, trees.max_depth, answers,
            rule=trees.rule, vocab_size=shard.layout.vocab_size, round=round, next=following, state=state,
            draft_logits=shapes[1] if drafts else None, draft_rows=trees.draft_rows,
            **trees.sampling(), seeds=trees.seeds, positions=trees.positions,
        )  # fmt: skip
    assert state is not None  # there is a first round
    return state, result


def _answers(trees: Trees, shard: Shard, round: str, state: Tensor | None) -> Tensor:
    target, *drafts = shard.logits
    if not shard.columns:
        shape, dtype = answer_shape(
            round, nodes=len(target), requests=len(trees.cu_nodes) - 1, slices=shard.layout.slices, rule=trees.rule,
            has_draft=bool(drafts),
        )  # fmt: skip
        if round not in ("peaks", "races"):
            return trees.tokens.new_zeros(shape, dtype=dtype)
        no_token = trees.tokens.new_tensor(_NO_TOKEN[: 3 if round == "peaks" else 2], dtype=dtype)
        return no_token.repeat(shape[0], shape[1] // len(no_token))
    return shard_local(
        target, trees.tokens, trees.parents, trees.cu_nodes, rule=trees.rule, vocab_start=shard.start,
        slices=shard.layout.slices, round=round, state=state, draft_logits=drafts[0] if drafts else None,
        draft_rows=trees.draft_rows, allowed=shard.allowed[0], draft_allowed=shard.allowed[1] if drafts else None,
        seeds=trees.seeds,
    )  # fmt: skip
