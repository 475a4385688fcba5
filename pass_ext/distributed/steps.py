"""Steps on shards: which rounds a rank answers, and what it makes of all answers. Generators, see exchange.py.

The rounds are known before a step begins: they depend on the rule, on which filters there are, and on the tree's shape, never
on logits. A tree needs sums over what is left of p after a child was rejected. The sums after the j-th child of a node (j from
0) are known one round after those after the child before it; a node can be verified when its parent has come to it:

    t(root) = 0,   t(child j of n) = t(n) + j,   sums after child j of n: round t(n) + j + 1

Rule "rejection" needs them after all children but the last, which the draw follows. "traversal" and "block" need them after
all children but the root's last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pass_ext.distributed.exchange import Add, Gather, Move, Steps
from pass_ext.distributed.layout import Layout
from pass_ext.ops.accept import AcceptResult, TokenSupport
from pass_ext.ops.common.arguments import SAMPLING
from pass_ext.ops.shard import SELECT_ROUNDS, answer_shape, is_summed, row_cuts, shard_best, shard_combine, shard_local

_NO_TOKEN = (-(1 << 23), -1, -(1 << 23))  # logit -inf, id -1, log probability or another logit -inf


def rounds_of(rule: str, *, greedy: bool, top_k: bool, top_p: bool, residuals: int) -> list[str]:
    """The rounds before "finish"; ``greedy``: every request is."""
    rounds = ["peaks"]
    if greedy:
        return rounds
    if top_k:
        rounds += ["counts"] * SELECT_ROUNDS
    if top_p:
        rounds += ["top_p"] + ["nucleus"] * SELECT_ROUNDS
    if rule != "coupled":
        rounds += ["masses"] + ["residuals"] * residuals
    return [*rounds, "races"]


def residual_rounds(rule: str, parents: Sequence[int], cu_nodes: Sequence[int]) -> int:
    """The rounds of residual sums that packed trees need, if all children were drawn from a draft model."""
    if rule == "coupled":
        return 0
    most = 0
    for first, last in pairwise(cu_nodes):
        tree = parents[max(first, 0) : max(last, 0)]
        counts, reached = [0] * len(tree), [0] * len(tree)
        needed: list[list[int]] = [[] for _ in tree]
        for node, parent in enumerate(tree):
            if not 0 <= parent < node:  # the root, or no tree at all
                continue
            number = counts[parent]
            counts[parent] += 1
            reached[node] = reached[parent] + number
            needed[parent].append(reached[node] + 1)
        for node, rounds in enumerate(needed):
            needs_last = rule in ("traversal", "block") and node > 0
            most = max([most, *(rounds if needs_last else rounds[:-1])])
    return most


def residual_rounds_of_chain(rule: str, length: int) -> int:
    """The same for chains of ``length`` drafts."""
    return 1 if rule in ("traversal", "block") and length > 1 else 0


@dataclass(frozen=True)
class Shard:
    """Columns that a rank of a group holds. ``logits`` are matrices: the target's, and the draft's if there are any; a mask of
    None allows all."""

    rank: int
    layout: Layout
    logits: tuple[Tensor, ...]
    allowed: tuple[Tensor | None, ...]

    @property
    def start(self) -> int:
        """The id of the first column."""
        return self.layout.starts[self.rank]

    @property
    def columns(self) -> int:
        """Columns of this rank."""
        return self.layout.ends[self.rank] - self.start

    def without_padding(self) -> Shard:
        """The shard without the columns after the vocabulary."""
        logits = tuple(matrix[:, : self.columns] for matrix in self.logits)
        words = -(-self.columns // 32)
        masks = tuple(None if mask is None else mask[:, :words].contiguous() for mask in self.allowed)
        return Shard(self.rank, self.layout, logits, masks)

    def masked(self) -> tuple[Tensor, ...]:
        """The logits, -inf where the masks forbid a token."""
        return tuple(
            matrix if mask is None else matrix.where(_bits(mask, matrix.shape[1]), -torch.inf)
            for matrix, mask in zip(self.logits, self.allowed, strict=True)
        )

    def aligned(self) -> Steps[Shard]:
        """The shard with columns that begin with a slice; at most one exchange, none if they all do already."""
        if self.layout.is_aligned:
            return self
        layout = self.layout.aligned()
        logits = yield Move(self.masked(), self.layout, layout)
        return Shard(self.rank, layout, tuple(logits), (None,) * len(logits))

    def whole(self) -> Steps[tuple[Tensor, ...]]:
        """The masked logits with the columns of all ranks; one exchange."""
        widths = [end - start for start, end in zip(self.layout.starts, self.layout.ends, strict=True)]
        rows, dtypes = [len(matrix) for matrix in self.logits], [matrix.dtype for matrix in self.logits]
        padded = [torch.nn.functional.pad(matrix, (0, max(widths) - self.columns)) for matrix in self.masked()]
        flat = torch.cat([matrix.contiguous().view(-1).view(torch.uint8) for matrix in padded])
        parts = (yield Gather(flat)).split([matrix.numel() * matrix.element_size() for matrix in padded], dim=1)
        wholes = []
        for part, count, dtype in zip(parts, rows, dtypes, strict=True):
            matrices = part.contiguous().view(dtype).view(len(widths), count, max(widths))
            wholes.append(torch.cat([matrix[:, :width] for matrix, width in zip(matrices, widths, strict=True)], 1))
        return tuple(wholes)


def _bits(words: Tensor, columns: int) -> Tensor:
    """Mask words ``[rows, ceil(columns / 32)]`` as bools ``[rows, columns]``."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> places & 1).bool().flatten(1)[:, :columns]


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
    """Rounds of residual sums."""
    greedy: bool
    """True: every request is, for certain."""

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters by the names of the ops."""
        target = dict(zip(SAMPLING, self.target_sampling, strict=True))
        draft = zip(SAMPLING, self.draft_sampling, strict=True)
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


def accept_steps(trees: Trees, shard: Shard, room: int = 0) -> Steps[AcceptResult]:
    """``accept_tree`` on a shard; ``room``: for the ids of each emitted token's support."""
    shard = yield from shard.aligned()
    state, result = yield from _combined(trees, shard, trees.rounds(), "finish")
    if room > 0:
        result.support = yield from support_steps(trees, shard, state, result, room)
    return result


