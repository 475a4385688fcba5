"""``tree_of_links``: SGLang's trees, links from each node to its first child and its next sibling, as parents.

    parent(first_child(i)) = i        parent(next_sibling(i)) = parent(i)

SGLang numbers parents before children and siblings upwards, and so does the accept step. Padded nodes have no link to them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_of_links(tokens: Tensor, first_child: Tensor, next_sibling: Tensor) -> tuple[Tensor, Tensor]:
    """The trees as ``accept_tree`` takes them: tokens ``[B, N]`` and parents int32 ``[B, N]``.

    Args:
        tokens: ``[B, N]``, the root's first.
        first_child, next_sibling: ``[B, N]`` int64, indices in the request; -1 for none. A link to a node that is not behind
            its own is ignored, so the parents always make a tree.

    A node without a link to it becomes a child of the root with the token -1, which no rule accepts.
    """
    batch, nodes = tokens.shape
    index = torch.arange(nodes + 1, device=tokens.device).expand(batch, -1)  # column N is for links to nowhere
    here = index[:, :-1]
    parents = torch.full_like(index, -1).scatter_(1, _target_or_end(first_child, here), here)
    # Before: a node's previous sibling, itself for an eldest. Each round doubles the steps of one gather; a node has at most
    # nodes - 2 elder siblings.
    before = index.clone().scatter_(1, _target_or_end(next_sibling, here), here)
    for _ in range(max(nodes - 3, 0).bit_length()):
        before = before.gather(1, before)
    parents = parents.gather(1, before)[:, :-1]
    stray = (parents < 0) & (here > 0)
    return tokens.masked_fill(stray, -1), parents.masked_fill(stray, 0).to(torch.int32)


def _target_or_end(links: Tensor, here: Tensor) -> Tensor:
    nodes = here.shape[1]
    return links.masked_fill((links <= here) | (links >= nodes), nodes)
