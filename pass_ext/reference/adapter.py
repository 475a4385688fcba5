"""``adapter_rows_`` in plain PyTorch."""

import torch
from torch import Tensor


def adapter_rows_(out: Tensor, x: Tensor, ids: Tensor, down: Tensor, up: Tensor, scale: float = 1.0) -> Tensor:
    """out[n] += scale * (x[n] @ down[k].T) @ up[k] where ids[n] < 0, in fp32 (of fp64: in fp64). k = -1 - ids[n], or 0."""
    wide_type = torch.promote_types(out.dtype, torch.float32)
    rows = x.flatten(0, -2).to(wide_type)
    k = torch.where(ids < 0, -1 - ids, 0).long() if len(down) > 1 else torch.zeros_like(ids).long()
    hidden = torch.einsum("ni,nji->nj", rows, down.to(wide_type)[k])
    added = scale * torch.einsum("nj,njo->no", hidden, up.to(wide_type)[k])
    wide = out.to(wide_type) + torch.where((ids < 0)[:, None], added, 0).view(out.shape)
    changed = (ids < 0).view(*out.shape[:-1], 1)
    return out.copy_(torch.where(changed, wide.to(out.dtype), out))