def support_steps(trees: Trees, shard: Shard, state: Tensor, result: AcceptResult, room: int) -> Steps[TokenSupport]:
    """The supports of the emitted tokens: each rank lists the ids among its columns. One exchange."""
    own = torch.zeros(*result.path.shape, 1 + room, dtype=torch.int32, device=state.device)
    own[..., 1:] = -1
    logits = shard.logits[0]
    if len(logits) and shard.columns:
        rows = (trees.cu_nodes[:-1, None] + result.path).clamp(0, len(logits) - 1).flatten().long()
        mask = None if shard.allowed[0] is None else shard.allowed[0][rows]
        (logits,) = replace(shard, logits=(logits[rows],), allowed=(mask,)).masked()
        cut, tie = (numbers[rows, None] for numbers in row_cuts(state, len(shard.logits[0])))
        ids = shard.start + torch.arange(shard.columns, dtype=torch.int32, device=state.device)
        within = (logits > cut) | ((logits == cut) & (ids <= tie))
        within &= (result.emitted >= 0).view(-1, 1)
        own[..., 0] = within.sum(-1, dtype=torch.int32).view(result.path.shape)
        own[..., 1:] = _first(ids.expand_as(within), within, room).view(*result.path.shape, room)
    each = yield Gather(own)
    counts, ids = each[..., 0].sum(0, dtype=torch.int32), each[..., 1:].movedim(0, 2).flatten(2)
    return TokenSupport(counts, _first(ids, ids >= 0, room).masked_fill(counts[..., None] > room, -1))


def _first(ids: Tensor, kept: Tensor, room: int) -> Tensor:
    """``[..., room]``: of each row the first ids that are kept, then -1."""
    places = (kept.cumsum(-1) - 1).where(kept, room).clamp(max=room)
    packed = ids.new_full((*ids.shape[:-1], room + 1), -1)
    return packed.scatter(-1, places, ids)[..., :room]


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
