"""``shard_local``, ``shard_combine`` and ``shard_best``: the accept step and drafting on some columns of the logits.

Ranks of a group hold the columns. Each answers a round's question about its own with ``shard_local``; all ranks get all answers
and make of them, with ``shard_combine``, what they know afterwards. ``pass_ext.distributed`` exchanges the answers. The
rounds and formulas: csrc/core/shard.h; combining and the walk: csrc/core/shard_combine.h. Kernels: csrc/cpu/shard.cpp,
csrc/cuda/shard.cuh.
"""

import torch
from torch import Tensor

from pass_ext._library import ops
from pass_ext.ops.accept import AcceptResult
from pass_ext.ops.common.arguments import check_positions, index_of, integers, typed
from pass_ext.ops.common.kernels import call, fake_kernel
from pass_ext.ops.common.rules import RULES
from pass_ext.ops.draft import MODES, draws

ROUNDS = ("peaks", "counts", "top_p", "nucleus", "masses", "residuals", "races", "finish")
"""The questions, in the order of ``enum class Round`` in csrc/core/shard.h; "finish" asks nothing."""
SLICE_COLUMNS = 8192
"""Columns that are summed in one piece. A rank's first column is a multiple of this."""
SELECT_BINS = 512
SELECT_ROUNDS = 6
"""Rounds of counts, or of nucleus: each narrows 54 bits of logit and id by 9."""

_RULE_NAMES, _SUMMED = tuple(RULES), ("counts", "nucleus")
_SLOT_WORDS, _NODE_WORDS = 11, 11
BEST_WORDS = 3
"""Words of a token that ``shard_best`` answers."""

_local_op = ops.shard_local.default
_combine_op = ops.shard_combine.default
_best_op = ops.shard_best.default


def is_summed(round: str) -> bool:
    """True for answers that are counts or integer masses: the ranks' answers may be added instead of gathered."""
    return round in _SUMMED


@typed("pass_ext::", page="distributed")
def shard_local(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    cu_nodes: Tensor,
    *,
    rule: str,
    vocab_start: int,
    slices: int,
    round: str,
    state: Tensor | None = None,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    allowed: Tensor | None = None,
    draft_allowed: Tensor | None = None,
    seeds: Tensor | None = None,
) -> Tensor:
    """Answers one round's question about the columns of this rank.

    Args:
        target_logits, draft_logits: ``[N, C]`` and ``[R, C]``, this rank's columns of the logits.
        tokens, parents, cu_nodes, draft_rows, seeds: those of ``accept_tree``, already in the dtypes named there.
        allowed, draft_allowed: masks of this rank's columns, ``[N, ceil(C / 32)]`` and ``[R, ceil(C / 32)]``.
        rule: one of the rules "coupled", "rejection", "rejection_with_replacement", "block" and "traversal" of ``accept_tree``.
        vocab_start: the id of the first column, a multiple of 8,192.
        slices: the most slices of 8,192 columns that any rank has.
        round: one of ``ROUNDS``.
        state: that of ``shard_combine``; None in the first round, "peaks".

    Returns:
        int32 ``[slots, width]``: counts, or floats and ids bit by bit; int64 masses for "nucleus". "counts" and "nucleus" may
        be added over the ranks, the others are gathered. What the state does not ask for is 0, or no token.
    """
    op = "shard_local"
    answers: Tensor = call(
        _local_op, target_logits, integers(op, "tokens", tokens, torch.int64), integers(op, "parents", parents),
        integers(op, "cu_nodes", cu_nodes), index_of(op, "rule", rule, _RULE_NAMES), draft_logits,
        integers(op, "draft_rows", draft_rows), allowed, draft_allowed, integers(op, "seeds", seeds, torch.int64),
        vocab_start, slices, index_of(op, "round", round, ROUNDS), state,
    )  # fmt: skip
    return answers


@typed("pass_ext::", page="distributed")
def shard_combine(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    cu_nodes: Tensor,
    max_depth: int,
    answers: Tensor,
    *,
    rule: str,
    vocab_size: int,
    round: str,
    next: str,
    state: Tensor | None = None,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    draft_top_k: Tensor | None = None,
    draft_top_p: Tensor | None = None,
    draft_min_p: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, AcceptResult]:
    """Takes all ranks' answers to one round, and prepares the next. It reads no logits, and is the same on all ranks.

    Args:
        target_logits, draft_logits: as in ``shard_local``; only their shapes are used.
        answers: ``[ranks, slots, width]``, in the order of the ranks' columns; ``[1, slots, width]`` if they were added.
        vocab_size: the columns of all ranks together.
        round, next: of ``ROUNDS``; ``next`` is "finish" after the last.
        state: that of the round before; None after "peaks".
        temperature and the other sampling parameters: ``[B]`` or None, the draft's without the target's in place of None.

    The other arguments are those of ``accept_tree``, the same in all rounds of a step.

    Returns:
        ``(state, result)``. The state is opaque, int64; the result is right if ``next`` is "finish". A request that needs a
        token which no race gave, because the arguments changed between the rounds, emits -1 there, and its status has bit 2.
    """
    op = "shard_combine"
    check_positions(f"pass_ext::{op}", seeds, positions, draws=temperature is not None)
    state, *result = call(
        _combine_op, target_logits, integers(op, "tokens", tokens, torch.int64), integers(op, "parents", parents),
        integers(op, "cu_nodes", cu_nodes), max_depth, index_of(op, "rule", rule, _RULE_NAMES), draft_logits,
        integers(op, "draft_rows", draft_rows), temperature, integers(op, "top_k", top_k), top_p, min_p,
        draft_temperature, integers(op, "draft_top_k", draft_top_k), draft_top_p, draft_min_p,
        integers(op, "seeds", seeds, torch.int64), integers(op, "positions", positions, torch.int64),
        vocab_size, index_of(op, "round", round, ROUNDS), index_of(op, "next", next, ROUNDS), answers, state,
    )  # fmt: skip
    return state, AcceptResult(*result)


