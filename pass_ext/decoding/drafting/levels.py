"""The levels of a tree of candidates, as drafters fill them: who has children at each depth, and how children are drawn.

    coupled    the best under the target's own noise at the child's text position
    without    draws without replacement, in the order of drawing
    with       independent draws

The modes are those of ``draft_sample``; a rule says which of them it judges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pass_ext.decoding.rules import DECODING_RULES
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.ops.draft import draft_sample
from pass_ext.tree import Tree


class Level(NamedTuple):
    """The nodes of one depth that have children."""

    parents: Tensor
    """``[P]`` node numbers."""
    children: Tensor
    """``[P, K]`` node numbers, by rank; where a parent has fewer: the number of nodes, a column that is cut off."""
    numbers: tuple[int, ...]
    """The parents, on the host."""


def levels_of(tree: Tree, device: torch.device) -> list[Level]:
    """Those that have children, the root's first."""
    levels = []
    for depth in range(tree.max_depth):
        parents = [v for v in range(tree.num_nodes) if tree.depths[v] == depth and tree.children(v)]
        width = max(len(tree.children(v)) for v in parents)
        children = [[*tree.children(v), *[tree.num_nodes] * (width - len(tree.children(v)))] for v in parents]
        level = torch.tensor(parents, device=device), torch.tensor(children, device=device)
        levels.append(Level(*level, tuple(parents)))
    return levels


def drawing_mode(sampling: BatchSampling, rule: str) -> str:
    """How candidates are drawn that this rule will judge. "coupled" keeps no law; greedy candidates are the draft's best."""
    return "coupled" if sampling.temperature is None else DECODING_RULES[rule].drafts


def draw_children(
    logits: Tensor, width: int, mode: str, law: dict[str, Any], places: Tensor, depth: int, parents: Tensor
) -> tuple[Tensor, Tensor]:
    """``width`` children below every parent.

    Args:
        logits: ``[n * P, V]``, request by request.
        law: sampling parameters of the n requests.
        places: ``[n]``, the text positions of their roots.
        depth: of the children.
        parents: ``[P]``, the parents' node numbers.

    Returns:
        ``(tokens, logprobs)``, ``[n * P, width]``; -1 beyond the support.
    """
    count = len(parents)
    if mode == "coupled":
        at = (places + depth).repeat_interleave(count)
        return draft_sample(logits, width, mode=mode, positions=at, **repeated(law, count))
    at, nodes = (places + 1).repeat_interleave(count), parents.repeat(len(places))
    return draft_sample(logits, width, mode=mode, positions=at, nodes=nodes, **repeated(law, count))


def repeated(law: dict[str, Any], times: int) -> dict[str, Any]:
    """Each request's parameters so many times."""
    return {
        name: None if value is None else value.repeat_interleave(times, output_size=times * len(value))
        for name, value in law.items()
    }
