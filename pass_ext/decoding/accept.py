"""How drafts are verified: ``AcceptFunction``, and ``DECODING_RULES``, the rules by name: those of the ops, and one more.

Rule "longest_branch" is the published selection of target-initialised multi-candidate decoding. Approximate:

    first level    w tokens of the target's distribution at the last accepted node, drawn without replacement (greedy: its best)
    below it       the draft's tokens, verified by rule "rejection", branch by branch
    result         the longest accepted chain, the first of equal ones. The target adds no token: the next first level does

Choosing the branch whose drafts do best changes the distribution of the text; docs/guide/speculative.md says by how much.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pass_ext.decoding.models.vocabulary import LogitShards
from pass_ext.decoding.requests.processors import Processor, processor_names
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.ops.accept import AcceptResult, accept_tree
from pass_ext.ops.common.rules import ACCEPT_RULES, AcceptRule
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.ops.draft import draft_sample
from pass_ext.tree import PackedTrees, Tree, pack_trees

_SEED_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # between the seeds of branches, so that their coins are independent


@dataclass(frozen=True)
class VerifiedRows:
    """The rows of a step, which an accept function verifies; as arguments of ``accept_tree``."""

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
    """Further arguments: ``allowed``, a grammar's masks; those of log probabilities."""


class AcceptFunction(ABC):
    """How drafts are verified."""

    name: str
    """The rule that drafts are drawn for."""
    target_adds: ClassVar[bool] = True
    """The target adds a token after the accepted ones. False: it draws the first level of the next candidates instead, so
    greedy texts depend on the rule too."""
    by_ops: ClassVar[bool] = False
    """``accept_tree`` verifies: ranks may hold the columns of the logits, and it tells log probabilities of the tokens."""
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
    def accept(self, rows: VerifiedRows) -> AcceptResult:
        """A result like that of ``accept_tree``."""


@dataclass(frozen=True)
class DecodingRule(AcceptRule, AcceptFunction):
    """A rule of the ops, by its name."""

    name: str = ""

    by_ops: ClassVar[bool] = True

    def accept(self, rows: VerifiedRows) -> AcceptResult:
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


@dataclass(frozen=True)
class LongestBranch(DecodingRule):
    """The rule. Its results are without the target's own token: ``emitted`` holds accepted nodes only, and ``path`` has
    ``num_accepted + 1`` nodes below the root, the last of which is the next root."""

    exact: bool = False
    drafts: str = "without"
    needs_draft_logits: bool = True
    name: str = "longest_branch"

    target_adds: ClassVar[bool] = False
    by_ops: ClassVar[bool] = False

    def check(self, processors: Sequence[Processor], grammar: Any) -> None:
        if processors:
            raise ValueError(
                f"generate: rule {self.name!r} takes no logits_processor, because it draws a first level before processors "
                f"run; {processor_names(processors)}"
            )
        if grammar is not None:
            raise ValueError(
                f"generate: grammar must be None with rule {self.name!r}, which draws a first level without masks, got "
                f"{type(grammar).__name__}"
            )

    def first_level(self, logits: Tensor, width: int, sampling: BatchSampling, positions: Sequence[int]) -> Tensor:
        if sampling.is_greedy:
            return draft_sample(logits, width, mode="top")[0]
        at = uploaded(positions, logits.device)
        return draft_sample(logits, width, mode="without", positions=at, **sampling.keywords())[0]

    def accept(self, rows: VerifiedRows) -> AcceptResult:
        parents, slices, device = rows.trees.parents.tolist(), rows.trees.slices(), rows.logits.device
        branches: list[tuple[int, list[int]]] = []  # request, its nodes in the tree
        places: list[int] = []  # among the request's branches
        numbers: list[int] = []
        shapes: list[Tree] = []
        for b, mine in enumerate(slices):
            tree = Tree(parents[mine]) if parents[mine] else Tree.chain(0)
            for place, top in enumerate(tree.children(0)):
                nodes = [top]
                for node in nodes:
                    nodes += tree.children(node)
                number = {node: i for i, node in enumerate(nodes)}
                branches.append((b, nodes))
                places.append(place)
                shapes.append(Tree([-1, *(number[tree.parents[node]] for node in nodes[1:])]))
                numbers += (mine.start + node for node in nodes)
        packed, at = pack_trees(shapes, device), uploaded(numbers, device)
        owner = uploaded([b for b, _ in branches], device)
        each = rows.sampling.of_requests(owner)
        if each.seeds is not None:
            each = replace(each, seeds=each.seeds + (uploaded(places, device) + 1) * _SEED_STEP)
        verified = accept_tree(
            rows.logits[at],
            rows.tokens[at],
            packed.parents,
            packed.cu_nodes,
            max(shape.max_depth for shape in shapes),
            rule="rejection",
            draft_logits=rows.draft_logits,
            draft_rows=None if rows.draft_rows is None else rows.draft_rows[at],
            positions=rows.positions[owner] + 1,
            **each.keywords(),
        )
        each_tokens = [rows.tokens[mine].tolist() for mine in slices]
        return _longest(each_tokens, branches, verified)


def _longest(
    tokens: Sequence[Sequence[int]],
    branches: Sequence[tuple[int, list[int]]],
    verified: AcceptResult,
) -> AcceptResult:
    paths, status = verified.path.tolist(), verified.status.tolist()
    best: dict[int, list[int]] = {}
    wrong = [0] * len(tokens)
    for (b, nodes), path, count, bits in zip(branches, paths, verified.num_accepted.tolist(), status, strict=True):
        wrong[b] |= bits
        if tokens[b][nodes[0]] >= 0 and count + 1 > len(best.get(b, ())):
            best[b] = [nodes[place] for place in path[: count + 1]]
    width = 1 + max(map(len, best.values()), default=1)

    def filled(numbers: Sequence[int]) -> list[int]:
        return [*numbers, *[-1] * (width - len(numbers))]

    chosen = [best.get(b, []) for b in range(len(tokens))]
    device = verified.path.device
    return AcceptResult(
        uploaded([filled([tokens[b][node] for node in path]) for b, path in enumerate(chosen)], device),
        uploaded([filled([0, *path]) for path in chosen], device, torch.int32),
        uploaded([max(len(path) - 1, 0) for path in chosen], device, torch.int32),
        uploaded(wrong, device, torch.int32),
    )


DECODING_RULES: dict[str, DecodingRule] = {
    **{name: DecodingRule(**vars(rule), name=name) for name, rule in ACCEPT_RULES.items()},
    LongestBranch.name: LongestBranch(),
}
"""A new rule of the ops belongs into ops/common/rules.py."""


def accept_function(rule: Any) -> AcceptFunction:
    """The accept function that is asked for, by its name or itself."""
    if isinstance(rule, AcceptFunction):
        return rule
    if not isinstance(rule, str) or rule not in DECODING_RULES:
        raise ValueError(f"generate: rule must be one of {', '.join(DECODING_RULES)}, got {rule!r}")
    return DECODING_RULES[rule]
