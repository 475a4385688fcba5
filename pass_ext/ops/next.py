"""``next_tree_``: the rows of the next step from the accept result of this one, on the device, so that the host need not wait
for it.

The formulas: csrc/core/next.h, csrc/core/next_tree.h. Kernels: csrc/cpu/next.cpp, csrc/cuda/next.cuh.
"""

import torch
from torch import Tensor

from pass_ext._library import ops
from pass_ext.ops.common.arguments import Parameter, integers, parameter_tensor, sampling_tensors, typed
from pass_ext.ops.common.kernels import call, fake_kernel, nothing, refuse_gradients

REPORT_NUMBERS = 5  # kReportNumbers of csrc/core/next.h
MAX_CHOSEN_ROWS, MAX_CHOSEN_SLOTS = 64, 8  # of csrc/core/next_tree.h

_op = ops.next_tree_.default


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
    rates: Tensor | None = None,
    costs: Tensor | None = None,
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
    """Turns the rows ``[3, B, R]`` of a step, and their ``parents [B, R]``, into those of the next one, in place. A request's
    root becomes the last emitted token, and candidates those that look-ahead slots offer.

    Without ``rates`` a request keeps its rows and their parents: child k of a node gets the k-th best token below it, or
    none: token -1, id 0. The slots after the last accepted node offer.

    With ``rates`` it is chosen how many candidates and slots a request gets, and where, by the probabilities of the offered
    tokens: a chain where slots are sure, branches where they are not. The next rows are then the root, candidates, the slots
    after the root, the slots after one candidate, and rows that are not in use: token -1, id 0, parent 0. If the last accepted
    node has no slots, those of the nearest node above it offer, without the ones already passed.

    A request whose text has reached its limit stays as it is, without candidates; it still has rows, so that shapes never
    change, and committing its root again writes what is there.

    Args:
        rows: ``[3, B, R]`` int64, R at most 64: ids as ``lookahead_embed`` takes them (-1 - i for slot i), tokens as
            ``accept_tree`` takes them (-1 for rows that are no candidates), positions in the text.
        parents: ``[B, R]`` int32, -1 for the root, else an earlier row.
        lengths: ``[B]`` int64, tokens of each text, the root included; grows by ``num_accepted + 1``.
        prefix_lens: ``[B]`` int32, becomes ``lengths - 1``.
        report: ``[B, 5 + A or more]`` int64, for the host to read: num_accepted (-1 for a request at its limit), status, the
            drafted tokens of the step, the rows of the next step that are in use, how many of them have a token, and the
            emitted tokens, -1 after them.
        limits: ``[B]`` int64, the length at which a text ends. 0 ends it now.
        emitted, path, num_accepted, status: as ``accept_tree`` returned them, ``[B, A]``, ``[B, A]``, ``[B]`` and ``[B]``.
        rates: ``[L]`` float32, L at most 8: the share of places where the best candidate of each slot is right. A group has at
            most L slots. None: rows are kept.
        costs: ``[R]`` float32, with rates: the tokens that a step of 1, 2, … R rows costs, beside 2^-10 for each row. None: no
            more.
        offered: ``[B, S, K]`` int64, K at most 128: tokens that rows ``first`` to ``first + S`` of the verified step offer; -1
            for none. Those of rows that are no look-ahead slots are not read. None: no candidates.
        scores: ``[B, S, K]`` float32, their log probabilities, as mode "top" of ``draft_sample`` returns both.
        first: the row of the verified step whose tokens ``offered[:, 0]`` are.
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
    refuse_gradients(op, rates, costs, scores, left, right)
    requests, device = lengths.shape[0] if lengths.dim() else 0, rows.device
    call(
        _op, rows, parents, lengths, prefix_lens, report, integers(op, "limits", limits, torch.int64),
        integers(op, "emitted", emitted, torch.int64), integers(op, "path", path),
        integers(op, "num_accepted", num_accepted), integers(op, "status", status), rates, costs,
        integers(op, "offered", offered, torch.int64), scores, first, left, right, text,
        *sampling_tensors(op, (temperature, top_k, top_p, min_p), requests, device),
        parameter_tensor(op, "seeds", seeds, requests, torch.int64, device),
    )  # fmt: skip


fake_kernel("next_tree_")(nothing)
