"""``next_rows_``: the rows of the next step from the accept result of this one, on the device, so that the host need not wait
for it.

The formulas: csrc/core/next.h. Kernels: csrc/cpu/next.cpp, csrc/cuda/next.cuh.
"""

import torch
from torch import Tensor

from pass_ext.ops.common.fakes import register_fake
from pass_ext.ops.common.integers import integers
from pass_ext.ops.common.nondifferentiable import call
from pass_ext.ops.common.parameters import Parameter, parameter_tensor

REPORT_NUMBERS = 3  # kReportNumbers of csrc/core/next.h

_op = torch.ops.pass_ext.next_rows_.default


def next_rows_(
    rows: Tensor,
    lengths: Tensor,
    prefix_lens: Tensor,
    report: Tensor,
    *,
    limits: Tensor,
    parents: Tensor,
    nodes: int,
    emitted: Tensor,
    path: Tensor,
    num_accepted: Tensor,
    status: Tensor,
    groups: Tensor | None = None,
    offered: Tensor | None = None,
    scores: Tensor | None = None,
    left: Tensor | None = None,
    right: Tensor | None = None,
    temperature: Parameter = None,
    top_k: Parameter = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
    seeds: Parameter = None,
) -> None:
    """Turns the rows ``[3, B, R]`` of a step into those of the next one, in place: ids, tokens and positions of R rows per
    request, the same tree for all requests and steps.

    A request's root becomes the last emitted token, and its children the tokens that the look-ahead rows behind the last
    accepted node offer. A request whose text has reached its limit stays as it is, without candidates; it still has rows, so
    that shapes never change, and committing its root again writes what is there.

    Args:
        rows: ``[3, B, R]`` int64: ids as ``lookahead_embed`` takes them (0 for a node without a token), tokens as
            ``accept_tree`` takes them (-1 for a node without a token), positions in the text. Of the look-ahead rows, those
            from ``nodes`` on, only positions are written.
        lengths: ``[B]`` int64, tokens of each text, the root included; grows by ``num_accepted + 1``.
        prefix_lens: ``[B]`` int32, becomes ``lengths - 1``.
        report: ``[B, 3 + A or more]`` int64, for the host to read: num_accepted (-1 for a request at its limit), status, the
            drafted tokens of the step, and its emitted tokens, -1 behind them.
        limits: ``[B]`` int64, the length at which a text ends. 0 ends it now.
        parents: ``[R]`` int32, -1 for the root, else an earlier row.
        nodes: the first rows, which are the root and its candidates; child k of a node gets its best token of rank k.
        emitted, path, num_accepted, status: as ``accept_tree`` returned them, ``[B, A]``, ``[B, A]``, ``[B]`` and ``[B]``.
        groups: ``[n]`` int32: for each node of the judged tree the first look-ahead row of its group, as an index in
            ``offered``, or -1.
        offered: ``[B, S, K]`` int64, tokens that each look-ahead row of the judged step offers, as ``draft_sample`` returns
            them; -1 for none. None: no candidates.
        scores: ``[B, S, K]`` float32, their scores. None: the offered tokens are in order.
        left, right: ``[V, r]`` float32, with scores: a token scores ``left[parent's token] · right[token]`` more.
        temperature, top_k, top_p, min_p, seeds: with scores, one number per request as in ``accept_tree``: tokens race by the
            target's own noise at their positions, in the distribution over the offered tokens. None: tokens in the order of
            their scores.

    The CPU refuses lengths, parents, groups, counts and paths that are out of range. On CUDA values are not checked, to avoid a
    synchronisation: rows with malformed parents hang below the root, and what does not exist offers nothing. A token outside
    the vocabulary of left is no candidate. Integers that are only read may have any integer dtype. No gradients, reverse or
    forward: the op raises if a tensor requires one.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (scores, left, right)):
        raise RuntimeError(
            "pass_ext::next_rows_: no gradient is implemented, but an input requires one; call it under torch.no_grad()"
        )
    requests, device = lengths.shape[0] if lengths.dim() else 0, rows.device
    call(
        _op,
        rows,
        lengths,
        prefix_lens,
        report,
        integers("next_rows_", "limits", limits, torch.int64),
        integers("next_rows_", "parents", parents),
        nodes,
        integers("next_rows_", "emitted", emitted, torch.int64),
        integers("next_rows_", "path", path),
        integers("next_rows_", "num_accepted", num_accepted),
        integers("next_rows_", "status", status),
        integers("next_rows_", "groups", groups),
        integers("next_rows_", "offered", offered, torch.int64),
        scores,
        left,
        right,
        parameter_tensor("next_rows_", "temperature", temperature, requests, torch.float32, device),
        parameter_tensor("next_rows_", "top_k", top_k, requests, torch.int32, device),
        parameter_tensor("next_rows_", "top_p", top_p, requests, torch.float32, device),
        parameter_tensor("next_rows_", "min_p", min_p, requests, torch.float32, device),
        parameter_tensor("next_rows_", "seeds", seeds, requests, torch.int64, device),
    )


@register_fake("next_rows_")
def _nothing(rows: Tensor, *rest: object) -> None:
    return None
