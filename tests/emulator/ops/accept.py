"""``accept_tree`` and ``accept_chain`` on the emulator."""

import torch

from emulator.ops.launching import given, launch
from emulator.ops.logits import SAMPLING, logits_as

DRAFT_SAMPLING = tuple(f"draft_{name}" for name in SAMPLING)


DISTRIBUTION_BYTES = 28


def accept(
    target, draft, requests, max_depth, rule, tensors, sampling, allowed, draft_allowed, numbers, threshold, alpha,
    logprobs, support,
):  # fmt: skip
    inputs = given(target=target, draft=draft, target_allowed=allowed, draft_allowed=draft_allowed, **tensors)
    inputs |= given(**dict(zip(SAMPLING + DRAFT_SAMPLING, sampling, strict=True)))
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
    if logprobs >= 0:
        scores = [torch.empty((requests, max_depth + 1)) for _ in range(2)]
        tops = [torch.empty((requests, max_depth + 1, logprobs)) for _ in range(2)]
        outputs |= {"raw": scores[0], "processed": scores[1], "top_tokens": tops[0].long(), "top_raw": tops[0],
                    "top_processed": tops[1]}  # fmt: skip
        numbers["logprobs"] = logprobs
    if support > 0:
        ids = torch.empty((requests, max_depth + 1, support), dtype=torch.int32)
        outputs |= {"support_counts": torch.empty((requests, max_depth + 1), dtype=torch.int32), "support_ids": ids}
        numbers["room"] = support
    if logprobs >= 0 or support > 0:
        outputs |= {"described": torch.empty(numbers["nodes"] * DISTRIBUTION_BYTES, dtype=torch.uint8)}
    results = launch("accept", numbers | dict(threshold=threshold, alpha=alpha), inputs, outputs)
    scores = list(results[4:9]) if logprobs >= 0 else []
    return *results[:4], scores, list(results[4 + len(scores) :][:2]) if support > 0 else []


def accept_tree(target, tokens, parents, cu_nodes, max_depth, rule, draft, draft_rows, *rest):
    *sampling, allowed, draft_allowed, seeds, positions, threshold, alpha, logprobs, support = rest
    tensors = dict(
        tokens=tokens, parents=parents, cu_nodes=cu_nodes, draft_rows=draft_rows, seeds=seeds, positions=positions
    )
    return accept(
        target, draft, cu_nodes.numel() - 1, max_depth, rule, tensors, sampling, allowed, draft_allowed,
        {"nodes": target.shape[0]}, threshold, alpha, logprobs, support,
    )  # fmt: skip


def accept_chain(target, tokens, rule, draft, *rest):
    *sampling, allowed, draft_allowed, seeds, positions, threshold, alpha, logprobs, support = rest
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
        target, draft, requests, nodes - 1, rule, tensors, sampling, allowed, draft_allowed, numbers, threshold, alpha,
        logprobs, support,
    )  # fmt: skip


KERNELS = {"accept_tree": accept_tree, "accept_chain": accept_chain}
