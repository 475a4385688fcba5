"""Plans a PaSS step: the tree of candidates to verify, and the nodes that carry a group of look-ahead slots.

    reach(v) = product of the hit rates on v's path        last(v) = reach(v) - sum of reach over v's children
    miss = sum of last(v) over nodes v without a group     (the next call is then a probe: the root and one group)
    plan = arg max  (1 + sum of reach + miss) / (t(n + groups * slots) + miss * t(1 + slots))

t(rows) is the time of a call, n the number of nodes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pass_ext.decoding.planning.constants import ASSUMED_FALL, ASSUMED_RATE
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
from pass_ext.decoding.planning.step_times import StepTimes
from pass_ext.tree import MAX_TREE_NODES, Tree


@dataclass(frozen=True)
class Plan:
    """The shape of a PaSS step, with the expected tokens and speed. Child k of a node is the candidate of rank k."""

    tree: Tree
    """The nodes, and behind them their groups of look-ahead slots."""
    slots: int
    """Slots of one group, in full steps and in probes; 0: plain decoding."""
    reach: tuple[float, ...] = field(repr=False)
    """For each node, P(it is accepted)."""
    tokens_per_call: float
    """Expected tokens per call, probe calls included."""
    speedup: float | None
    """Expected speed relative to plain decoding, by the step times; None without them."""

    @classmethod
    def plain(cls, speedup: float | None = None) -> Plan:
        """No candidates: one token per call."""
        return cls(Tree.chain(0), 0, (1.0,), 1.0, speedup)

    @classmethod
    def from_tree(
        cls,
        tree: Tree,
        slots: int,
        hit_rates: HitRates | None = None,
        *,
        rows: int | None = None,
        step_time: StepTime | None = None,
        passes: int = 1,
        requests: int = 1,
    ) -> Plan:
        """The plan of a given tree.

        Groups that ``tree.with_lookahead`` added stay; they must be of one size. A tree without groups gets as many as pay
        within ``rows``, on the nodes most likely to be the last accepted one; none with ``passes=2``.

        Args:
            tree: the candidates, at most ``slots`` levels deep.
            slots: the number of trained look-ahead slots.
            hit_rates: as for ``plan``; None: ``assumed_hit_rates``.
            rows, step_time, passes, requests: as for ``plan``; rows None: 1,024.
        """
        if not 1 <= tree.max_depth <= slots:
            raise ValueError(
                f"tree must have a depth of 1 to {slots}, the trained look-ahead slots; it has {tree.max_depth}"
            )
        rates = checked_rates(assumed_hit_rates(slots, tree.num_nodes) if hit_rates is None else hit_rates)
        most = MAX_TREE_NODES if rows is None else checked_count("rows", rows)
        _check_passes(passes)
        if len(tree) > most:
            raise ValueError(f"tree has {len(tree)} rows, look-ahead slots included; rows allows {most}")
        reach, costs = reach_of(tree, rates), _Costs(step_time, checked_count("requests", requests))
        if tree.has_lookahead:
            if passes == 2:
                raise ValueError("two-pass decoding has no look-ahead slots behind candidates: give tree without them")
            sizes = {len(tree.group_rows(node)) for node in range(tree.num_nodes)} - {0}
            if len(sizes) > 1 or not tree.max_depth <= min(sizes) <= slots:
                raise ValueError(
                    f"tree's groups must all have one size, from its depth {tree.max_depth} to the {slots} trained "
                    f"slots, got groups of {sorted(sizes)}"
                )
            slots = min(sizes)
        else:
            slots = tree.max_depth
            last = last_of(tree.parents, reach)
            order = sorted(range(tree.num_nodes), key=lambda node: (-last[node], node))
            falling = [last[node] for node in order]
            _, groups = max(
                _scores(costs, tree.num_nodes, slots, sum(reach) - 1, falling, most, passes),
                key=lambda scored: (scored[0], -scored[1]),
            )
            tree = tree.with_lookahead(dict.fromkeys(order[:groups], slots))
        return _promised(tree, slots, tuple(reach), costs)

    @property
    def rows(self) -> int:
        """Rows of a full step, which has the most rows."""
        return len(self.tree)

    @property
    def groups(self) -> dict[int, int]:
        """The nodes that carry a group, with its number of slots."""
        sizes = {node: len(self.tree.group_rows(node)) for node in range(self.tree.num_nodes)}
        return {node: size for node, size in sizes.items() if size}

    @property
    def last(self) -> tuple[float, ...]:
        """For each node, P(it is the last accepted one)."""
        return tuple(last_of(self.tree.parents[: self.tree.num_nodes], self.reach))

    @property
    def accepted(self) -> float:
        """Expected accepted drafts of a full step."""
        return sum(self.reach) - 1

    @property
    def miss(self) -> float:
        """P(a full step is followed by a probe): its last accepted node carries no group."""
        return _miss(self.tree, self.last)

    @property
    def is_plain(self) -> bool:
        """True without candidates: nothing beats plain decoding."""
        return self.slots == 0

    def describe(self) -> str:
        """The plan as text: costs and expectations of a step, then the tree with the rank and probabilities of each node."""
        if self.is_plain:
            return "plain decoding: no plan is expected to be faster"
        nodes, groups = self.tree.num_nodes, len(self.groups)
        gain = "" if self.speedup is None else f", {self.speedup:.2f}x plain decoding"
        lines = [
            f"{self.rows} rows = {counted(nodes, 'node')} + {counted(groups, 'group')} of "
            f"{counted(self.slots, 'slot')}; a probe has {1 + self.slots} rows",
            f"expected: {self.tokens_per_call:.2f} tokens per call{gain}; {self.accepted:.2f} drafts accepted per full "
            f"step, probe after {self.miss:.0%}",
        ]
        return "\n".join([*lines, *node_table(self.tree, self.reach, self.last, self.groups)])

    def __str__(self) -> str:
        return self.describe()


def plan(
    hit_rates: HitRates,
    *,
    rows: int,
    step_time: StepTime | None = None,
    passes: int = 1,
    requests: int = 1,
) -> Plan:
    """Returns the step that is expected to give the most tokens per second.

    For each depth and number of nodes the tree grows best first: it takes the nodes with the largest reach, which maximises
    the accepted drafts if rates fall with the rank. Groups go to the nodes most likely to be the last accepted one.

    Args:
        hit_rates: ``rates[i][r]`` for slot i and rank r, one row for each trained look-ahead slot.
        rows: the most rows of one step, per request.
        step_time: seconds of a call at a number of rows. None: every call costs the same, so the plan has the most tokens per
            call.
        passes: 1: groups behind candidates where they pay. 2: no groups; probes and full steps alternate.
        requests: how many are decoded together; ``step_time`` is called with this many times the rows.

    Returns:
        Plan; ``Plan.plain`` where nothing is expected to be faster.
    """
    return _search(checked_rates(hit_rates), rows, _Costs(step_time, checked_count("requests", requests)), passes)


def plan_auto(
    hit_rates: HitRates,
    step_times: StepTimes,
    *,
    passes: int = 1,
    requests: int = 1,
) -> Plan:
    """``plan`` with as many rows as pay on this machine, up to the largest measured number.

    Args:
        hit_rates, passes, requests: as for ``plan``.
        step_times: measured times of the model's calls.
    """
    most = min(MAX_TREE_NODES, max(1, step_times.rows[-1] // checked_count("requests", requests)))
    best = plan(hit_rates, rows=most, step_time=step_times.at, passes=passes, requests=requests)
    return best if best.speedup is not None and best.speedup > 1 else Plan.plain(1.0)


def assumed_hit_rates(slots: int, ranks: int) -> list[list[float]]:
    """Assumed hit rates of uncalibrated embeddings: 0.35 for each slot's best candidate, half as much for each further rank."""
    return [[ASSUMED_RATE * ASSUMED_FALL**rank for rank in range(ranks)] for _ in range(slots)]


