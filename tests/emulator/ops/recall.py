"""``recall_scores`` on the emulator: one launch."""

import torch
from torch import Tensor

from emulator import session
from emulator.ops.launching import pointers, seeds


def recall_scores(tokens: Tensor, contexts: Tensor, requests: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
    scores = torch.empty(tokens.shape, dtype=torch.float32)
    if scores.numel() == 0:
        return scores
    buffers = {
        name: (tensor, "in")
        for name, tensor in dict(
            tokens=tokens, contexts=contexts, requests=requests, text=text, lengths=lengths
        ).items()
    }
    buffers["scores"] = (scores, "out")
    sizes = dict(rows=len(tokens), count=tokens.shape[1], request_count=len(text), room=text.shape[1])
    with session(buffers, seed=next(seeds)) as machine:
        machine.recall_scores(sizes | pointers(buffers))
    return scores


KERNELS = {"recall_scores": recall_scores}
