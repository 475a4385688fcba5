"""``draft_sample`` on the emulator."""

import torch

from emulator.ops.launching import given, launch
from emulator.ops.logits import SAMPLING, logits_as


def draft_sample(logits, k, mode, temperature, top_k, top_p, min_p, allowed, seeds, positions, nodes):
    sampling = given(**dict(zip(SAMPLING, (temperature, top_k, top_p, min_p), strict=True)))
    inputs = sampling | given(logits=logits, logits_allowed=allowed, seeds=seeds, positions=positions, nodes=nodes)
    rows, vocabulary = logits.shape
    outputs = {
        "tokens": torch.empty((rows, k), dtype=torch.int64),
        "logprobs": torch.empty((rows, k), dtype=torch.float32),
    }
    numbers = logits_as("logits", logits, allowed) | dict(vocabulary=vocabulary, rows=rows, count=k, mode=mode)
    return launch("draft", numbers, inputs, outputs)


KERNELS = {"draft_sample": draft_sample}
