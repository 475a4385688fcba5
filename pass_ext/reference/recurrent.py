"""``recurrent_tree`` in plain PyTorch: a walk over the tree, and the algebra of all nodes at once, which is differentiable."""

from itertools import pairwise

import torch
from torch import Tensor


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
) -> tuple[Tensor, Tensor]:
    """(out, u): each node continues the state of its parent, a root that of its request. Computes in the dtype of states."""
    exact = states.dtype
    heads = v.shape[1]
    queries, keys = (x.to(exact).repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    decay = _log_decays(log_decay.to(exact), decay_rates).exp()
    out, u = torch.zeros_like(v), torch.zeros_like(v, dtype=exact)
    for request, (first, last) in enumerate(pairwise(cu_nodes.tolist())):
        after: list[Tensor] = []
        for node, parent in enumerate(parents[first:last].tolist()):
            row = first + node
            begin = states[request if state_index is None else int(state_index[request])]
            state = decay[row] * (after[parent] if 0 <= parent < node else begin)
            value = v[row].to(exact)
            if form == "delta":
                value = value - torch.einsum("hcd,hc->hd", state, keys[row])
            u[row] = value if beta is None else beta[row, :, None].to(exact) * value
            after.append(state + keys[row, :, :, None] * u[row, :, None])
            out[row] = torch.einsum("hcd,hc->hd", after[-1], queries[row] * scale).to(v.dtype)
    return out, u


def recurrent_tree_algebra(
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
) -> tuple[Tensor, Tensor]:
    """(out, u) without a state per node: with G_i the sum of log decays from the root to node i,

    u_i = beta_i (v_i - (e^G_i S_0)^T k_i - sum over j above i of (k_i e^(G_i - G_j) k_j) u_j),
    o_i = (e^G_i S_0)^T q_i + sum over j above i, and i, of (q_i e^(G_i - G_j) k_j) u_j.

    Differentiable in q, k, v, log_decay, decay_rates, beta and states.
    """
    exact, heads = states.dtype, v.shape[1]
    queries, keys = (x.to(exact).repeat_interleave(heads // x.shape[1], 1) for x in (q * scale, k))
    logs = _log_decays(log_decay.to(exact), decay_rates)
    outs, updates = [], []
    owned = 0
    for request, (first, last) in enumerate(pairwise(cu_nodes.tolist())):
        outs.append(v.new_zeros((first - owned, *v.shape[1:]), dtype=exact))
        updates.append(outs[-1])
        owned = last
        if first == last:
            continue
        begin = states[request if state_index is None else int(state_index[request])]
        sees = _ancestors(parents[first:last].tolist()).to(v.device)
        rows = slice(first, last)
        gains = torch.einsum("ij,jhcd->ihcd", sees.to(exact), logs[rows])
        between = torch.where(sees[:, :, None, None, None], gains[:, None] - gains[None], -torch.inf).exp()
        from_begin = gains.exp() * begin
        both = keys[rows, None] * keys[None, rows]
        weights = (both[..., None] * between).sum(-2)  # [N, N, H, 1 or dv]
        base = torch.einsum("ihcd,ihc->ihd", from_begin, keys[rows])
        us: list[Tensor] = []
        for i in range(last - first):
            value = v[first + i].to(exact)
            if form == "delta":
                value = (
                    value
                    - base[i]
                    - sum((weights[i, j] * us[j] for j in range(i) if sees[i, j]), torch.zeros_like(value))
                )
            us.append(value if beta is None else beta[first + i, :, None].to(exact) * value)
        u = torch.stack(us)
        weights = ((queries[rows, None] * keys[None, rows])[..., None] * between).sum(-2)
        outs.append(torch.einsum("ihcd,ihc->ihd", from_begin, queries[rows]) + (weights * u[None]).sum(1))
        updates.append(u)
    rest = v.new_zeros((len(v) - owned, *v.shape[1:]), dtype=exact)
    return torch.cat([*outs, rest]).to(v.dtype), torch.cat([*updates, rest])


def _log_decays(log_decay: Tensor, rates: Tensor | None) -> Tensor:
    """The logarithms of the decays, [N, H, 1 or dk, 1 or dv]."""
    if rates is not None:
        return log_decay[:, :, None] * rates.to(log_decay.dtype)
    return log_decay[:, :, None, None] if log_decay.dim() == 2 else log_decay[..., None]


def _ancestors(parents: list[int]) -> Tensor:
    """[N, N]: True where node j is node i or above it."""
    sees = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if 0 <= parent < node:
            sees[node] |= sees[parent]
    return sees
