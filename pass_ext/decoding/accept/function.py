"""``AcceptFunction``: how the drafts of a step are judged. ``DecodingRule``: by a rule of the ops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from pass_ext.decoding.models.vocabulary import LogitShards
from pass_ext.decoding.requests.processors import Processor
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.ops.accept import AcceptResult, accept_tree
from pass_ext.ops.common.rules import AcceptRule
from pass_ext.tree import PackedTrees


@dataclass(frozen=True)
class JudgedRows:
    """The rows of a step, which an accept function judges; as arguments of ``accept_tree``."""

    logits: Tensor
    tokens: Tensor
    trees: PackedTrees
    depth: int
    positions: Tensor
    sampling: BatchSampling
    draft_logits: Tensor | None = None
    draft_rows: Tensor | None = None
    shards: LogitShards | None = None
    """The ranks that hold the columns of ``logits``."""
    options: Mapping[str, Any] = field(default_factory=dict)


class AcceptFunction(ABC):
    """How drafts are judged, and what the loop must know of it."""

    name: str
    """The rule that drafts are drawn for."""
    target_adds: ClassVar[bool] = True
    """The target adds a token after the accepted ones. False: it draws the first level of the next candidates instead, so
    greedy texts depend on the rule too."""
    by_ops: ClassVar[bool] = False
    """``accept_tree`` judges: ranks may hold the columns of the logits, and it tells log probabilities of the tokens."""
    follows_one_path: ClassVar[bool] = False
    """Only drafts on one path of each tree are accepted."""
    is_synthetic: ClassVar[bool] = False
    """The texts are not the model's."""

    def check(self, processors: Sequence[Processor], grammar: Any) -> None:
        """Refuses logits processors and a grammar that it cannot do with."""
        return

    def first_level(
        self, logits: Tensor, width: int, sampling: BatchSampling, positions: Sequence[int]
    ) -> Tensor | None:
        """``[B, width]``, the first level of the next candidates; logits ``[B, V]`` are the target's after the texts. None: the
        draft draws them."""
        return None

    @abstractmethod
    def accept(self, rows: JudgedRows) -> AcceptResult:
        """A result like that of ``accept_tree``."""


@dataclass(frozen=True)
class DecodingRule(AcceptRule, AcceptFunction):
    """A rule of the ops, by its name."""

    name: str = ""

    by_ops: ClassVar[bool] = True

    def accept(self, rows: JudgedRows) -> AcceptResult:
        rule = self.name
        if rows.sampling.is_greedy:  # all rules agree on greedy texts, and this one takes any tree
            rule = "coupled"
        elif rows.draft_logits is None and self.drafts == "with":
            rule = "rejection"  # fixed proposals alone, which have no draft logits
        return (accept_tree if rows.shards is None else rows.shards.accept_tree)(
            rows.logits,
            rows.tokens,
            rows.trees.parents,
            rows.trees.cu_nodes,
            rows.depth,
            rule=rule,
            draft_logits=rows.draft_logits,
            draft_rows=rows.draft_rows,
            positions=rows.positions,
            **rows.sampling.keywords(),
            **rows.options,
        )
