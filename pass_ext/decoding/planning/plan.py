"""Plans a step from hit rates and measured times: the tree of candidates that is expected to give the most tokens per second.

    reach(v)  product of the hit rates on v's path: P(v is accepted)
    last(v)   reach(v) - sum of reach over v's children: P(v is the last accepted one)
    miss      sum of last(v) over nodes v without a group of look-ahead slots: the next call is then a probe, of the root and
              one group; 0 for a draft model
    plan      arg max of  (sum of reach + miss) / (target(rows) + draft calls + miss · target(1 + slots))

Row times are those of all requests together. A draft model has a call for each level, on the rows of the levels above. For each
depth the tree grows best first, by reach; groups go to the nodes that are most likely to be the last accepted ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, singledispatch
from itertools import accumulate
from typing import Any

from pass_ext.decoding.arguments import whole_number
from pass_ext.decoding.methods import MAX_DRAFT_LEVELS, ByModel, MultiCandidate, PaSS, Speculative
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.models.parts import unwrapped
from pass_ext.decoding.planning.constants import ASSUMED_FALL, ASSUMED_RATE, MOST_PLANNED_ROWS
from pass_ext.decoding.planning.step_times import StepTimes, measured_times
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.tree import MAX_TREE_NODES, Tree

Rates = Sequence[Sequence[float]]
"""``rates[i][r]``: P(the candidate of rank r at depth i + 1 is right | the path to its parent is right)."""
StepTime = Callable[[int], float]
"""Seconds of one model call at a number of rows."""

_GAIN = 1 + 1e-9  # smaller differences count as equal
_ASSUMED_RANKS, _ASSUMED_LEVELS, _ASSUMED_DRAFTS = 16, 8, 8


@dataclass(frozen=True)
class Plan:
    """The shape of a step, with the expected tokens and speed. Child k of a node is the candidate of rank k."""

    tree: Tree
    """The nodes, and after them their groups of look-ahead slots. A draft model's nodes are numbered level by level."""
    slots: int
    """Look-ahead slots of one group, in full steps and in probes; 0: a draft model's, or plain decoding."""
    reach: tuple[float, ...] = field(repr=False)
    """For each node, P(it is accepted)."""
    tokens_per_call: float
    """Expected tokens per call of the target, probe calls included."""
    speedup: float | None
    """Expected speed relative to plain decoding, by the step times; None without them."""

    @classmethod
    def plain(cls, speedup: float | None = None) -> Plan:
        """No candidates: one token per call."""
        return cls(Tree.chain(0), 0, (1.0,), 1.0, speedup)

    @property
    def rows(self) -> int:
        """Rows of the target's call, in a full step."""
        return len(self.tree)

    @property
    def draft_rows(self) -> tuple[int, ...]:
        """Rows of each of a draft model's calls."""
        return () if self.slots else tuple(accumulate(_level_sizes(self.tree)[:-1]))

    @property
    def groups(self) -> dict[int, int]:
        """The nodes that carry a group, with its number of slots."""
        sizes = {node: len(self.tree.group_rows(node)) for node in range(self.tree.num_nodes)}
        return {node: size for node, size in sizes.items() if size}

    @property
    def last(self) -> list[float]:
        """For each node, P(it is the last accepted one)."""
        return _last_of(self.tree.parents[: self.tree.num_nodes], self.reach)

    @property
    def accepted(self) -> float:
        """Expected accepted drafts of a full step."""
        return sum(self.reach) - 1

    @property
    def miss(self) -> float:
        """P(a full step is followed by a probe): its last accepted node carries no group. 0 for a draft model."""
        groups = self.groups
        return sum(value for node, value in enumerate(self.last) if node not in groups) if self.slots else 0.0

    @property
    def is_plain(self) -> bool:
        """True without candidates: nothing beats plain decoding."""
        return len(self.tree) == 1

    def __str__(self) -> str:
        """Costs and expectations of a step, then the tree with the rank and probabilities of each node."""
        if self.is_plain:
            return "plain decoding: no plan is expected to be faster"
        gain = "" if self.speedup is None else f", {self.speedup:.2f}x plain decoding"
        expected = f"expected: {self.tokens_per_call:.2f} tokens per call{gain}; {self.accepted:.2f} drafts accepted"
        if self.slots:
            nodes, groups = _counted(self.tree.num_nodes, "node"), _counted(len(self.groups), "group")
            rows = f"{nodes} + {groups} of {_counted(self.slots, 'slot')}; a probe has {1 + self.slots} rows"
            lines = [f"{self.rows} rows = {rows}", f"{expected} per full step, probe after {self.miss:.0%}"]
        else:
            on = ", ".join(map(str, self.draft_rows))
            calls = f"{_counted(len(self.draft_rows), 'call')} on {on} {'row' if on == '1' else 'rows'}"
            lines = [f"{self.rows} rows, drafted by {calls}", expected]
        return "\n".join([*lines, *self._table()])

    def _table(self) -> Iterator[str]:
        """A line for each node: its place in the tree, rank, probabilities and number of look-ahead slots."""
        names, groups, last = list(_branches(self.tree)), self.groups, self.last
        width = max(len("node"), *(len(name) for name, _ in names))
        ranks = {v: rank for above in range(self.tree.num_nodes) for rank, v in enumerate(self.tree.children(above))}
        yield f"{'node':<{width}}  rank  reached   last{'  slots' if self.slots else ''}"
        for name, node in names:
            values = f"{ranks.get(node, '-'):>4}  {self.reach[node]:7.3f}  {last[node]:5.3f}  {groups.get(node, ''):>5}"
            yield f"{name:<{width}}  {values}".rstrip()