class _Costs:
    """t(rows), and the tokens per second of a plan by it."""

    def __init__(self, step_time: StepTime | None, requests: int) -> None:
        self.are_measured = step_time is not None
        self.at = CallTimes("step_time", step_time or (lambda rows: 1.0), requests).at

    def rate(self, rows: int, slots: int, accepted: float, miss: float) -> float:
        """Tokens per second (per call, without step times) of full steps with this many rows."""
        return (1 + accepted + miss) / (self.at(rows) + miss * self.at(1 + slots))


def _search(rates: list[list[float]], rows: int, costs: _Costs, passes: int) -> Plan:
    _check_passes(passes)
    rows = min(checked_count("rows", rows), MAX_TREE_NODES)
    best, shape = 1 / costs.at(1), None  # depth limit, nodes, groups
    for depth in range(1, min(len(rates), rows - 1) + 1):
        parents, reach, depths = _best_first(rates, depth, rows)
        last, rising, accepted, deepest = [1.0], [-1.0], 0.0, 0
        for nodes in range(2, len(parents) + 1):
            value, parent = reach[nodes - 1], parents[nodes - 1]
            del rising[bisect_left(rising, -last[parent])]
            last[parent] = max(0.0, last[parent] - value)
            last.append(value)
            insort(rising, -last[parent])
            insort(rising, -value)
            accepted, deepest = accepted + value, max(deepest, depths[nodes - 1])
            if deepest < depth:  # scored already, under a smaller depth limit
                continue
            for score, groups in _scores(costs, nodes, depth, accepted, (-x for x in rising), rows, passes):
                if score > best * (1 + 1e-9):
                    best, shape = score, (depth, nodes, groups)
    if shape is None:
        return Plan.plain(1.0 if costs.are_measured else None)
    depth, nodes, groups = shape
    parents, reach, _ = _best_first(rates, depth, nodes)
    last = last_of(parents, reach)
    order = sorted(range(nodes), key=lambda node: (-last[node], node))
    tree = Tree(parents).with_lookahead(dict.fromkeys(order[:groups], depth))
    return _promised(tree, depth, tuple(reach), costs)


