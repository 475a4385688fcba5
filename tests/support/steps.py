"""Random steps to verify: trees, logits, drafts drawn from the draft's distribution, one number per request for each filter.

A step is a dict of the keyword arguments of accept_tree.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import pass_ext

DRAFT_MODE = {"rejection_with_replacement": "with", "kseq": "with"}
CPU = "cpu"


def random_tree(nodes: int, random: torch.Generator, chain: bool = False) -> list[int]:
    """Parents of a tree with so many nodes: any earlier node may be a parent."""
    if chain:
        return list(range(-1, nodes - 1))
    return [-1, *(int(torch.randint(0, i, (), generator=random)) for i in range(1, nodes))]


def depths_of(parents: list[int]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def random_sampling(rows: int, random: torch.Generator, filters: bool = True, greedy: bool = True) -> dict[str, Tensor]:
    """Temperatures, some of them 0, and filters, about half of them off."""
    pick = lambda: torch.rand(rows, generator=random)  # noqa: E731
    temperature = 0.3 + 1.5 * pick()
    if greedy:
        temperature[pick() < 0.1] = 0.0
    if not filters:
        return {"temperature": temperature}
    off = lambda value, default: torch.where(pick() < 0.5, value, torch.full_like(value, default))  # noqa: E731
    return {
        "temperature": temperature,
        "top_k": off(1 + (20 * pick()).int(), 0),
        "top_p": off(0.3 + 0.69 * pick(), 1.0),
        "min_p": off(0.3 * pick() ** 2, 0.0),
    }


def strided(rows: Tensor, dtype: torch.dtype, offset: int = 3) -> Tensor:
    """The same rows with NaN between them, at odd addresses."""
    wide = torch.full((rows.shape[0], rows.shape[1] + 2 * offset), float("nan"), dtype=dtype)
    wide[:, offset : offset + rows.shape[1]] = rows.to(dtype)
    return wide[:, offset : offset + rows.shape[1]]


def random_step(
    rule: str,
    sizes: list[int],
    vocabulary: int,
    random: torch.Generator,
    *,
    dtype: torch.dtype = torch.float32,
    draft_dtype: torch.dtype | None = None,
    filters: bool = True,
    closeness: float = 0.7,
    chain: bool = False,
) -> dict[str, object]:
    """One step of requests with `sizes` nodes each (0: padded). Drafts are drawn from the draft's distribution, in the way the
    rule needs. Some nodes have fixed proposals, some children are -1, and a node's children share one row of draft_logits.
    """
    parents = [random_tree(n, random, chain or rule == "block") if n else [] for n in sizes]
    cu_nodes = torch.tensor([0, *sizes]).cumsum(0).int()
    total = int(cu_nodes[-1])
    target = torch.randn(total, vocabulary, generator=random) * 2.5
    draft = target + torch.randn(total, vocabulary, generator=random) * closeness
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    sampling = random_sampling(len(sizes), random, filters)
    seeds = torch.randint(-(2**62), 2**62, (len(sizes),), generator=random)
    positions = torch.randint(0, 2**40, (len(sizes),), generator=random)
    target, draft = strided(target, dtype), strided(draft, draft_dtype or dtype, 5)
    most = max([1, *(parents[b].count(i) for b in range(len(sizes)) for i in range(sizes[b]))])
    with _disable_current_modes():  # also the emulator's mode, which would take longer for this than for the step
        drawn, _ = pass_ext.draft_sample(
            draft, most, mode=DRAFT_MODE.get(rule, "without"), seeds=seeds[owner], positions=positions[owner],
            nodes=torch.arange(total), **{name: values[owner] for name, values in sampling.items()},
        )  # fmt: skip
    tokens, draft_rows = torch.full((total,), -7), torch.randperm(total, generator=random).int()
    shuffled = torch.empty_like(draft.contiguous())
    for b, own in enumerate(parents):
        for i, parent in enumerate(own[1:], 1):
            first = int(cu_nodes[b])
            tokens[first + i] = drawn[first + parent, own[1:i].count(parent)]
    shuffled[draft_rows.long()] = draft
    fixed = torch.rand(total, generator=random) < 0.15
    if rule not in DRAFT_MODE:
        draft_rows[fixed] = -1
    tokens[torch.rand(total, generator=random) < 0.03] = -1
    tokens[torch.rand(total, generator=random) < 0.01] = vocabulary
    return dict(
        target_logits=target,
        tokens=tokens,
        parents=torch.tensor([i for own in parents for i in own], dtype=torch.int32),
        cu_nodes=cu_nodes,
        max_depth=max([0, *(max(depths_of(own)) for own in parents if own)]),
        rule=rule,
        draft_logits=shuffled,
        draft_rows=draft_rows,
        seeds=seeds,
        positions=positions,
        **sampling,
    )


def to(step: dict[str, object], device: torch.device) -> dict[str, object]:
    """Moves a step's tensors, strides and all."""
    return {name: _moved(value, device) if isinstance(value, Tensor) else value for name, value in step.items()}


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == CPU:
        return tensor
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((extent,), (1,)) if tensor.numel() else tensor.flatten()
    return flat.to(device).as_strided(tensor.shape, tensor.stride()) if tensor.numel() else tensor.to(device)
