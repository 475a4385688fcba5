"""Rows of logits and their sampling parameters as arguments of a launch: of draft and of accept. In C++: launches/logits.h."""

import torch
from torch import Tensor

LOGIT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def logits_as(name: str, logits: Tensor, allowed: Tensor | None) -> dict[str, int]:
    return {
        name: logits.data_ptr(),
        f"{name}_allowed": 0 if allowed is None else allowed.data_ptr(),
        f"{name}_stride": logits.stride(-2),
        f"{name}_type": LOGIT_TYPES[logits.dtype],
    }
