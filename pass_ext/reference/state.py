"""``state_commit_`` in plain PyTorch: the accepted nodes of each request, one after the other."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def state_commit_(
    states: Sequence[Tensor],
    updates: Sequence[tuple[Tensor, Tensor, Tensor, Tensor | None] | Tensor],
    cu_nodes: Tensor,
    path: Tensor,
    num_accepted: Tensor,
    *,
    state_index: Tensor | None = None,
) -> None:
    """S = D S + k u^T of each accepted node; of a convolution's state the last inputs. Skips -1."""
    for b, (first, last) in enumerate(pairwise(cu_nodes.tolist())):
        if first == last:
            continue
        nodes = path[b, : int(num_accepted[b]) + 1]
        rows = first + nodes[nodes >= 0].long()
        slot = b if state_index is None else int(state_index[b])
        for state, update in zip(states, updates, strict=True):
            if isinstance(update, Tensor):
                state[slot] = torch.cat([state[slot], update[rows].T], 1)[:, len(rows) :]
                continue
            k, u, log_decay, rates = update
            for row in rows.tolist():
                log = log_decay[row].to(state.dtype)
                log = (
                    log[:, None] * rates.to(state.dtype)
                    if rates is not None
                    else log.view(*log.shape, *[1] * (3 - log.dim()))
                )
                key = k[row].to(state.dtype).repeat_interleave(state.shape[1] // k.shape[1], 0)
                state[slot] = log.exp() * state[slot] + key[:, :, None] * u[row, :, None]