class Costs:
    """Seconds of the calls of one step.

    Args:
        target: seconds of one call of the target by its rows; None: every call costs the same.
        draft: the same of a draft model; None: look-ahead slots draft.
        requests: how many are decoded together; times are read at this many times the rows.
        passes: 1: groups of slots after candidates where they pay. 2: no groups, probes and full steps alternate.
    """

    def __init__(
        self, target: StepTime | None, draft: StepTime | None = None, *, requests: int = 1, passes: int = 1
    ) -> None:
        if passes not in (1, 2):
            raise ValueError(f"passes must be 1 or 2, got {passes!r}")
        whole_number("requests", requests)
        self.are_measured, self.has_draft, self.passes = target is not None, draft is not None, passes
        name = "step_time" if draft is None else "target_time"
        self.target = _times(name, target or (lambda rows: 1.0), requests)
        self._draft = None if draft is None else _times("draft_time", draft, requests)

    def seconds(self, levels: Sequence[int], slots: int, groups: int, miss: float) -> float:
        """Seconds of a full step, and of the probe after it as often as there is one.

        Args:
            levels: nodes of each depth, the root's first.
            groups: how many there are, of so many slots.
        """
        full = self.target(sum(levels) + groups * slots)
        if self._draft is not None:
            return full + sum(map(self._draft, accumulate(levels[:-1])))
        return full + miss * self.target(1 + slots)

    def choices(self, last: Sequence[float], slots: int, most: int) -> Iterator[tuple[int, float]]:
        """The numbers of groups that a tree may have within ``most`` rows, with the ``miss`` of each. last: of its nodes."""
        if self.has_draft:
            yield 0, 0.0
            return
        miss = 1.0
        yield 0, miss
        for groups, value in enumerate(sorted(last, reverse=True), 1):
            if self.passes == 2 or len(last) + groups * slots > most:
                return
            miss = max(0.0, miss - value)
            yield groups, miss


