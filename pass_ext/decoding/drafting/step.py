"""``Step``: what one request asks of one call: its root, candidates, and look-ahead groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pass_ext.tree import Tree


@dataclass(frozen=True)
class Step:
    """What one request asks of one call."""

    root: int
    candidates: Tree
    """The root and the candidates."""
    groups: tuple[tuple[int, int], ...]
    """Nodes with look-ahead slots, and how many."""
    tokens: list[int]
    """Of nodes 1, 2, …; -1: none."""
    law_rows: list[int] | None = None
    """For each node the row of the draft's law, or -1."""

    @property
    def tree(self) -> Tree:
        """Candidates, and look-ahead slots behind them."""
        return _with_groups(self.candidates, self.groups)

    @property
    def ids(self) -> list[int]:
        """As ``lookahead_embed`` takes them."""
        slots = self.tree.slots[self.candidates.num_nodes :]
        return [self.root, *(max(token, 0) for token in self.tokens), *(-1 - slot for slot in slots)]

    @property
    def accept_tokens(self) -> list[int]:
        """As ``accept_tree`` takes them: no look-ahead row is ever accepted."""
        return [self.root, *self.tokens, *[-1] * (len(self.tree) - self.candidates.num_nodes)]

    @property
    def accept_law_rows(self) -> list[int]:
        """The same, of the rows of the draft's law."""
        own = self.law_rows or []
        return [*own, *[-1] * (len(self.tree) - len(own))]


@lru_cache(maxsize=1024)
def _with_groups(candidates: Tree, groups: tuple[tuple[int, int], ...]) -> Tree:
    return candidates.with_lookahead(dict(groups)) if groups else candidates
