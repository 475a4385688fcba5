"""Plans a step with a draft model: the tree of candidates that it drafts level by level and the target verifies.

    reach(v) = product of the hit rates on v's path
    plan = arg max  (sum of reach) / (target(rows of the tree) + sum over levels s of draft(rows of its first s levels))

Level s + 1 is drafted by one call on the s levels above it. For given sizes of the levels, the best tree takes in each level
the likeliest children of the level above. So only sizes are searched.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import accumulate
from typing import NamedTuple

from pass_ext.decoding.planning.constants import FOLLOWED
from pass_ext.decoding.planning.hit_rates import (
    CallTimes,
    HitRates,
    StepTime,
    checked_count,
    checked_rates,
    counted,
    last_of,
    node_table,
    reach_of,
)
from pass_ext.tree import MAX_TREE_NODES, Tree

_GAIN = 1 + 1e-9  # smaller differences count as equal


@dataclass(frozen=True)
class DraftPlan:
    """The candidates of a step, with the expected tokens and speed. Child k of a node is the candidate of rank k."""

    tree: Tree
    """The candidates, numbered level by level."""
    reach: tuple[float, ...] = field(repr=False)
    """For each node, P(it is accepted)."""
    tokens_per_call: float
    """Expected tokens for each call of the target."""
    speedup: float | None
    """Expected speed relative to plain decoding, by the step times; None without them."""

    @classmethod
    def plain(cls) -> DraftPlan:
        """No candidates: one token per call."""
        return cls(Tree.chain(0), (1.0,), 1.0, 1.0)

    @classmethod
    def from_tree(
        cls,
        tree: Tree,
        hit_rates: HitRates,
        target_time: StepTime | None = None,
        draft_time: StepTime | None = None,
        *,
        requests: int = 1,
    ) -> DraftPlan:
        """The plan of a given tree. Times, requests: as for ``plan_drafts``; without times there is no ``speedup``."""
        tree, _ = tree.breadth_first()
        reach = reach_of(tree, checked_rates(hit_rates))
        if target_time is None or draft_time is None:
            return cls(tree, tuple(reach), sum(reach), None)
        costs = _Costs(target_time, draft_time, checked_count("requests", requests))
        return cls(tree, tuple(reach), sum(reach), sum(reach) / costs.of(tree) * costs.target(1))

    @property
    def rows(self) -> int:
        """Rows of the target's call."""
        return len(self.tree)

    @property
    def draft_rows(self) -> tuple[int, ...]:
        """Rows of each of the draft's calls."""
        return _draft_rows(self.tree)

    @property
    def last(self) -> tuple[float, ...]:
        """For each node, P(it is the last accepted one)."""
        return tuple(last_of(self.tree.parents, self.reach))

    @property
    def accepted(self) -> float:
        """Expected accepted drafts of a step."""
        return self.tokens_per_call - 1

    @property
    def is_plain(self) -> bool:
        """True without candidates: nothing beats plain decoding."""
        return len(self.tree) == 1

    def describe(self) -> str:
        """The plan as text: costs and expectations of a step, then the tree with the rank and probabilities of each node."""
        if self.is_plain:
            return "plain decoding: no plan is expected to be faster"
        gain = "" if self.speedup is None else f", {self.speedup:.2f}x plain decoding"
        lines = [
            f"{self.rows} rows, drafted by {counted(len(self.draft_rows), 'call')} on "
            f"{', '.join(map(str, self.draft_rows))} {'row' if self.draft_rows == (1,) else 'rows'}",
            f"expected: {self.tokens_per_call:.2f} tokens per call{gain}; {self.accepted:.2f} drafts accepted",
        ]
        return "\n".join([*lines, *node_table(self.tree, self.reach, self.last)])

    def __str__(self) -> str:
        return self.describe()


def plan_drafts(
    hit_rates: HitRates,
    target_time: StepTime,
    draft_time: StepTime,
    *,
    most_rows: int = 64,
    requests: int = 1,
    most_levels: int | None = None,
    ranks: int | None = None,
) -> DraftPlan:
    """Returns the candidates that are expected to give the most tokens per second.

    With few rows, and rates that fall with the rank, all sizes of levels are tried and the plan is the best of all trees. With
    more rows, only the most promising of the trees with equally many levels and rows are extended.

    Args:
        hit_rates: ``rates[i][r]`` for depth i + 1 and rank r, as ``calibrate`` gives them.
        target_time, draft_time: seconds of one call of the model at a number of rows.
        most_rows: the most rows of the target's call, per request; times should be measured up to ``requests`` times as many.
        requests: how many are decoded together; times are read at this many times the rows.
        most_levels: the most levels of the tree; None: as many as ``hit_rates`` has.
        ranks: the most candidates below one node; 1: chains. None: as many as ``hit_rates`` has.

    Returns:
        DraftPlan; ``DraftPlan.plain`` where nothing is expected to be faster.
    """
    most = min(checked_count("most_rows", most_rows), MAX_TREE_NODES)
    levels = None if most_levels is None else checked_count("most_levels", most_levels)
    width = None if ranks is None else checked_count("ranks", ranks)
    rates = [level[:width] for level in checked_rates(hit_rates)[:levels]]
    falling = [list(accumulate(level, min)) for level in rates]  # a rank is taken after those before it
    sizes = _best_sizes(falling, most, _Costs(target_time, draft_time, checked_count("requests", requests)))
    if not sizes:
        return DraftPlan.plain()
    return DraftPlan.from_tree(_tree(falling, sizes), rates, target_time, draft_time, requests=requests)


