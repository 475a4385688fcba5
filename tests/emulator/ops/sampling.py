"""``draft_sample``, ``accept_tree`` and ``accept_chain`` on the emulator."""

import torch
from torch import Tensor

from emulator.ops.launching import given, launch

LOGIT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
LAW = ("temperature", "top_k", "top_p", "min_p")
DRAFT_LAW = tuple(f"draft_{name}" for name in LAW)


def logits_as(name: str, logits: Tensor, allowed: Tensor | None) -> dict[str, int]:
    return {
        name: logits.data_ptr(),
        f"{name}_allowed": 0 if allowed is None else allowed.data_ptr(),
        f"{name}_stride": logits.stride(-2),
        f"{name}_type": LOGIT_TYPES[logits.dtype],
    }


def draft_sample(logits, k, mode, temperature, top_k, top_p, min_p, allowed, seeds, positions, nodes):
    law = given(**dict(zip(LAW, (temperature, top_k, top_p, min_p), strict=True)))
    inputs = law | given(logits=logits, logits_allowed=allowed, seeds=seeds, positions=positions, nodes=nodes)
    rows, vocabulary = logits.shape
    outputs = {
        "tokens": torch.empty((rows, k), dtype=torch.int64),
        "logprobs": torch.empty((rows, k), dtype=torch.float32),
    }
    numbers = logits_as("logits", logits, allowed) | dict(vocabulary=vocabulary, rows=rows, count=k, mode=mode)
    return launch("draft", numbers, inputs, outputs)


def accept(target, draft, requests, max_depth, rule, tensors, law, allowed, draft_allowed, numbers, threshold, alpha):
    inputs = given(target=target, draft=draft, target_allowed=allowed, draft_allowed=draft_allowed, **tensors)
    inputs |= given(**dict(zip(LAW + DRAFT_LAW, law, strict=True)))
    outputs = {
        "emitted": torch.empty((requests, max_depth + 1), dtype=torch.int64),
        "path": torch.empty((requests, max_depth + 1), dtype=torch.int32),
        "num_accepted": torch.empty(requests, dtype=torch.int32),
        "status": torch.empty(requests, dtype=torch.int32),
    }
    numbers = dict(numbers, requests=requests, max_depth=max_depth, rule=rule, vocabulary=target.shape[-1])
    numbers |= logits_as("target", target, allowed)
    if draft is not None:
        numbers |= logits_as("draft", draft, draft_allowed) | {"draft_row_count": draft.shape[-2], "has_draft": 1}
    return launch("accept", numbers, inputs, outputs, threshold, alpha)


def accept_tree(target, tokens, parents, cu_nodes, max_depth, rule, draft, draft_rows, *rest):
    *law, allowed, draft_allowed, seeds, positions, threshold, alpha = rest
    tensors = dict(
        tokens=tokens, parents=parents, cu_nodes=cu_nodes, draft_rows=draft_rows, seeds=seeds, positions=positions
    )
    return accept(
        target, draft, cu_nodes.numel() - 1, max_depth, rule, tensors, law, allowed, draft_allowed,
        {"nodes": target.shape[0]}, threshold, alpha,
    )  # fmt: skip


def accept_chain(target, tokens, rule, draft, *rest):
    *law, allowed, draft_allowed, seeds, positions, threshold, alpha = rest
    requests, nodes = target.shape[:2]
    numbers = {
        "nodes": requests * nodes,
        "chain_nodes": nodes,
        "is_chain": 1,
        "target_request_stride": target.stride(0),
        "draft_request_stride": 0 if draft is None else draft.stride(0),
    }
    tensors = dict(tokens=tokens, seeds=seeds, positions=positions)
    return accept(
        target, draft, requests, nodes - 1, rule, tensors, law, allowed, draft_allowed, numbers, threshold, alpha
    )


KERNELS = {"draft_sample": draft_sample, "accept_tree": accept_tree, "accept_chain": accept_chain}
