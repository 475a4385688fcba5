"""The methods that ``generate`` takes: ``Plain``, ``NGram``, ``PaSS``. Values: they hold settings, no state of a generation.

Every method gives the same text (rule "coupled" and greedy: to the token; other exact rules: in distribution); they differ in
how many tokens a call of the model yields. docs/pass.md explains them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pass_ext.lookahead import LookaheadEmbedding
from pass_ext.tree import Tree

MOST_ROWS = 256  # of one request and step, where "auto" looks for the best number


@dataclass(frozen=True)
class Plain:
    """One token per call: the baseline, on the machinery of the others."""


@dataclass(frozen=True)
class NGram:
    """Candidates are what followed earlier occurrences of the last tokens, in prompt and text; no training.

    Args:
        longest, shortest: tokens of the text's end that are looked up, longest first.
        tokens: of each candidate.
        branches: different candidates per step, latest first.
    """

    longest: int = 4
    shortest: int = 2
    tokens: int = 8
    branches: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"NGram: 1 <= shortest <= longest, got shortest {self.shortest} and longest {self.longest}"
            )
        if self.tokens < 1 or self.branches < 1:
            raise ValueError(f"NGram: tokens and branches must be 1 or more, got {self.tokens} and {self.branches}")
        if self.tokens * self.branches > MOST_ROWS:
            raise ValueError(f"NGram: tokens x branches must be at most {MOST_ROWS}, got {self.tokens * self.branches}")


@dataclass(frozen=True)
class PaSS:
    """Candidates come from look-ahead slots in the model's own call.

    Args:
        lookahead: the trained embeddings, ``LookaheadEmbedding.from_pretrained(...)`` or ``load(...)``.
        passes: 1: a call verifies this step's candidates and looks ahead for the next. 2: as published, a call that looks
            ahead, then one that verifies.
        rows: the most rows of one call per request; "auto": the number that is fastest for this model on this machine, by
            measuring its calls once (kept on disk), and fewer while the text is hard to foresee.
        tree: instead of planning: a tree of candidates, child k of a node being the candidate of rank k; with look-ahead
            groups of its own, or without, to have them planned.
        ngram: n-gram candidates join the tree.
        slots: use the first so many look-ahead slots only.
    """

    lookahead: LookaheadEmbedding
    passes: Literal[1, 2] = 1
    rows: int | Literal["auto"] = "auto"
    tree: Tree | None = None
    ngram: NGram | None = None
    slots: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.lookahead, LookaheadEmbedding):
            raise TypeError(f"PaSS: lookahead must be a LookaheadEmbedding, got {type(self.lookahead).__name__}")
        if self.passes not in (1, 2):
            raise ValueError(f"PaSS: passes must be 1 or 2, got {self.passes!r}")
        if self.rows != "auto" and (isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 2):
            raise ValueError(f'PaSS: rows must be "auto" or 2 or more, got {self.rows!r}')
        if self.rows != "auto" and self.rows > MOST_ROWS:
            raise ValueError(f"PaSS: rows must be at most {MOST_ROWS}, got {self.rows}")
        if self.slots is not None and not 1 <= self.slots <= self.lookahead.num_lookahead:
            raise ValueError(f"PaSS: slots must be 1 to {self.lookahead.num_lookahead}, got {self.slots}")
        if self.tree is not None and self.tree.max_depth > self.num_slots:
            raise ValueError(
                f"PaSS: the tree is {self.tree.max_depth} levels deep, but there are {self.num_slots} look-ahead slots"
            )

    @property
    def num_slots(self) -> int:
        """Look-ahead slots in use."""
        return self.slots or self.lookahead.num_lookahead


Method = Plain | NGram | PaSS