def plan_step(hit_rates: Rates, rows: int, costs: Costs) -> Plan:
    """The step that is expected to give the most tokens per second; ``Plan.plain`` where nothing is expected to be faster.

    rows: the most rows of the target's call, per request.
    """
    whole_number("rows", rows)
    rates, rows = checked_rates(hit_rates), min(rows, MAX_TREE_NODES)
    best, shape = 1 / costs.target(1), None  # depth limit, nodes, groups
    for depth in range(1, min(len(rates), rows - 1) + 1):
        parents, reach, depths = _best_first(rates, depth, rows)
        levels = [1] + [0] * depth
        for nodes in range(2, len(parents) + 1):
            levels[depths[nodes - 1]] += 1
            if not levels[depth]:  # scored already, under a smaller depth limit
                continue
            tokens = sum(reach[:nodes])
            for groups, miss in costs.choices(_last_of(parents[:nodes], reach[:nodes]), depth, rows):
                score = (tokens + miss) / costs.seconds(levels, depth, groups, miss)
                if score > best * _GAIN:
                    best, shape = score, (depth, nodes, groups)
    if shape is None:
        return Plan.plain(1.0 if costs.are_measured else None)
    depth, nodes, groups = shape
    parents, reach, _ = _best_first(rates, depth, nodes)
    return _promised(_with_groups(Tree(parents), reach, depth, groups), rates, 0 if costs.has_draft else depth, costs)


def plan_of_tree(tree: Tree, hit_rates: Rates, costs: Costs, *, slots: int = 0, rows: int | None = None) -> Plan:
    """The plan of a given tree, at most ``slots`` levels deep where look-ahead slots draft.

    Groups of slots in the tree stay; they must be of one size. A tree without groups gets as many as pay within ``rows`` (None:
    1,024), on the nodes most likely to be the last accepted one; none with two passes.
    """
    rates = checked_rates(hit_rates)
    if costs.has_draft:
        return _promised(tree, rates, 0, costs)
    if not 1 <= tree.max_depth <= slots:
        raise ValueError(
            f"tree must have a depth of 1 to {slots}, the trained look-ahead slots; it has {tree.max_depth}"
        )
    most = MAX_TREE_NODES if rows is None else rows
    whole_number("rows", most)
    if len(tree) > most:
        raise ValueError(f"tree has {len(tree)} rows, look-ahead slots included; rows allows {most}")
    if tree.has_lookahead:
        if costs.passes == 2:
            raise ValueError("two-pass decoding has no look-ahead slots after candidates: give tree without them")
        sizes = {len(tree.group_rows(node)) for node in range(tree.num_nodes)} - {0}
        if len(sizes) > 1 or not tree.max_depth <= min(sizes) <= slots:
            raise ValueError(
                f"tree's groups must all have one size, from its depth {tree.max_depth} to the {slots} trained "
                f"slots, got groups of {sorted(sizes)}"
            )
        return _promised(tree, rates, min(sizes), costs)
    slots, reach, levels = tree.max_depth, _reach_of(tree, rates), _level_sizes(tree)
    groups, _ = max(
        costs.choices(_last_of(tree.parents, reach), slots, most),
        key=lambda choice: ((sum(reach) + choice[1]) / costs.seconds(levels, slots, *choice), -choice[0]),
    )
    return _promised(_with_groups(tree, reach, slots, groups), rates, slots, costs)


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


def _with_groups(tree: Tree, reach: Sequence[float], slots: int, groups: int) -> Tree:
    """The tree with so many groups, on the nodes most likely to be the last accepted one."""
    last = _last_of(tree.parents, reach)
    order = sorted(range(tree.num_nodes), key=lambda node: (-last[node], node))
    return tree.with_lookahead(dict.fromkeys(order[:groups], slots)) if groups else tree


def _promised(tree: Tree, rates: Rates, slots: int, costs: Costs) -> Plan:
    if costs.has_draft:
        tree, _ = tree.breadth_first()
    shape = Plan(tree, slots, tuple(_reach_of(tree, rates)), 0.0, None)
    miss, levels = shape.miss, _level_sizes(tree)
    tokens = sum(shape.reach) + miss
    rate = tokens / costs.seconds(levels, slots, len(shape.groups), miss)
    speedup = rate * costs.target(1) if costs.are_measured else None
    return Plan(tree, slots, shape.reach, tokens / (1 + miss), speedup)


