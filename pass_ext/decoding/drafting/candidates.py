"""The values of one step.

Batch        all requests between two steps
Candidates   the drafts of one request, and with its root and look-ahead slots its rows in the model's call
Proposal     those of all requests
Level        the nodes of a tree that have children at one depth

Children are drawn in a mode of ``draft_sample``; each accept rule verifies the candidates of one of them:

    coupled    the best under the target's own noise at the child's text position
    without    draws without replacement, in the order of drawing
    with       independent draws
    top        the draft's best
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from pass_ext.decoding.accept import DECODING_RULES
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.ops.draft import draft_sample
from pass_ext.tree import Tree

Groups = tuple[tuple[int, int], ...]
"""Nodes with look-ahead slots after them, and how many slots."""


@dataclass(frozen=True)
class Candidates:
    """One request's candidates for the next step: a tree, and a token for each of its nodes.

    Args:
        tree: its root is the text's last token.
        tokens: the tokens of nodes 1, 2, …; -1: no token.
        draft_rows: for each node the row of the proposal's ``draft_logits`` that its children were drawn from, or -1. None:
            nothing was drawn, candidates are fixed proposals.
        groups: nodes with look-ahead slots after them, and how many slots.
    """

    tree: Tree
    tokens: Sequence[int] = ()
    draft_rows: Sequence[int] | None = None
    groups: Groups = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != self.tree.num_nodes - 1:
            raise ValueError(
                f"Candidates: tokens must be {self.tree.num_nodes - 1}, one for each node below the root, got "
                f"{len(self.tokens)}"
            )

    @classmethod
    def from_chains(cls, chains: Iterable[Sequence[int]]) -> Candidates:
        """Makes a tree from continuations of the text, the best first. Equal beginnings are shared."""
        parents, tokens = join([-1], [-1], chains)
        return cls(Tree(parents), tokens[1:])

    @property
    def rows(self) -> Tree:
        """The tree with its look-ahead slots: the rows of the model's call."""
        return with_groups(self.tree, self.groups)

    @property
    def chains(self) -> list[list[int]]:
        """The tokens on the path to each leaf, up to the first node without a token."""
        paths = ([self.tokens[node - 1] for node in self.tree.path(leaf)[1:]] for leaf in self.tree.leaves)
        return [list(takewhile(lambda token: token != -1, path)) for path in paths]


@dataclass(frozen=True)
class Proposal:
    """The candidates of a batch.

    Args:
        candidates: one for each request; None: no candidates.
        draft_logits: ``[R, V]``, exactly the logits that candidates were drawn from; None: nothing was drawn.
        draft_allowed: ``[R, ceil(V / 32)]`` int32 words, the masks that they were drawn under; None: without masks.
    """

    candidates: Sequence[Candidates | None]
    draft_logits: Tensor | None = None
    draft_allowed: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """All requests between two steps: their texts, and the model's call just made."""

    texts: Sequence[Sequence[int]]
    """The tokens of each request, its prompt included."""
    candidates: Sequence[Candidates | None]
    """Each request's in the call; None: it was not in the call."""
    logits: Tensor
    """``[N, V]``, of the rows of ``candidates``, request by request. Valid until the next call."""
    last_nodes: Sequence[int]
    """The last accepted node of each request."""
    remaining: Sequence[int]
    """Tokens that each request still has to write; 0: it has ended."""
    levels: Sequence[int]
    """How deep the candidates of each request may be; 0: none, because the request ends or drafting pauses."""
    hidden: Sequence[Tensor] = ()
    """For each request ``[new, taps, d]``: the model's hidden states at the drafter's ``taps``, of the tokens that have come to
    its caches since the last proposal, in order; of the whole prompt at the first one. They end with the last token but one of
    the text: the last token is the root of the next call. Empty for a drafter without taps."""

    @property
    def first_rows(self) -> list[int]:
        """The row of ``logits`` at which each request's rows begin."""
        sizes = [0 if part is None else len(part.rows) for part in self.candidates]
        return list(accumulate(sizes, initial=0))[:-1]

    def last_logits(self) -> Tensor:
        """``[B, V]``, the logits of each last accepted node; an arbitrary row for requests that were not in the call."""
        places = zip(self.candidates, self.first_rows, self.last_nodes, strict=True)
        rows = [0 if part is None else first + node for part, first, node in places]
        return self.logits[uploaded(rows, self.logits.device)]


