"""``recurrent_tree``: layers that keep a state (gated delta rule, Mamba, linear attention) over the trees of a step.

Every node continues its parent's state with the arithmetic of a step of one token: csrc/core/recurrent.h, recurrent-inl.h.
Kernels: csrc/cpu/recurrent.cpp, csrc/cuda/recurrent.cu.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pass_ext._library import debug_enabled, ops
from pass_ext.ops.common.arguments import index_of, integers, typed
from pass_ext.ops.common.kernels import call, fake_kernel, refuse_gradients
from pass_ext.ops.tree import check_bounds, check_parents

FORMS = ("delta", "additive")  # RecurrentForm of csrc/core/recurrent.h
MAX_NODES = 1024  # kMaxTreeNodes of csrc/core/tree.h

_op = ops.recurrent_tree.default


class RecurrentUpdate(NamedTuple):
    """What ``state_commit_`` needs of a step's nodes, instead of a state per node."""

    k: Tensor
    """``[N, Hk, dk]``, the keys as given."""
    u: Tensor
    """``[N, H, dv]`` float32: what each node adds at its key."""
    log_decay: Tensor
    """The decays as given."""
    decay_rates: Tensor | None = None
    """As given."""


@typed("pass_ext::", page="ops/recurrent")
def recurrent_tree(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    parents: Tensor,
    cu_nodes: Tensor,
    *,
    form: str = "delta",
    scale: float = 1.0,
    state_index: Tensor | None = None,
    decay_rates: Tensor | None = None,
) -> tuple[Tensor, RecurrentUpdate]:
    """A recurrent layer's output at every node of a step, from the state of each request, which is not changed.

    Per head, with the state S of a node's parent (a root: of its request) and a decay D between 0 and 1::

        S = D S + k u^T        out = S^T (scale q)
        delta:     u = beta (v - (D S)^T k)
        additive:  u = beta v

    Args:
        q, k: ``[N, Hk, dk]`` bfloat16, float16 or float32, dk at most 256. Rows and heads may be strided, dk contiguous.
        v: ``[N, H, dv]`` in their dtype; Hk divides H, and head h reads key head ``h // (H / Hk)``.
        log_decay: float32, ln D: ``[N, H]`` of a head, ``[N, H, dk]`` of a key channel; beside ``decay_rates`` ``[N, H, dv]``.
        beta: ``[N, H]`` float32; None: 1.
        states: ``[B, H, dk, dv]`` float32, any strides (a ``[B, H, dv, dk]`` state comes through ``.transpose(2, 3)``); beside
            ``state_index`` ``[slots, H, dk, dv]``.
        parents: ``[N]`` int32, the index of a node's parent within its request, which comes first; -1: a root.
        cu_nodes: ``[B + 1]`` int32; request b owns rows ``cu_nodes[b]:cu_nodes[b + 1]``, at most 1,024. Equal bounds: a padded
            request, whose state is not read. Rows that no request owns give 0.
        form: "delta" (gated delta net, Kimi) or "additive" (Mamba, lightning attention).
        scale: of q.
        state_index: ``[B]`` int32, the row of ``states`` of each request.
        decay_rates: ``[H, dk, dv]`` float32: the decay of element (i, c) is ``exp(log_decay[n, h, c] * decay_rates[h, i, c])``,
            as in Mamba-1, where log_decay is dt and decay_rates is A.

    Returns:
        ``(out, update)``: out ``[N, H, dv]`` in v's dtype, and the update for ``state_commit_``.

    Computes in float32. A node has the bits that steps of one token along its path give, whatever else is in the batch or the
    tree. Each state is read once. No gradients, reverse or forward: the op raises if an input requires one
    (``pass_ext.reference.recurrent.recurrent_tree_algebra`` has them).

    The CPU refuses parents, bounds and slots that are out of range, before anything is written. On CUDA values are not checked,
    to avoid a synchronisation: a node with such a parent becomes a root; nodes beyond the 1,024th of a request, requests whose
    state does not exist and, with bounds that do not rise, all rows give 0. ``pass_ext.set_debug(True)`` checks them there too.
    Integer arguments may have any integer dtype; numbers outside int32 are out of range.

    Example:

        >>> ones, state = torch.ones(2, 1, 1), torch.zeros(1, 1, 1, 1)  # a root and a child, additive, with a decay of one half
        >>> halves, chain = torch.full((2, 1), 0.5).log(), (torch.tensor([-1, 0]), torch.tensor([0, 2]))
        >>> out, update = pass_ext.layers.recurrent_tree(ones, ones, ones, halves, None, state, *chain, form="additive")
        >>> out.flatten()  # 1, then 1 / 2 + 1
        tensor([1.0000, 1.5000])
    """
    refuse_gradients("recurrent_tree", q, k, v, log_decay, beta, states, decay_rates)
    parents = integers("recurrent_tree", "parents", parents)
    cu_nodes = integers("recurrent_tree", "cu_nodes", cu_nodes)
    state_index = integers("recurrent_tree", "state_index", state_index)
    kind = index_of("recurrent_tree", "form", form, FORMS)
    check_step("recurrent_tree", cu_nodes, v.shape[0], state_index, [states], parents)
    out, u = call(_op, q, k, v, log_decay, decay_rates, beta, states, state_index, parents, cu_nodes, kind, scale)
    return out, RecurrentUpdate(k, u, log_decay, decay_rates)


def check_step(
    op: str,
    cu_nodes: Tensor,
    rows: int,
    state_index: Tensor | None,
    states: Sequence[Tensor],
    parents: Tensor | None = None,
) -> None:
    """Raises IndexError in debug mode for bounds, parents and rows of ``states`` that the CPU op refuses. Synchronises."""
    if torch.compiler.is_compiling() or not debug_enabled():
        return
    check_bounds(op, cu_nodes, rows, MAX_NODES)
    if parents is not None:
        check_parents(op, parents, cu_nodes)
    slots = min((len(state) for state in states), default=0)
    for b, (first, last) in enumerate(pairwise(cu_nodes.tolist())):
        if state_index is not None and first < last and not 0 <= int(state_index[b]) < slots:
            raise IndexError(
                f"pass_ext::{op}: state_index must be in [0, {slots}) (the slots of the states), got {int(state_index[b])} at "
                f"{b}"
            )


@fake_kernel("recurrent_tree")
def _shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    decay_rates: Tensor | None,
    beta: Tensor | None,
    states: Tensor,
    state_index: Tensor | None,
    parents: Tensor,
    cu_nodes: Tensor,
    form: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), v.new_empty(v.shape, dtype=torch.float32)
