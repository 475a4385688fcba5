"""``next_rows_``: the rows of the next step from the accept result of this one, on the device, so that the host need not wait
for it. ``next_tree_``: the same, and which rows a step has is chosen anew at each place in the text.

The formulas: csrc/core/next.h, csrc/core/next_tree.h. Kernels: csrc/cpu/next.cpp, csrc/cuda/next.cuh, csrc/cuda/next_tree.cuh.
"""

import torch
from torch import Tensor

from pass_ext._library import ops
from pass_ext.ops.common.arguments import Parameter, integers, parameter_tensor, sampling_tensors, typed
from pass_ext.ops.common.kernels import call, fake_kernel, nothing, refuse_gradients

REPORT_NUMBERS = 3  # kReportNumbers of csrc/core/next.h
TREE_REPORT_NUMBERS = 5  # kTreeReportNumbers of csrc/core/next_tree.h, and the limits of next_tree_
MAX_CHOSEN_ROWS, MAX_CHOSEN_SLOTS, MAX_TREE_OFFERS = 64, 8, 128

_op = ops.next_rows_.default
_tree_op = ops.next_tree_.default


@typed("pass_ext::", page="ops/next")
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
    text: Tensor | None = None,
    temperature: Parameter = None,
    top_k: Parameter = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
    seeds: Parameter = None,
) -> None:
    """Turns the rows ``[3, B, R]`` of a step into those of the next one, in place: ids, tokens and positions of R rows per
    request, the same tree for all requests and steps.

    A request's root becomes the last emitted token, and its children the tokens that the look-ahead rows after the last
    accepted node offer. A request whose text has reached its limit stays as it is, without candidates; it still has rows, so
    that shapes never change, and committing its root again writes what is there.

    Args:
        rows: ``[3, B, R]`` int64: ids as ``lookahead_embed`` takes them (0 for a node without a token), tokens as
            ``accept_tree`` takes them (-1 for a node without a token), positions in the text. Of the look-ahead rows, those
            from ``nodes`` on, only positions are written.
        lengths: ``[B]`` int64, tokens of each text, the root included; grows by ``num_accepted + 1``.
        prefix_lens: ``[B]`` int32, becomes ``lengths - 1``.
        report: ``[B, 3 + A or more]`` int64, for the host to read: num_accepted (-1 for a request at its limit), status, the
            drafted tokens of the step, and its emitted tokens, -1 after them.
        limits: ``[B]`` int64, the length at which a text ends. 0 ends it now.
        parents: ``[R]`` int32, -1 for the root, else an earlier row.
        nodes: the first rows, which are the root and its candidates; child k of a node gets its best token of rank k.
        emitted, path, num_accepted, status: as ``accept_tree`` returned them, ``[B, A]``, ``[B, A]``, ``[B]`` and ``[B]``.
        groups: ``[n]`` int32: for each node of the judged tree the first look-ahead row of its group, as an index in
            ``offered``, or -1.
        offered: ``[B, S, K]`` int64, tokens that each look-ahead row of the judged step offers, as ``draft_sample`` returns
            them; -1 for none. None: no candidates.
        scores: ``[B, S, K]`` float32, their scores. None: the offered tokens are in order.
        left, right: ``[V, r]`` float32, with scores: a token scores ``left[parent's token] · right[token]`` more. None: nothing
            more.
        text: ``[B, T]`` int64, the tokens of each text, the root included; the emitted ones are written after it. With scores,
            tokens score more by what the text recalls, as ``recall_scores`` says. None: nothing is recalled.
        temperature, top_k, top_p, min_p, seeds: with scores, one number per request as in ``accept_tree``: tokens race by the
            target's own noise at their positions, in the distribution over the offered tokens. None: tokens in the order of
            their scores.

    The CPU refuses lengths, parents, groups, counts and paths that are out of range, and a text without room. On CUDA values
    are not checked, to avoid a synchronisation: rows with malformed parents hang below the root, what does not exist offers
    nothing, and tokens for which a text has no room are left out. A token outside the vocabulary of left is no candidate.
    Integers that are only read may have any integer dtype. No gradients, reverse or forward: the op raises if a tensor
    requires one.

    Example:

        >>> rows = torch.tensor([[[5, -1]], [[5, -1]], [[3, 4]]])  # a root, token 5 at position 3, and a look-ahead slot
        >>> lengths, prefix = torch.tensor([4]), torch.tensor([3], dtype=torch.int32)
        >>> report = torch.empty(1, 4, dtype=torch.int64)
        >>> none = torch.tensor([0])
        >>> step = dict(emitted=torch.tensor([[8]]), path=torch.tensor([[0]]), num_accepted=none, status=none)
        >>> limits, parents = torch.tensor([9]), torch.tensor([-1, 0])
        >>> pass_ext.next_rows_(rows, lengths, prefix, report, limits=limits, parents=parents, nodes=1, **step)
        >>> rows.flatten(1), lengths
        (tensor([[ 8, -1],
                [ 8, -1],
                [ 4,  5]]), tensor([5]))
    """
    op = "next_rows_"
    refuse_gradients(op, scores, left, right)
    requests, device = lengths.shape[0] if lengths.dim() else 0, rows.device
    call(
        _op, rows, lengths, prefix_lens, report, integers(op, "limits", limits, torch.int64),
        integers(op, "parents", parents), nodes, integers(op, "emitted", emitted, torch.int64), integers(op, "path", path),
        integers(op, "num_accepted", num_accepted), integers(op, "status", status), integers(op, "groups", groups),
        integers(op, "offered", offered, torch.int64), scores, left, right, text,
        *sampling_tensors(op, (temperature, top_k, top_p, min_p), requests, device),
        parameter_tensor(op, "seeds", seeds, requests, torch.int64, device),
    )  # fmt: skip


