"""The ops as the emulator runs them: CPU tensors in and out, the CUDA kernels in between. Called by conftest's backend.

Each function does what the op's .cu does around the kernels: contiguous inputs, outputs, workspace, launch. The order of
threads differs from call to call and is the same in every run of the tests.
"""

import itertools

import torch
from emulator import session
from torch import Tensor

seeds = itertools.count()
launches = itertools.count()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def lookahead_embed(ids: Tensor, table: Tensor, lookahead: Tensor) -> Tensor:
    ids, lookahead = ids.contiguous(), lookahead.contiguous()
    out = table.new_empty((*ids.shape, table.shape[1]))
    buffers = {"ids": (ids, "in"), "table": (table, "in"), "lookahead": (lookahead, "in"), "out": (out, "out")}
    with session(buffers, seed=next(seeds)) as machine:
        machine.lookahead_embed(
            name_of(table.dtype), name_of(lookahead.dtype), ids.dtype == torch.int64,
            *(tensor.data_ptr() for tensor in (ids, table, lookahead, out)),
            ids.numel(), table.shape[1], table.shape[0], lookahead.shape[0], table.stride(0),
        )  # fmt: skip
    return out


def lookahead_embed_backward(grad: Tensor, ids: Tensor, rows: int, slots: bool, dtype: torch.dtype) -> Tensor:
    grad, ids = grad.contiguous(), ids.contiguous()
    shape = (rows, grad.shape[-1])
    out = grad.new_empty(shape, dtype=dtype) if slots else grad.new_zeros(shape, dtype=dtype)
    with session({}) as machine:
        splits = machine.lookahead_embed_backward_splits(ids.numel())
    partial = grad.new_empty((splits if slots and splits > 1 else 0, *shape)).to(
        torch.float64 if grad.dtype == torch.float64 else torch.float32
    )
    buffers = {
        "grad": (grad, "in"),
        "ids": (ids, "in"),
        "partial sums": (partial, "out"),
        "out": (out, "out" if slots else "inout"),
    }
    with session(buffers, seed=next(seeds)) as machine:
        machine.lookahead_embed_backward(
            name_of(grad.dtype), name_of(dtype), ids.dtype == torch.int64,
            *(tensor.data_ptr() for tensor in (grad, ids, out, partial)),
            ids.numel(), grad.shape[-1], rows, slots,
        )  # fmt: skip
    return out


LOGIT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
LAW = ("temperature", "top_k", "top_p", "min_p")
DRAFT_LAW = tuple(f"draft_{name}" for name in LAW)


def multiprocessors() -> int:
    """Every other launch finds a GPU so large that all rows are summarised beforehand, the others one that has no room."""
    return next(launches) % 2 * 100_000


def logits_as(name: str, logits: Tensor, allowed: Tensor | None) -> dict[str, int]:
    return {
        name: logits.data_ptr(),
        f"{name}_allowed": 0 if allowed is None else allowed.data_ptr(),
        f"{name}_stride": logits.stride(-2),
        f"{name}_type": LOGIT_TYPES[logits.dtype],
    }


def given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def launch(name: str, numbers: dict[str, int], inputs: dict[str, Tensor], outputs: dict[str, Tensor], *rest: float):
    numbers |= {key: tensor.data_ptr() for key, tensor in (inputs | outputs).items() if key not in numbers}
    numbers["multiprocessors"] = multiprocessors()
    with session({}) as machine:
        size = getattr(machine, f"{name}_workspace")(numbers)
    workspace = torch.empty(size, dtype=torch.uint8)
    numbers["workspace"] = workspace.data_ptr()
    buffers = {key: (tensor, "in") for key, tensor in inputs.items()}
    buffers |= {key: (tensor, "out") for key, tensor in (outputs | {"workspace": workspace}).items()}
    with session(buffers, seed=next(seeds)) as machine:
        getattr(machine, name)(numbers, *rest)
    return tuple(outputs.values())


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


KERNELS = {
    "lookahead_embed": lookahead_embed,
    "lookahead_embed_backward": lookahead_embed_backward,
    "draft_sample": draft_sample,
    "accept_tree": accept_tree,
    "accept_chain": accept_chain,
}