def _best_first(rates: list[list[float]], depth: int, most: int) -> tuple[list[int], list[float], list[int]]:
    """Parents, reach and depths of the at most ``most`` nodes of largest reach, no deeper than ``depth``, likeliest first."""
    parents, reach, depths = [-1], [1.0], [0]
    open_nodes: list[tuple[float, int, int, int]] = []  # -reach, depth, parent, rank

    def offer(parent: int, rank: int) -> None:
        below = depths[parent]
        if below < depth and rank < len(rates[below]) and reach[parent] * rates[below][rank] > 0:
            heapq.heappush(open_nodes, (-reach[parent] * rates[below][rank], below + 1, parent, rank))

    offer(0, 0)
    while open_nodes and len(parents) < most:
        value, level, parent, rank = heapq.heappop(open_nodes)
        parents.append(parent)
        reach.append(-value)
        depths.append(level)
        offer(parent, rank + 1)
        offer(len(parents) - 1, 0)
    return parents, reach, depths


def _scores(
    costs: _Costs, nodes: int, slots: int, accepted: float, falling: Iterable[float], rows: int, passes: int
) -> Iterator[tuple[float, int]]:
    """Tokens per second, and the number of groups, for 0, 1, 2, ... groups. falling: the nodes' ``last``, largest first."""
    miss = 1.0
    yield costs.rate(nodes, slots, accepted, miss), 0
    if passes == 2:
        return
    for groups, last in enumerate(falling, 1):
        if nodes + groups * slots > rows:
            return
        miss = max(0.0, miss - last)
        yield costs.rate(nodes + groups * slots, slots, accepted, miss), groups


def _promised(tree: Tree, slots: int, reach: tuple[float, ...], costs: _Costs) -> Plan:
    shape = Plan(tree, slots, reach, 0.0, None)
    tokens = (1 + shape.accepted + shape.miss) / (1 + shape.miss)
    rate = costs.rate(len(tree), slots, shape.accepted, shape.miss)
    return replace(shape, tokens_per_call=tokens, speedup=rate * costs.at(1) if costs.are_measured else None)


def _miss(tree: Tree, last: Sequence[float]) -> float:
    return sum(value for node, value in enumerate(last) if not tree.group_rows(node))


def _check_passes(passes: int) -> None:
    if passes not in (1, 2):
        raise ValueError(f"passes must be 1 or 2, got {passes!r}")