@typed("pass_ext::", page="ops/next")
def next_tree_(
    rows: Tensor,
    parents: Tensor,
    lengths: Tensor,
    prefix_lens: Tensor,
    report: Tensor,
    *,
    limits: Tensor,
    emitted: Tensor,
    path: Tensor,
    num_accepted: Tensor,
    status: Tensor,
    rates: Tensor,
    price: Tensor | None = None,
    offered: Tensor | None = None,
    scores: Tensor | None = None,
    first: int = 0,
    left: Tensor | None = None,
    right: Tensor | None = None,
    text: Tensor | None = None,
    temperature: Parameter = None,
    top_k: Parameter = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
    seeds: Parameter = None,
) -> None:
    """Turns the rows ``[3, B, R]`` of a step, and their ``parents [B, R]``, into those of the next one, in place. How many
    candidates and look-ahead slots a request gets, and where, is chosen by the probabilities of the offered tokens: a chain
    where slots are sure, branches where they are not.

    The offered tokens are those of the look-ahead slots after the last accepted node; if it has none, those of the nearest
    node above it that has some, without the ones already passed. The next rows are the root, candidates, the slots after the
    root, the slots after one candidate, and rows that are not in use: token -1, id 0, parent 0. A request whose text has
    reached its limit stays as it is, with its root alone.

    Args:
        rows: ``[3, B, R]`` int64, R at most 64: ids as ``lookahead_embed`` takes them (-1 - i for slot i), tokens as
            ``accept_tree`` takes them (-1 for rows that are no candidates), positions in the text.
        parents: ``[B, R]`` int32, -1 for the root, else an earlier row.
        lengths: ``[B]`` int64, tokens of each text, the root included; grows by ``num_accepted + 1``.
        prefix_lens: ``[B]`` int32, becomes ``lengths - 1``.
        report: ``[B, 5 + A or more]`` int64, for the host to read: num_accepted (-1 for a request at its limit), status, the
            drafted tokens of the step, the rows of the next step that are in use, how many of them are nodes, and the emitted
            tokens, -1 after them.
        limits: ``[B]`` int64, the length at which a text ends. 0 ends it now.
        emitted, path, num_accepted, status: as ``accept_tree`` returned them, ``[B, A]``, ``[B, A]``, ``[B]`` and ``[B]``.
        rates: ``[L]`` float32, L at most 8: the share of places where the best candidate of each slot is right. A group has at
            most L slots.
        price: ``[R]`` float32, the tokens that a step of 1, 2, … R rows costs, beside 2^-10 for each row. None: no more.
        offered: ``[B, S, K]`` int64, K at most 128: tokens that rows ``first`` to ``first + S`` of the judged step offer; -1
            for none. Those of rows that are no look-ahead slots are not read. None: no candidates.
        scores: ``[B, S, K]`` float32, their log probabilities, as mode "top" of ``draft_sample`` returns both.
        first: the row of the judged step whose tokens ``offered[:, 0]`` are.
        left, right: ``[V, r]`` float32: a token scores ``left[parent's token] · right[token]`` more. None: nothing more.
        text: ``[B, T]`` int64, the tokens of each text, the root included; the emitted ones are written after it, and tokens
            score more by what the text recalls, as ``recall_scores`` says. None: nothing is recalled.
        temperature, top_k, top_p, min_p, seeds: one number per request as in ``accept_tree``: the tokens below a parent race by
            the target's own noise at their positions, in the distribution over the offered tokens. None: the best score first.

    The CPU refuses lengths, parents, counts and paths that are out of range, and a text without room. On CUDA values are not
    checked, to avoid a synchronisation: malformed parents are the root, what does not exist offers nothing, and tokens for
    which a text has no room are left out. A token outside the vocabulary of left is no candidate. Integers that are only read
    may have any integer dtype. No gradients, reverse or forward: the op raises if a tensor requires one.

    Example:

        >>> rows = torch.tensor([[[5, -1, 0]], [[5, -1, -1]], [[3, 4, 0]]])  # a root, slot 0, a row that is not in use
        >>> parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
        >>> lengths, prefix = torch.tensor([4]), torch.tensor([3], dtype=torch.int32)
        >>> report = torch.empty(1, 6, dtype=torch.int64)
        >>> none = torch.tensor([0])
        >>> step = dict(emitted=torch.tensor([[8]]), path=torch.tensor([[0]]), num_accepted=none, status=none)
        >>> offered = dict(offered=torch.tensor([[[6]]]), scores=torch.tensor([[[-0.1]]]), first=1)  # slot 0 offers token 6
        >>> fixed = dict(limits=torch.tensor([9]), rates=torch.tensor([0.5]))
        >>> pass_ext.next_tree_(rows, parents, lengths, prefix, report, **fixed, **step, **offered)
        >>> rows[0], parents  # the new root, then token 6 as its candidate, then slot 0
        (tensor([[ 8,  6, -1]]), tensor([[-1,  0,  1]], dtype=torch.int32))
    """
    op = "next_tree_"
    refuse_gradients(op, rates, price, scores, left, right)
    requests, device = lengths.shape[0] if lengths.dim() else 0, rows.device
    call(
        _tree_op, rows, parents, lengths, prefix_lens, report, integers(op, "limits", limits, torch.int64),
        integers(op, "emitted", emitted, torch.int64), integers(op, "path", path),
        integers(op, "num_accepted", num_accepted), integers(op, "status", status), rates, price,
        integers(op, "offered", offered, torch.int64), scores, first, left, right, text,
        *sampling_tensors(op, (temperature, top_k, top_p, min_p), requests, device),
        parameter_tensor(op, "seeds", seeds, requests, torch.int64, device),
    )  # fmt: skip


fake_kernel("next_rows_")(nothing)
fake_kernel("next_tree_")(nothing)