def _reach_of(tree: Tree, rates: Rates) -> list[float]:
    reach = [1.0] * tree.num_nodes
    for node in range(tree.num_nodes):
        level = rates[tree.depths[node]] if tree.depths[node] < len(rates) else []
        for rank, child in enumerate(tree.children(node)):
            reach[child] = reach[node] * level[rank] if rank < len(level) else 0.0
    return reach


def _last_of(parents: Sequence[int], reach: Sequence[float]) -> list[float]:
    last = list(reach)
    for node, parent in enumerate(parents):
        if parent >= 0:
            last[parent] -= reach[node]
    return [max(0.0, value) for value in last]


def _level_sizes(tree: Tree) -> list[int]:
    """Nodes of each depth, the root's first."""
    depths = tree.depths[: tree.num_nodes]
    return [depths.count(depth) for depth in range(tree.max_depth + 1)]


def _branches(tree: Tree) -> Iterator[tuple[str, int]]:
    pending = [(0, "", "")]  # node, the branch drawn before it, the indentation of the lines below it
    while pending:
        node, line, indent = pending.pop()
        yield f"{line}{node}", node
        children = tree.children(node)
        for child in reversed(children):
            end = child == children[-1]
            pending.append((child, indent + ("└─ " if end else "├─ "), indent + ("   " if end else "│  ")))


def _times(name: str, step_time: StepTime, requests: int) -> StepTime:
    @cache
    def at(rows: int) -> float:
        seconds = step_time(requests * rows)
        if not 0 < seconds < math.inf:
            raise ValueError(f"{name} must give seconds above 0, got {seconds} for {requests * rows} rows")
        return seconds

    return at


def assumed_hit_rates(levels: int, ranks: int) -> list[list[float]]:
    """Hit rates where nothing was counted."""
    return [[ASSUMED_RATE * ASSUMED_FALL**rank for rank in range(ranks)] for _ in range(levels)]


def checked_rates(hit_rates: Rates) -> list[list[float]]:
    """The rates as lists of floats; refuses rows that are not probabilities of exclusive events."""
    rates = [[float(rate) for rate in level] for level in hit_rates]
    for depth, level in enumerate(rates, 1):
        if not all(0 <= rate <= 1 for rate in level) or sum(level) > 1 + 1e-4:
            raise ValueError(
                f"hit_rates must be probabilities that sum to at most 1 for each depth, got {level} for depth {depth}"
            )
    return rates


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


# ---- the plan of a method ----


def plan(model: Any, method: PaSS | ByModel, requests: int = 1, *, temperature: float = 0.0) -> Plan:
    """Returns the plan that the method would follow. ``print`` shows it as a table.

    Measures the model's calls if no times are on disk: a few seconds, once per model and machine.

    Args:
        model: a model as ``generate`` takes it.
        method: ``PaSS``; or ``Speculative``, ``MultiCandidate``, ``Eagle3`` or ``Mtp`` without a tree of its own.
        requests: how many are decoded together. The plan is the best one that is common to all; ``PaSS`` with rows "auto"
            takes the rows of each request anew in each step.
        temperature: of the texts. ``PaSS`` knows how often slots are right in greedy texts, temperature 0, and in others; draft
            models' hit rates are those that were counted.
    """
    whole_number("plan: requests", requests)
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise ValueError(f"plan: temperature must be a number, 0 or more, got {temperature!r}")
    return method_plan(method, model, requests, temperature)


@singledispatch
def method_plan(method: Any, model: Any, requests: int, temperature: float) -> Plan:
    """As ``plan``, by the method's class."""
    raise TypeError(
        "plan: method must be PaSS(...), Speculative(...), MultiCandidate(...), Eagle3(...) or Mtp(...), got "
        f"{type(method).__name__}"
    )