def join(parents: Sequence[int], tokens: Sequence[int], chains: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Hangs chains of proposals, the best first, below the root of a tree of candidates; equal beginnings are shared. The nodes
    of the tree keep their numbers, so its groups and draft rows stay valid.

    parents, tokens: of each node; -1 for the root's parent. ``[-1], [root]`` is a tree without candidates. Returns those of the
    joined tree.
    """
    joined_parents, joined_tokens = list(parents), list(tokens)
    below: dict[tuple[int, int], int] = {}
    for node in range(1, len(joined_parents)):
        below.setdefault((joined_parents[node], joined_tokens[node]), node)
    for chain in chains:
        node = 0
        for token in chain:
            if (node, token) not in below:
                below[node, token] = len(joined_parents)
                joined_parents.append(node)
                joined_tokens.append(token)
            node = below[node, token]
    return joined_parents, joined_tokens


@lru_cache(maxsize=1024)
def with_groups(candidates: Tree, groups: Groups) -> Tree:
    """The tree with look-ahead slots after these nodes."""
    return candidates.with_lookahead(dict(groups)) if groups else candidates


class Level(NamedTuple):
    """The nodes of one depth that have children."""

    parents: Tensor
    """``[P]`` node numbers."""
    children: Tensor
    """``[P, K]`` node numbers, by rank. Missing children are the number of nodes, an entry that is cut off later."""
    numbers: tuple[int, ...]
    """The parents, on the host."""


def filled(rows: Sequence[Sequence[int]], filler: int = -1) -> list[list[int]]:
    """The rows, each filled at its end up to the longest one."""
    longest = max(map(len, rows))
    return [[*row, *[filler] * (longest - len(row))] for row in rows]


def levels_of(tree: Tree, device: torch.device) -> list[Level]:
    """The levels that have children, the root's first."""
    levels = []
    for depth in range(tree.max_depth):
        parents = [v for v in range(tree.num_nodes) if tree.depths[v] == depth and tree.children(v)]
        children = filled([tree.children(v) for v in parents], tree.num_nodes)
        level = uploaded(parents, device), uploaded(children, device)
        levels.append(Level(*level, tuple(parents)))
    return levels


def drawing_mode(sampling: BatchSampling, rule: str) -> str:
    """The mode that draws candidates for this rule. Greedy candidates are the draft's best, which is "coupled" too."""
    return "coupled" if sampling.is_greedy else DECODING_RULES[rule].drafts


def are_verified_by_logits(sampling: BatchSampling, rule: str) -> bool:
    """True if the rule divides by the distribution that candidates were drawn from."""
    return not sampling.is_greedy and DECODING_RULES[rule].needs_draft_logits


def draw_children(
    logits: Tensor,
    width: int,
    mode: str,
    sampling: BatchSampling,
    places: Tensor,
    depth: int | Tensor,
    parents: Tensor,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws ``width`` children below the P parents of n requests.

    Args:
        logits: ``[n * P, V]``, request by request.
        places: ``[n]``, the text positions of the roots.
        depth: the children's, or ``[P]`` of those of each parent.
        parents: ``[P]``, the parents' node numbers.
        allowed: ``[n * P, ceil(V / 32)]`` int32 words, the tokens that a grammar allows; None: all.

    Returns:
        ``(tokens, logprobs)``, ``[n * P, width]``; -1 beyond the support.
    """
    count = len(parents)
    parameters = sampling.repeated(count).keywords()
    if sampling.is_greedy and mode == "coupled":
        pass  # nothing is drawn
    elif mode == "coupled":
        depths = depth if isinstance(depth, Tensor) else torch.full_like(parents, depth)
        parameters["positions"] = (places[:, None] + depths).flatten()
    else:
        parameters |= dict(positions=(places + 1).repeat_interleave(count), nodes=parents.repeat(len(places)))
    return draft_sample(logits, width, mode=mode, allowed=allowed, **parameters)
