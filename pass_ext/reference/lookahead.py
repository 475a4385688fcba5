"""``lookahead_embed`` in a few lines of PyTorch; autograd gives its gradient."""

import torch
from torch import Tensor

from pass_ext.reference.linear import unpacked


def lookahead_embed(ids: Tensor, table: Tensor, lookahead: Tensor) -> Tensor:
    """out[n] = table[ids[n]] for ids[n] >= 0, lookahead[-1 - ids[n]] otherwise; in the table's dtype, of a packed one in
    that of lookahead."""
    if table.dtype == torch.uint8:
        table = unpacked(table, torch.float32).to(lookahead.dtype)
    rows = torch.cat([table, lookahead.to(table.dtype)])
    return rows[torch.where(ids >= 0, ids, table.shape[0] - 1 - ids).long()]
