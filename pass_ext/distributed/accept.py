"""``accept_tree`` and ``accept_chain`` for ranks that hold some columns of the logits each.

Every rank gets the same result, that of the op on all columns: emitted tokens, path, counts and status, to the bit. Logits
never travel, except the few columns that ``Layout`` moves and rows that ``gather_below`` gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pass_ext.distributed.arguments import agreed, check_rule, trees_of
from pass_ext.distributed.exchange import Steps, run
from pass_ext.distributed.layout import Columns, Layout, columns_of, layout_of
from pass_ext.distributed.steps import Shard, accept_steps, gathered_accept_steps
from pass_ext.ops import accept as whole
from pass_ext.ops.accept import AcceptResult
from pass_ext.ops.common.arguments import Parameter, typed
from pass_ext.ops.common.rules import ACCEPT_RULES

_GATHERED_RULES = ("kseq", "typical", "coupled_inverse", "adaptive_rejection", "joint")


@typed("pass_ext.distributed.", page="distributed")
def accept_tree(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    cu_nodes: Tensor,
    max_depth: int,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | Sequence[int] | None = None,
    vocab_size: int | None = None,
    gather_below: int = 0,
    rule: str = "coupled",
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    temperature: Parameter = None,
    top_k: Parameter = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
    draft_temperature: Parameter = None,
    draft_top_k: Parameter = None,
    draft_top_p: Parameter = None,
    draft_min_p: Parameter = None,
    allowed: Tensor | None = None,
    draft_allowed: Tensor | None = None,
    seeds: Parameter = None,
    positions: Parameter = None,
    threshold: float | None = None,
    alpha: float | None = None,
    support: int = 0,
) -> AcceptResult:
    """``pass_ext.accept_tree`` on logits whose columns the ranks of a group hold. All ranks call it together, with the same
    arguments except logits and masks, and get the same result: that of the op on all columns, to the bit.

    Args:
        target_logits, draft_logits: ``[N, C]`` and ``[R, C]``, this rank's columns; or DTensors sharded on the last dimension,
            which know group, first column and vocabulary.
        group: the process group; None: the default one. Ranks hold ascending columns.
        vocab_start: the first columns of all ranks, a list; or the first column of this rank, an int: then each call exchanges
            24 bytes more to learn those of the others, and raises on all ranks if the columns do not make up the vocabulary.
            None: equal parts, as torch.chunk divides.
        vocab_size: the columns of all ranks together. Columns after it are padding and not read. None, with vocab_start None:
            the columns are counted, in an exchange of 24 bytes.
        gather_below: steps of fewer rows gather the logits of all ranks and call the op on them: fewer exchanges, more bytes
            (docs/distributed.md has the table). Rules "kseq", "typical", "coupled_inverse", "adaptive_rejection" and "joint"
            always do.
        allowed, draft_allowed: masks of this rank's columns, ``[N, ceil(C / 32)]`` and ``[R, ceil(C / 32)]``.
        seeds: needed unless all requests are greedy: ranks that draw fresh seeds would disagree.

    The other arguments are those of ``pass_ext.accept_tree``.

    Exchanges per call, each of a fixed size that depends on shapes alone:

        greedy                            1
        coupled                           2
        rejection, with replacement too   3 + s
        block                             3 + s, s = 1 for chains of 2 drafts and more
        traversal                         3 + s
        top-k, in addition                6
        top-p, in addition                7
        columns that move                 1, unless each rank's first column is a multiple of 8,192
        columns that only a rank knows    1, see vocab_start
        gathered                          1
        support, unless gathered          1, of 4 (n + 1) bytes for each place of ``emitted``

    s counts the rounds of sums that a tree needs (pass_ext/distributed/steps.py): 0 for a chain under "rejection"; for a tree
    with branching (4, 2, 2) 5 under "rejection" and 6 under "traversal". The tree's shape is read on the host for that.

    With ``pass_ext.set_debug(True)`` each call compares the ranks' arguments first, and raises on all ranks where one differs.
    """
    columns = columns_of("accept_tree", target_logits, group, vocab_start, vocab_size)
    layout = layout_of(columns)
    steps = tree_steps(
        columns.rank, layout, columns.local, tokens, parents, cu_nodes, max_depth, gather_below=gather_below, rule=rule,
        draft_logits=_drafts("accept_tree", columns, draft_logits), draft_rows=draft_rows,
        target=(temperature, top_k, top_p, min_p),
        draft=(draft_temperature, draft_top_k, draft_top_p, draft_min_p),
        allowed=allowed, draft_allowed=draft_allowed, seeds=seeds, positions=positions, threshold=threshold, alpha=alpha,
        support=support,
    )  # fmt: skip
    return run(steps, columns.group)


@typed("pass_ext.distributed.", page="distributed")
def accept_chain(
    target_logits: Tensor,
    draft_tokens: Tensor,
    *,
    cu_nodes: Tensor | None = None,
    max_depth: int | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | Sequence[int] | None = None,
    vocab_size: int | None = None,
    gather_below: int = 0,
    rule: str = "coupled",
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    temperature: Parameter = None,
    top_k: Parameter = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
    draft_temperature: Parameter = None,
    draft_top_k: Parameter = None,
    draft_top_p: Parameter = None,
    draft_min_p: Parameter = None,
    allowed: Tensor | None = None,
    draft_allowed: Tensor | None = None,
    seeds: Parameter = None,
    positions: Parameter = None,
    threshold: float | None = None,
    alpha: float | None = None,
    support: int = 0,
) -> AcceptResult:
    """``pass_ext.accept_chain`` on logits ``[B, K + 1, C]``, or packed ``[N, C]``, whose columns the ranks of a group hold; see
    ``accept_tree`` above for the arguments that it adds and for the number of exchanges. It reads nothing on the host."""
    columns = columns_of("accept_chain", target_logits, group, vocab_start, vocab_size)
    layout = layout_of(columns)
    steps = chain_steps(
        columns.rank, layout, columns.local, draft_tokens, cu_nodes=cu_nodes, max_depth=max_depth, gather_below=gather_below,
        rule=rule, draft_logits=_drafts("accept_chain", columns, draft_logits), draft_rows=draft_rows,
        target=(temperature, top_k, top_p, min_p),
        draft=(draft_temperature, draft_top_k, draft_top_p, draft_min_p),
        allowed=allowed, draft_allowed=draft_allowed, seeds=seeds, positions=positions, threshold=threshold, alpha=alpha,
        support=support,
    )  # fmt: skip
    return run(steps, columns.group)


def tree_steps(
    rank: int,
    layout: Layout,
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    cu_nodes: Tensor,
    max_depth: int,
    *,
    gather_below: int = 0,
    rule: str = "coupled",
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    target: Sequence[Parameter] = (None,) * 4,
    draft: Sequence[Parameter] = (None,) * 4,
    allowed: Tensor | None = None,
    draft_allowed: Tensor | None = None,
    seeds: Parameter = None,
    positions: Parameter = None,
    threshold: float | None = None,
    alpha: float | None = None,
    support: int = 0,
    op: str = "accept_tree",
    chain: int | None = None,
) -> Steps[AcceptResult]:
    """The steps of ``accept_tree`` on one rank; ``target`` and ``draft``: temperature, top_k, top_p and min_p."""
    check_rule(op, rule, draft_logits is not None)
    yield from agreed(op, locals())
    whole.check_room(f".distributed.{op}", support, layout.vocab_size)
    if not ACCEPT_RULES[rule].needs_draft_logits:  # does not read them
        draft_logits = draft_rows = None
    width = layout.ends[rank] - layout.starts[rank]
    if draft_logits is not None and draft_logits.shape[-1] < width:
        raise ValueError(
            f"pass_ext.distributed.{op}: draft_logits must have {width} columns on rank {rank}, got {draft_logits.shape[-1]}"
        )
    if draft_rows is None and draft_logits is not None and len(draft_logits) == len(target_logits):
        draft_rows = torch.arange(len(target_logits), device=target_logits.device)
    trees = trees_of(
        op, tokens, parents, cu_nodes, max_depth, rule, draft_rows, target, draft, seeds, positions, chain,
        draft_logits is not None,
    )  # fmt: skip
    both = draft_logits is not None
    matrices = (target_logits,) if draft_logits is None else (target_logits, draft_logits)
    shard = Shard(rank, layout, matrices, (allowed, draft_allowed)[: len(matrices)]).without_padding()
    if rule in _GATHERED_RULES or len(target_logits) < gather_below:
        accepted = yield from gathered_accept_steps(
            lambda logits, drafts=None: whole.accept_tree(
                logits, trees.tokens, trees.parents, trees.cu_nodes, max_depth, rule=rule, draft_logits=drafts,
                draft_rows=trees.draft_rows if both else None, seeds=trees.seeds, positions=trees.positions,
                threshold=threshold, alpha=alpha, support=support, **trees.sampling(),
            ),
            shard,
        )  # fmt: skip
        return accepted
    result = yield from accept_steps(trees, shard, support)
    whole.raise_on_status(op, result.status)
    return result


def chain_steps(
    rank: int,
    layout: Layout,
    target_logits: Tensor,
    draft_tokens: Tensor,
    *,
    cu_nodes: Tensor | None = None,
    max_depth: int | None = None,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    allowed: Tensor | None = None,
    draft_allowed: Tensor | None = None,
    **shared: Any,
) -> Steps[AcceptResult]:
    """The steps of ``accept_chain`` on one rank: those of a tree without branches."""
    whole.check_packed("pass_ext.distributed.", cu_nodes, max_depth, draft_rows, target_logits, draft_tokens)
    if cu_nodes is not None:
        assert max_depth is not None
        rows = torch.arange(len(target_logits), device=target_logits.device)
        owners = torch.searchsorted(cu_nodes.to(rows.dtype), rows, right=True) - 1
        parents = rows - cu_nodes[owners.clamp(0, max(len(cu_nodes) - 2, 0))] - 1
        return tree_steps(
            rank, layout, target_logits, draft_tokens, parents.int(), cu_nodes, max_depth, draft_logits=draft_logits,
            draft_rows=draft_rows, allowed=allowed, draft_allowed=draft_allowed, op="accept_chain", chain=max_depth,
            **shared,
        )  # fmt: skip
    requests, nodes, _ = target_logits.shape
    device, drafts = target_logits.device, None
    tokens = torch.full((requests, nodes), -1, dtype=torch.int64, device=device)
    tokens[:, 1:] = draft_tokens
    if draft_logits is not None:
        drafts = torch.full((requests, nodes), -1, dtype=torch.int32, device=device)
        rows = torch.arange(requests * (nodes - 1), dtype=torch.int32, device=device)
        drafts[:, :-1] = rows.view(requests, nodes - 1)
    return tree_steps(
        rank,
        layout,
        target_logits.flatten(0, 1),
        tokens.flatten(),
        torch.arange(-1, nodes - 1, dtype=torch.int32, device=device).repeat(requests),
        torch.arange(requests + 1, dtype=torch.int32, device=device) * nodes,
        nodes - 1,
        draft_logits=None if draft_logits is None else draft_logits.flatten(0, 1),
        draft_rows=None if drafts is None else drafts.flatten(),
        allowed=None if allowed is None else allowed.flatten(0, 1),
        draft_allowed=None if draft_allowed is None else draft_allowed.flatten(0, 1),
        op="accept_chain",
        chain=nodes - 1,
        **shared,
    )


def _drafts(op: str, columns: Columns, logits: Tensor | None) -> Tensor | None:
    return None if logits is None else columns.of(op, "draft_logits", logits)
