"""Rule "longest_branch": the published selection of target-initialised multi-candidate decoding. Approximate.

    first level    w tokens of the target's distribution at the last accepted node, drawn without replacement (greedy: its best)
    below it       the draft's tokens, judged by rule "rejection", branch by branch
    result         the longest accepted chain, the first of equal ones. The target adds no token: the next first level does

Choosing the branch whose drafts do best changes the distribution of the text; docs/guide/speculative.md says by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pass_ext.decoding.sampling import BatchSampling
from pass_ext.ops.accept import AcceptResult, accept_tree
from pass_ext.ops.draft import draft_sample
from pass_ext.tree import Tree, pack_trees

_SEED_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # between the seeds of branches, so that their coins are independent


def first_level(logits: Tensor, width: int, sampling: BatchSampling, positions: Sequence[int]) -> Tensor:
    """``[B, width]`` tokens of the target's distribution; logits ``[B, V]`` are those behind the texts' last tokens."""
    if sampling.is_greedy:
        return draft_sample(logits, width, mode="top")[0]
    at = torch.tensor(positions, device=logits.device)
    return draft_sample(logits, width, mode="without", positions=at, **sampling.keywords())[0]


def longest_branch(
    logits: Tensor,
    trees: Sequence[Tree | None],
    tokens: Sequence[Sequence[int]],
    draft_logits: Tensor | None,
    draft_rows: Sequence[Sequence[int]],
    sampling: BatchSampling,
    positions: Sequence[int],
) -> AcceptResult:
    """Returns an ``AcceptResult`` without the target's own token: ``emitted`` holds accepted nodes only, and ``path`` has
    ``num_accepted + 1`` nodes below the root, the last of which is the next root.

    Args:
        logits: ``[N, V]``, the target's, of the packed nodes.
        trees: each request's candidates; None: not in this step.
        tokens: the tokens of every tree's nodes, the root's first; -1: no token.
        draft_logits, draft_rows: as ``accept_tree`` takes them, the rows tree by tree.
        positions: the text position of each request's next token.
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
    each = sampling.of_requests(owner)
    if each.seeds is not None:
        each = replace(each, seeds=each.seeds + (torch.tensor(places, device=logits.device) + 1) * _SEED_STEP)
    judged = accept_tree(
        logits[torch.tensor(rows, device=logits.device)],
        torch.tensor([tokens[b][node] for b, nodes in branches for node in nodes], device=logits.device),
        packed.parents,
        packed.cu_nodes,
        max(shape.max_depth for shape in shapes),
        rule="rejection",
        draft_logits=draft_logits,
        draft_rows=None
        if draft_logits is None
        else torch.tensor([draft_rows[b][node] for b, nodes in branches for node in nodes], device=logits.device).int(),
        positions=torch.tensor(positions, device=logits.device)[owner] + 1,
        **each.keywords(),
    )
    return _longest(trees, tokens, branches, judged)


def _below(tree: Tree | None, nodes: Sequence[int]) -> Tree:
    assert tree is not None
    places = {node: place for place, node in enumerate(nodes)}
    return Tree([-1, *(places[tree.parents[node]] for node in nodes[1:])])


def _longest(
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

    chosen = [best.get(b, []) for b in range(len(trees))]
    device = judged.path.device
    return AcceptResult(
        torch.tensor([filled([tokens[b][node] for node in path]) for b, path in enumerate(chosen)], device=device),
        torch.tensor([filled([0, *path]) for path in chosen], dtype=torch.int32, device=device),
        torch.tensor([max(len(path) - 1, 0) for path in chosen], dtype=torch.int32, device=device),
        torch.tensor(wrong, dtype=torch.int32, device=device),
    )
