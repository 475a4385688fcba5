"""``lookahead_embed`` in two lines of PyTorch; autograd gives its gradient."""

import torch
from torch import Tensor


def lookahead_embed(ids: Tensor, table: Tensor, lookahead: Tensor) -> Tensor:
    """out[n] = table[ids[n]] for ids[n] >= 0, lookahead[-1 - ids[n]] otherwise; in the table's dtype."""
    rows = torch.cat([table, lookahead.to(table.dtype)])
    return rows[torch.where(ids >= 0, ids, table.shape[0] - 1 - ids).long()]