@method_plan.register
def _(method: PaSS, model: Any, requests: int, temperature: float) -> Plan:
    return pass_plan(method, packed_model(model), requests, greedy=temperature == 0)[0]


@method_plan.register(Speculative)
@method_plan.register(MultiCandidate)
def _(method: Speculative | MultiCandidate, model: Any, requests: int, temperature: float) -> Plan:
    check_is_planned(method)
    return draft_plan(method, packed_model(model), packed_model(method.draft_model), requests)


def check_is_planned(method: ByModel) -> None:
    """Refuses a method with a tree of its own."""
    if method.tree is not None:
        raise ValueError(
            f'plan: method must have length="auto" or branching="auto", got a {type(method).__name__} with a tree of its own'
        )


def pass_plan(
    method: PaSS, model: Adapted, requests: int, *, greedy: bool, graphs: bool = False
) -> tuple[Plan, StepTimes | None]:
    """The plan, and its step times if ``rows`` is "auto". greedy: all texts have temperature 0. graphs: calls will be
    CUDA graphs."""
    slots = method.num_slots
    rates = slot_hit_rates(method.lookahead, slots, _ASSUMED_RANKS, greedy=greedy)
    times = measured_times(model, graphs=graphs, lookahead=method.lookahead) if method.rows == "auto" else None
    return _pass_plan(tuple(map(tuple, rates)), times, slots, method.tree, method.rows, method.passes, requests), times


def slot_hit_rates(lookahead: LookaheadEmbedding, slots: int, ranks: int, *, greedy: bool) -> Rates:
    """The calibrated rates of the first slots, for greedy texts their own where the file has them; without calibration a guess
    with so many ranks."""
    calibrated = (lookahead.greedy_hit_rates if greedy else None) or lookahead.hit_rates
    return calibrated[:slots] if calibrated else assumed_hit_rates(slots, ranks)


@lru_cache(maxsize=64)
def _pass_plan(
    rates: tuple[tuple[float, ...], ...],
    times: StepTimes | None,
    slots: int,
    tree: Tree | None,
    rows: int | str,
    passes: int,
    requests: int,
) -> Plan:
    costs = Costs(None if times is None else times.at, requests=requests, passes=passes)
    most = rows if isinstance(rows, int) else None
    if tree is not None:
        return plan_of_tree(tree, rates, costs, slots=slots, rows=most)
    if most is None:
        assert times is not None
        most = max(1, times.rows[-1] // requests)
    return plan_step(rates, most, costs)


def draft_plan(
    method: ByModel,
    target: Adapted,
    draft: Adapted,
    requests: int,
    *,
    graphs: bool = False,
    chain: bool = False,
) -> Plan:
    """The tree that is expected to be fastest for these models on this machine. chain: only chains are allowed."""
    rates = draft_hit_rates(method, draft)
    times, draft_times = call_times(target, draft, graphs=graphs)
    ranks = 1 if chain else method.max_branches
    most = max(1, min(MOST_PLANNED_ROWS, times.rows[-1] // requests))
    costs = Costs(times.at, draft_times.at, requests=requests)
    return plan_step([level[:ranks] for level in checked_rates(rates)[:MAX_DRAFT_LEVELS]], most, costs)


def draft_hit_rates(method: ByModel, draft: Adapted) -> Rates:
    """Those of the method, else those that were counted of the draft, else a guess."""
    return method.hit_rates or draft.hit_rates or assumed_hit_rates(_ASSUMED_LEVELS, _ASSUMED_DRAFTS)


def call_times(target: Adapted, draft: Adapted, *, graphs: bool = False) -> tuple[StepTimes, StepTimes]:
    """Step times of both models. Calls of an early-exit draft are never CUDA graphs."""
    has_caches = draft.shared_model is not unwrapped(target.model)
    return measured_times(target, graphs=graphs), measured_times(draft, graphs=graphs and has_caches)
