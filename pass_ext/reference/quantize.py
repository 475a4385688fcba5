"""``quantize_rows`` in plain PyTorch."""

import torch
from torch import Tensor

MOST_OF_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def quantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of 16 bytes, which begin with a scale in float32, and a code of dtype for each number."""
    numbers = rows.float()
    # A tensor: in place of dividing by a number of Python a GPU multiplies by its inverse.
    most = torch.tensor(MOST_OF_CODES[dtype], device=rows.device)
    scale = (numbers.abs().amax(-1) / most).clone(memory_format=torch.contiguous_format)[..., None]
    scale[scale.isnan()] = torch.nan  # one of many
    codes = (numbers / scale).nan_to_num(0.0)  # 0 over 0
    codes = codes.clamp(-most, most)  # a scale below the normal numbers is rounded, so a code may be beyond the most
    codes = codes.round() if dtype is torch.int8 else codes
    header = torch.cat([scale.view(torch.uint8), scale.new_zeros(*scale.shape[:-1], 12, dtype=torch.uint8)], -1)
    return torch.cat([header, codes.to(dtype).view(torch.uint8)], -1).view(dtype)
