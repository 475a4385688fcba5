"""The levels of a tree of candidates: which nodes have children at each depth, and how children are drawn.

    coupled    the best under the target's own noise at the child's text position
    without    draws without replacement, in the order of drawing
    with       independent draws
    top        the draft's best

The modes are those of ``draft_sample``; each accept rule judges the candidates of one of them.
"""

from __future__ import annotations

from typing import NamedTuple

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
    """``[P, K]`` node numbers, by rank. Missing children are the number of nodes, an entry that is cut off later."""
    numbers: tuple[int, ...]
    """The parents, on the host."""


def levels_of(tree: Tree, device: torch.device) -> list[Level]:
    """The levels that have children, the root's first."""
    levels = []
    for depth in range(tree.max_depth):
        parents = [v for v in range(tree.num_nodes) if tree.depths[v] == depth and tree.children(v)]
        width = max(len(tree.children(v)) for v in parents)
        children = [[*tree.children(v), *[tree.num_nodes] * (width - len(tree.children(v)))] for v in parents]
        level = torch.tensor(parents, device=device), torch.tensor(children, device=device)
        levels.append(Level(*level, tuple(parents)))
    return levels


def drawing_mode(sampling: BatchSampling, rule: str) -> str:
    """The mode that draws candidates for this rule. Greedy candidates are the draft's best, which is "coupled" too."""
    return "coupled" if sampling.is_greedy else DECODING_RULES[rule].drafts


def are_judged_by_logits(sampling: BatchSampling, rule: str) -> bool:
    """True if the rule divides by the distribution that candidates were drawn from."""
    return not sampling.is_greedy and DECODING_RULES[rule].needs_draft_logits


def draw_children(
    logits: Tensor,
    width: int,
    mode: str,
    sampling: BatchSampling,
    places: Tensor,
    depth: int,
    parents: Tensor,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws ``width`` children below every parent.

    Args:
        logits: ``[n * P, V]``, request by request.
        sampling: the parameters of the n requests.
        places: ``[n]``, the text positions of their roots.
        depth: the children's depth.
        parents: ``[P]``, the parents' node numbers.
        allowed: ``[n * P, ceil(V / 32)]`` int32 words, the tokens that a grammar allows; None: all.

    Returns:
        ``(tokens, logprobs)``, ``[n * P, width]``; -1 beyond the support.
    """
    count = len(parents)
    parameters = sampling.repeated(count).keywords()
    if mode == "coupled":
        positions = (places + depth).repeat_interleave(count)
        return draft_sample(logits, width, mode=mode, positions=positions, allowed=allowed, **parameters)
    positions, nodes = (places + 1).repeat_interleave(count), parents.repeat(len(places))
    return draft_sample(logits, width, mode=mode, positions=positions, nodes=nodes, allowed=allowed, **parameters)
