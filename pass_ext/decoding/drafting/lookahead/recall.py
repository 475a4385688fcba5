"""``Recall``: what texts recall below the nodes of a tree of candidates, as ``recall_scores`` says.

``GrowingTexts``: the texts of a batch as one tensor, to which each step adds the new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pass_ext.ops.recall import RECALL_TOKENS, recall_scores
from pass_ext.tree import Tree


class GrowingTexts:
    """The texts of a batch, ``[B, T]``, each behind the tokens that it had before.

    Args:
        device: where they are wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows = torch.empty(0, 0, dtype=torch.int64)
        self._known: list[int] = []

    def of(self, texts: Sequence[Sequence[int]], requests: Sequence[int]) -> Tensor:
        """``[len(requests), T]`` of these requests, T the longest text. texts: of all requests; they only grow."""
        longest = max(map(len, texts))
        if len(texts) != len(self._known) or longest > self._rows.shape[1]:
            rows = torch.zeros(len(texts), 2 * longest, dtype=torch.int64)
            if len(texts) == len(self._known):
                rows[:, : self._rows.shape[1]] = self._rows
            else:
                self._known = [0] * len(texts)
            self._rows = rows
        for b, text in enumerate(texts):
            if len(text) > self._known[b]:
                self._rows[b, self._known[b] : len(text)] = torch.tensor(text[self._known[b] :])
                self._known[b] = len(text)
        return self._rows[list(requests), :longest].to(self._device)


class Recall:
    """What texts recall below the nodes of a tree.

    Args:
        tree: of candidates.
        device: of the texts.
    """

    def __init__(self, tree: Tree, device: torch.device) -> None:
        paths = []
        for node in range(tree.num_nodes):
            path: list[int] = []
            while node >= 0 and len(path) < RECALL_TOKENS:
                path.append(RECALL_TOKENS - 1 + node)
                node = tree.parents[node]
            path += range(RECALL_TOKENS - 2, -1, -1)
            paths.append(path[:RECALL_TOKENS][::-1])
        self._paths = torch.tensor(paths, device=device)
        """``[nodes, 3]``: the last tokens of each path, in a row of the two tokens in front of the root and all nodes."""

    def begin(self, text: Tensor, lengths: Tensor) -> None:
        """Takes the texts ``[n, T]`` of some requests, up to their roots, and their lengths ``[n]``, these included."""
        places = lengths[:, None] - torch.arange(RECALL_TOKENS, 1, -1, device=text.device)
        self._before = text.gather(1, places.clamp(min=0)).where(places >= 0, -1)
        self._text, self._lengths = text, lengths

    def below(self, nodes: Tensor, tokens: Tensor, candidates: Tensor) -> Tensor:
        """What the scores of candidates rise by, ``[n, P, K]``.

        Args:
            nodes: ``[P]``, the parents.
            tokens: ``[n, nodes or more]``, of the tree's nodes, the root first; -1: there is none.
            candidates: ``[n, P, K]``.
        """
        requests, count, width = candidates.shape
        contexts = torch.cat([self._before, tokens], 1)[:, self._paths[nodes]]
        of = torch.arange(requests, dtype=torch.int32, device=tokens.device).repeat_interleave(count)
        rows = candidates.reshape(-1, width).contiguous(), contexts.reshape(-1, RECALL_TOKENS)
        return recall_scores(*rows, of, self._text, self._lengths).view(requests, count, width)