@typed("pass_ext::", page="distributed")
def shard_best(
    logits: Tensor,
    state: Tensor,
    k: int,
    *,
    mode: str,
    vocab_start: int,
    temperature: Tensor | None = None,
    allowed: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    nodes: Tensor | None = None,
) -> Tensor:
    """The k best tokens of each row among the columns of this rank, as ``draft_sample`` ranks them.

    Args:
        logits: ``[R, C]``, this rank's columns.
        state: that of ``shard_combine`` after "masses", for R requests of one node each.
        vocab_start: the id of the first column, a multiple of 8,192.
        temperature: ``[R]`` float32 or None; a row whose temperature is 0 is ranked without noise.

    The other arguments are those of ``draft_sample``.

    Returns:
        int32 ``[R, k, 3]``: score, id and log probability, the floats bit by bit. Id -1 after the last token.
    """
    op = "shard_best"
    check_positions(f"pass_ext::{op}", seeds, positions, draws=draws(mode, temperature))
    best: Tensor = call(
        _best_op, logits, state, k, index_of(op, "mode", mode, MODES), temperature, allowed,
        integers(op, "seeds", seeds, torch.int64), integers(op, "positions", positions, torch.int64),
        integers(op, "nodes", nodes), vocab_start,
    )  # fmt: skip
    return best


def state_words(nodes: int) -> int:
    """The words of a state, int64 each."""
    return nodes * (2 * _SLOT_WORDS + _NODE_WORDS)


def row_cuts(state: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """What a state says of the support of each node's target row: ``(cut [N] float32, tie [N] int32)``. A token is in it if its
    logit is above the cut, or equal and its id at most the tie."""
    words = (
        state[: nodes * _SLOT_WORDS].view(torch.int32).view(nodes, 2 * _SLOT_WORDS)
    )  # ShardSlot in csrc/core/shard.h
    return words[:, 2].contiguous().view(torch.float32), words[:, 3]


def answer_shape(
    round: str, *, nodes: int, requests: int, slices: int, rule: str, has_draft: bool
) -> tuple[tuple[int, int], torch.dtype]:
    """The shape and dtype of ``shard_local``'s answers; those of ``answer_shape`` in csrc/core/shard.h."""
    rows = nodes * (2 if has_draft else 1)
    if round in _SUMMED:
        return (rows, SELECT_BINS), torch.int64 if round == "nucleus" else torch.int32
    if round == "races":
        return ((nodes, 2) if rule == "coupled" else (requests, 4)), torch.int32
    if round == "residuals":
        return (nodes, 2 * slices), torch.int32
    return (rows, slices if round in ("top_p", "masses") else 3), torch.int32


@fake_kernel("shard_local")
def _local_shape(target_logits, tokens, parents, cu_nodes, rule, draft_logits, *rest):  # type: ignore[no-untyped-def]
    *_, slices, round, _ = rest
    shape, dtype = answer_shape(
        ROUNDS[round], nodes=target_logits.shape[0], requests=cu_nodes.shape[0] - 1, slices=slices,
        rule=_RULE_NAMES[rule], has_draft=draft_logits is not None,
    )  # fmt: skip
    return target_logits.new_empty(shape, dtype=dtype)


@fake_kernel("shard_combine")
def _combine_shape(target_logits, tokens, parents, cu_nodes, max_depth, *rest):  # type: ignore[no-untyped-def]
    requests = cu_nodes.shape[0] - 1
    return (
        target_logits.new_empty((state_words(target_logits.shape[0]),), dtype=torch.int64),
        target_logits.new_empty((requests, max_depth + 1), dtype=torch.int64),
        target_logits.new_empty((requests, max_depth + 1), dtype=torch.int32),
        target_logits.new_empty((requests,), dtype=torch.int32),
        target_logits.new_empty((requests,), dtype=torch.int32),
    )


@fake_kernel("shard_best")
def _best_shape(logits: Tensor, state: Tensor, k: int, *rest: object) -> Tensor:
    return logits.new_empty((logits.shape[0], k, BEST_WORDS), dtype=torch.int32)
