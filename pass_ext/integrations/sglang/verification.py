"""``verify``: one accept step on SGLang's tensors.

    accept_index[b, j] = row of the j-th accepted node, the root's first        predict[accept_index[b, j]] = the token after it

A row is an index into the N nodes of all B requests, as ``retrieve_index`` gives it. SGLang's trees are links from each node to
its first child and its next sibling:

    parent(first_child(i)) = i        parent(next_sibling(i)) = parent(i)

It numbers parents before children and siblings upwards, and so does the accept step. Padded nodes have no link to them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pass_ext.decoding.sampling import BatchSampling
from pass_ext.ops.accept import AcceptResult, accept_chain, accept_tree

UNFILTERED = {"draft_temperature": 1.0, "draft_top_k": 0, "draft_top_p": 1.0, "draft_min_p": 0.0}
"""SGLang hands over draft probabilities as they were drawn from: their logarithms need no temperature and no filter."""


def tree_of_links(tokens: Tensor, first_child: Tensor, next_sibling: Tensor) -> tuple[Tensor, Tensor]:
    """The trees as ``accept_tree`` takes them: tokens ``[B, N]`` and parents int32 ``[B, N]``.

    Args:
        tokens: ``[B, N]``, the root's first.
        first_child, next_sibling: ``[B, N]`` int64, indices in the request; -1 for none. A link to a node that is not after
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


class Drafts(NamedTuple):
    """B requests with N nodes each, the root's first."""

    tokens: Tensor
    """``[B, N]`` int64; the root's is not verified."""
    retrieve_index: Tensor
    """``[B, N]`` int64, the nodes' rows."""
    first_child: Tensor
    """``[B, N]`` int64, -1 for none."""
    next_sibling: Tensor
    """``[B, N]`` int64, -1 for none."""
    max_depth: int
    """The depth of the deepest node; SGLang counts one more, the root."""
    branching: int
    """The children of each node; -1 if they differ. 1: a chain of N nodes, whose links are not read."""
    drawn: bool
    """True: the drafts were drawn from ``probs``. False: they are fixed proposals."""
    probs: Tensor | None
    """``[B, N - 1, V]``, the distributions that the drafts of a chain were drawn from, the first draft's first."""

    @property
    def is_chain(self) -> bool:
        """True: no node has two children, and every request has N - 1 drafts."""
        return self.branching == 1 and self.max_depth + 1 == self.tokens.shape[1]


def verify(
    logits: Tensor, drafts: Drafts, seq_lens: Tensor, sampling: BatchSampling, rule: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The accept step: predict ``[B * N]``, accept_index ``[B, max_depth + 1]`` and each number of accepted drafts ``[B]``, all
    int32.

    Args:
        logits: ``[B * N, V]``, with penalties, biases and grammar masks.
        seq_lens: ``[B]``, the tokens in the cache: the root's position in the text.
        sampling: the requests' parameters. Without seeds, fresh ones are drawn.
        rule: one of ``pass_ext.RULES``.

    A request whose root has no distribution (NaN, or no token allowed) gets token 0, so that every id is in the vocabulary.
    """
    step = (_verify_chain if drafts.is_chain else _verify_trees)(logits, drafts, seq_lens + 1, sampling, rule)
    nowhere = drafts.tokens.numel()
    used = step.path >= 0
    rows = drafts.retrieve_index.gather(1, step.path.clamp(min=0).long())
    predict = torch.zeros(nowhere + 1, dtype=torch.int32, device=logits.device)
    predict.scatter_(0, rows.masked_fill(~used, nowhere).flatten(), step.emitted.clamp(min=0).int().flatten())
    return predict[:nowhere], rows.masked_fill(~used, -1).int(), step.num_accepted


def _verify_chain(
    logits: Tensor, drafts: Drafts, positions: Tensor, sampling: BatchSampling, rule: str
) -> AcceptResult:
    drawn: dict[str, Any] = {} if drafts.probs is None else {"draft_logits": drafts.probs.log(), **UNFILTERED}
    return accept_chain(
        logits.view(*drafts.tokens.shape, -1),
        drafts.tokens[:, 1:],
        rule=rule,
        positions=positions,
        **sampling.keywords(),
        **drawn,
    )


def _verify_trees(
    logits: Tensor, drafts: Drafts, positions: Tensor, sampling: BatchSampling, rule: str
) -> AcceptResult:
    batch, nodes = drafts.tokens.shape
    tokens, parents = tree_of_links(drafts.tokens, drafts.first_child, drafts.next_sibling)
    return accept_tree(
        logits,
        tokens.flatten(),
        parents.flatten(),
        torch.arange(0, (batch + 1) * nodes, nodes, dtype=torch.int32, device=logits.device),
        drafts.max_depth,
        rule=rule,
        positions=positions,
        **sampling.keywords(),
    )
