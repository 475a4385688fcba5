"""Rule "longest_branch": the published selection of target-initialised multi-candidate decoding. Approximate.

    the first level has w tokens of the target's own law at the last accepted node, drawn without replacement (greedy: its best)
    below each of them the draft's tokens are judged by rule "rejection"; the branch with the longest accepted chain is kept,
    the first of equal ones, and nothing is added to it: the next step's first level goes on from its last node

Favouring the branch that drafts do well on changes the law of the text; docs/guide/speculative.md says by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.sampling import BatchSampling
from pass_ext.ops.accept import AcceptResult, accept_tree
from pass_ext.ops.draft import draft_sample
from pass_ext.tree import Tree, pack_trees

_SEED_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # between the branches' seeds, so that their coins are their own


def first_level(logits: Tensor, width: int, sampling: BatchSampling, positions: Sequence[int]) -> Tensor:
    """``[B, width]`` tokens of the target's law; logits ``[B, V]`` are those behind the texts' last tokens."""
    if sampling.temperature is None:
        return draft_sample(logits, width, mode="top")[0]
    at = torch.tensor(positions, device=logits.device)
    return draft_sample(logits, width, mode="without", positions=at, **sampling.law())[0]


def longest_branch(
    logits: Tensor,
    trees: Sequence[Tree | None],
    tokens: Sequence[Sequence[int]],
    law: Tensor | None,
    law_rows: Sequence[Sequence[int]],
    sampling: BatchSampling,
    positions: Sequence[int],
) -> AcceptResult:
    """What ``accept_tree`` returns, but for the text's end: ``emitted`` are accepted nodes only, and ``path`` has one node more
    than ``num_accepted`` says: the last one, which is the next root.

    Args:
        logits: ``[N, V]``, the target's, of the packed nodes.
        trees: of candidates, for each request; None: not in this step.
        tokens: of every tree's nodes, the root's first; -1: none.
        law, law_rows: as ``draft_logits`` and ``draft_rows``, for every tree's nodes.
        positions: of each request's next token.
    """
    branches: list[tuple[int, list[int]]] = []  # request, its nodes in the tree
    places: list[int] = []  # among the request's branches
    rows: list[int] = []
    first = 0
    for b, tree in enumerate(trees):
        if tree is None:
            continue
        for place, top in enumerate(tree.children(0)):
            nodes = [top]
            for node in nodes:
                nodes += tree.children(node)
            branches.append((b, nodes))
            places.append(place)
            rows += (first + node for node in nodes)
        first += len(tree)
    shapes = [_below(trees[b], nodes) for b, nodes in branches]
    packed = pack_trees(shapes, logits.device)
    owner = torch.tensor([b for b, _ in branches], device=logits.device)
    params: dict[str, Any] = {name: None if v is None else v[owner] for name, v in sampling.law().items()}
    if params["seeds"] is not None:
        params["seeds"] = params["seeds"] + (torch.tensor(places, device=logits.device) + 1) * _SEED_STEP
    judged = accept_tree(
        logits[torch.tensor(rows, device=logits.device)],
        torch.tensor([tokens[b][node] for b, nodes in branches for node in nodes], device=logits.device),
        packed.parents,
        packed.cu_nodes,
        max(shape.max_depth for shape in shapes),
        rule="rejection",
        draft_logits=law,
        draft_rows=None
        if law is None
        else torch.tensor([law_rows[b][node] for b, nodes in branches for node in nodes], device=logits.device).int(),
        positions=torch.tensor(positions, device=logits.device)[owner] + 1,
        **params,
    )
    return _kept(trees, tokens, branches, judged)


def _below(tree: Tree | None, nodes: Sequence[int]) -> Tree:
    assert tree is not None
    places = {node: place for place, node in enumerate(nodes)}
    return Tree([-1, *(places[tree.parents[node]] for node in nodes[1:])])


def _kept(
    trees: Sequence[Tree | None],
    tokens: Sequence[Sequence[int]],
    branches: Sequence[tuple[int, list[int]]],
    judged: AcceptResult,
) -> AcceptResult:
    paths, status = judged.path.tolist(), judged.status.tolist()
    best: dict[int, list[int]] = {}
    wrong = [0] * len(trees)
    for (b, nodes), path, count, bits in zip(branches, paths, judged.num_accepted.tolist(), status, strict=True):
        wrong[b] |= bits
        if tokens[b][nodes[0]] >= 0 and count + 1 > len(best.get(b, ())):
            best[b] = [nodes[place] for place in path[: count + 1]]
    width = 1 + max(map(len, best.values()), default=1)

    def filled(numbers: Sequence[int]) -> list[int]:
        return [*numbers, *[-1] * (width - len(numbers))]

    made = [best.get(b, []) for b in range(len(trees))]
    device = judged.path.device
    return AcceptResult(
        torch.tensor([filled([tokens[b][node] for node in path]) for b, path in enumerate(made)], device=device),
        torch.tensor([filled([0, *path]) for path in made], dtype=torch.int32, device=device),
        torch.tensor([max(len(path) - 1, 0) for path in made], dtype=torch.int32, device=device),
        torch.tensor(wrong, dtype=torch.int32, device=device),
    )