class _Costs:
    """Seconds of the calls of one step."""

    def __init__(self, target_time: StepTime, draft_time: StepTime, requests: int) -> None:
        self.target = CallTimes("target_time", target_time, requests).at
        self.draft = CallTimes("draft_time", draft_time, requests).at

    def of(self, tree: Tree) -> float:
        return self.target(len(tree)) + sum(map(self.draft, _draft_rows(tree)))


def _draft_rows(tree: Tree) -> tuple[int, ...]:
    sizes = [tree.depths.count(depth) for depth in range(tree.max_depth)]
    return tuple(accumulate(sizes))


class _Levels(NamedTuple):
    """A tree by the sizes of its levels below the root."""

    sizes: tuple[int, ...]
    likeliest: list[float]
    """Products of rates, falling; the first ``width`` are the reach of the last level."""
    width: int
    rows: int
    tokens: float
    """Sum of reach."""
    drafting: float
    """Seconds of the draft's calls."""


def _best_sizes(rates: list[list[float]], most: int, costs: _Costs) -> tuple[int, ...]:
    """Nodes of each level below the root in the best tree; empty where plain decoding is as fast."""
    bound = _Bound(rates, most, costs)
    best = 1 / costs.target(1)
    best_sizes: tuple[int, ...] = ()
    followed = [_Levels((), [1.0], 1, 1, 1.0, 0.0)]
    for level, level_rates in enumerate(rates):
        grown: dict[int, list[_Levels]] = defaultdict(list)
        for above in followed:
            if not bound.may_beat(best, level, above):
                continue
            drafting = above.drafting + costs.draft(above.rows)
            likeliest = sorted(
                (a * b for a in above.likeliest[: above.width] for b in level_rates if a * b > 0), reverse=True
            )
            likeliest, tokens = likeliest[: most - above.rows], above.tokens
            for width, reach in enumerate(likeliest, 1):
                rows, tokens = above.rows + width, tokens + reach
                tree = _Levels((*above.sizes, width), likeliest, width, rows, tokens, drafting)
                grown[rows].append(tree)
                if tokens / (costs.target(rows) + drafting) > best * _GAIN:
                    best, best_sizes = tokens / (costs.target(rows) + drafting), tree.sizes
        followed = [
            tree
            for same in grown.values()
            for tree in nlargest(FOLLOWED, same, key=lambda tree: tree.tokens - best * tree.drafting)
        ]
    return best_sizes


class _Bound:
    """An upper bound on the gain of more levels: each has at most its rates' sum times the reach above, and at least one
    row."""

    def __init__(self, rates: list[list[float]], most: int, costs: _Costs) -> None:
        self._sums = list(map(sum, rates))
        self._most = most
        self._least_target, self._least_draft = (
            list(accumulate(map(at, range(most, 0, -1)), min))[::-1] for at in (costs.target, costs.draft)
        )  # [n - 1]: the least seconds of any call with n rows or more

    def may_beat(self, best: float, level: int, above: _Levels) -> bool:
        reach, tokens, drafting = sum(above.likeliest[: above.width]), above.tokens, above.drafting
        for rows, rate in enumerate(self._sums[level:], above.rows):
            if rows == self._most:
                return False
            reach *= rate
            tokens += reach
            drafting += self._least_draft[rows - 1]
            if tokens > best * (drafting + self._least_target[rows]):
                return True
        return False


def _tree(rates: list[list[float]], sizes: tuple[int, ...]) -> Tree:
    """The likeliest tree with levels of these sizes, siblings together and by rank."""
    parents, reach, level = [-1], [1.0], range(1)
    for level_rates, size in zip(rates, sizes, strict=False):
        children = [(reach[above] * rate, above, rank) for above in level for rank, rate in enumerate(level_rates)]
        chosen = sorted(children, key=lambda child: -child[0])[:size]
        for value, above, _ in sorted(chosen, key=lambda child: child[1:]):
            parents.append(above)
            reach.append(value)
        level = range(level.stop, len(parents))
    return Tree(parents)
