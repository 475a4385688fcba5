"""``SharedRows``: the rows of a batch's steps, chosen for all requests together, and what is learned for that from the texts.

    worth[slot] of a request   what its candidates gained lately: mean of  sum of max(0, reach - price)  over the slot's depth
    price                      tokens that a row costs: those of a plain step / its seconds · seconds of a further row
    weight of a request        1/2 + 1/2 · requests · softmax(tokens that are left / 8)

The batch is done when its last text is, so a token counts more where many are left, and drafting has gained a step when the
longest rest is shorter by one. While it loses time by that measure, all steps are plain (pace.py). A step's rows are chosen by
what was known before its call: the slots' probabilities, earlier steps, and their seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache

from pass_ext.decoding.drafting.rows.batch_seconds import batch_seconds
from pass_ext.decoding.drafting.rows.chances import Chances
from pass_ext.decoding.drafting.rows.pace import Pace
from pass_ext.decoding.drafting.rows.share import Offer, Rows, share_rows
from pass_ext.decoding.drafting.step import Candidates
from pass_ext.decoding.planning.hit_rates import HitRates
from pass_ext.decoding.planning.step_times import StepTimes
from pass_ext.tree import Tree

_REMEMBERED = 0.9  # of a worth, from step to step
_RETURN = 0.02  # a worth that no slots confirm goes back to what hit rates say
_PRICED_ROWS = 8  # further rows of a step, or one for each request
_LAG = 8.0  # tokens
_IDLE = 7  # steps behind one for which no slots paid
_MOST_DRAFTED = 24  # steps one behind the other
_MOST_DISTURBANCE = 1.3  # seconds of one step / the expected ones


class SharedRows:
    """The rows of one generation's steps.

    Args:
        times: the planned seconds of the target's calls.
        texts: of the requests. They grow with every step.
        tree: the most candidates of a request.
        slots: the most slots behind a node.
        deepest: the deepest row below a root.
        hit_rates: of the slots.
    """

    def __init__(
        self,
        times: StepTimes,
        texts: Sequence[Sequence[int]],
        tree: Tree,
        slots: int,
        deepest: int,
        hit_rates: HitRates,
    ) -> None:
        self._times, self._texts, self._tree = times, texts, tree
        self._slots, self._deepest = slots, deepest
        self._none = (1.0, *[0.0] * (tree.num_nodes - 1))
        self._room = self._slots_within(deepest + slots + 1)
        self._seconds = batch_seconds(times, 1 << max(map(len, texts)).bit_length())
        self._chances, self._pace = Chances(tree.max_depth), Pace()
        self._expected = [1.0]
        for level in hit_rates[:slots]:
            self._expected.append(self._expected[-1] * max(level))
        self._worth: list[list[float] | None] = [None] * len(texts)
        self._drafts: Mapping[int, tuple[Sequence[int], Sequence[float]]] = {}
        self._begun: float | None = None
        self._took: float | None = None  # seconds of the last step, until it is counted
        self._requests, self._rows = 0, 0
        self._idle = 0  # further steps for which nothing is chosen
        self._unbroken = 0  # drafted steps since the last plain one
        self._longest = 0  # tokens that the slowest text has left
        self._cost = 0.0  # seconds of the last step if it was drafted, in plain ones
        self._drafted = 0.0  # those of the last drafted one

    @property
    def begins_with_slots(self) -> bool:
        """True if slots behind the prompts are expected to pay."""
        requests = len(self._texts)
        offers = {b: Offer(self._tree.parents, self._none, (), self._room) for b in range(requests)}
        self._appraise(offers)
        shares = share_rows(list(offers.values()), lambda rows: self._seconds.at(rows, requests))
        return self._knows_plain(requests) and any(rows.slots for rows in shares)

    def begin(self, rows: int) -> None:
        """Counts the step before and starts the clock of a step. rows: of the call just made, with what a grammar forced."""
        if self._took is not None:
            self._time(rows, self._took)
        self._begun, self._took = time.perf_counter(), None

    def choose(
        self,
        levels: Sequence[int],
        remaining: Sequence[int],
        drafts: Mapping[int, tuple[Sequence[int], Sequence[float]]],
    ) -> list[Candidates | None]:
        """The candidates and slots of each request; None: its root alone.

        Args:
            levels: how deep candidates may be.
            remaining: tokens that each request still has to write; 0: it has ended.
            drafts: for requests with slots behind their roots: the tokens of nodes 1, 2, … (-1: none), and the slots'
                probabilities of them.
        """
        self._count(max(remaining))
        left = {b: tokens for b, tokens in enumerate(remaining) if tokens}
        requests = self._requests = len(left)
        if self._idle and not drafts:  # choosing takes the host about 1 % of a step
            self._idle, self._rows, self._drafts = self._idle - 1, requests, {}
            return [None] * len(remaining)
        offers = {b: self._offer(levels[b], *drafts.get(b, ((), ()))) for b in left}
        lags = {b: math.exp((tokens - self._longest) / _LAG) for b, tokens in left.items()}
        usual = sum(lags.values()) / max(1, requests)
        for b, lag in lags.items():
            offers[b] = offers[b]._replace(weight=0.5 + 0.5 * lag / usual)
        self._drafts = {b: (drafts[b][0], offers[b].chances) for b in offers if b in drafts}
        self._appraise(offers)
        shares = [Rows()] * requests
        # The seconds of plain steps come first, and now and then: without them nothing tells whether drafting pays.
        may_draft = self._knows_plain(requests) and self._unbroken < _MOST_DRAFTED
        if may_draft and self._pace.may_draft(plain=1.0, step=self._drafted):
            shares = share_rows(list(offers.values()), lambda rows: self._seconds.at(rows, requests))
        self._rows = sum(len(rows.nodes) + sum(rows.slots.values()) for rows in shares)
        self._idle = _IDLE if self._rows == requests and not drafts else 0
        chosen: list[Candidates | None] = [None] * len(remaining)
        for b, rows in zip(offers, shares, strict=True):
            if len(rows.nodes) > 1 or rows.slots:
                tree, groups = _pruned(self._tree, tuple(rows.nodes), tuple(sorted(rows.slots.items())))
                tokens = drafts[b][0] if b in drafts else ()
                chosen[b] = Candidates(tree, [tokens[node - 1] for node in rows.nodes[1:]], groups=groups)
        return chosen

    def learn(self, gained: Sequence[int]) -> None:
        """Counts a step, by the tokens that it gave each request."""
        if self._begun is None:  # the call on the prompts
            return
        seconds, self._begun = time.perf_counter() - self._begun, None
        if not self._requests:
            return
        for b, (tokens, chances) in self._drafts.items():
            if gained[b]:
                self._confirm(tokens, chances, self._texts[b][-gained[b] :])
        self._took = seconds

    def _time(self, rows: int, seconds: float) -> None:
        """Counts the seconds of the last step, whose call had so many rows."""
        # A moment's disturbance is no fault of drafting, and plain steps have such moments too.
        is_plain = self._rows == self._requests
        expected = self._seconds.at(rows, self._requests)
        self._seconds.add(rows, self._requests, seconds, is_plain=is_plain)
        plain = self._seconds.usual_plain(self._requests)
        self._unbroken = 0 if is_plain else self._unbroken + 1
        if not is_plain:
            self._drafted = min(seconds, max(_MOST_DISTURBANCE * expected, plain)) / plain
        self._cost = 0.0 if is_plain else self._drafted

    def _knows_plain(self, requests: int) -> bool:
        """True if the seconds of a plain step are known: those of one request are planned."""
        return requests == 1 or self._seconds.knows_plain

    def _count(self, longest: int) -> None:
        """Counts the step behind which so many tokens are left to the slowest text."""
        if self._rows:
            self._pace.add(self._longest - longest, self._cost, plain=1.0)
        self._longest = longest

    def _offer(self, levels: int, tokens: Sequence[int], probabilities: Sequence[float]) -> Offer:
        """What a request with these tokens may take."""
        tree = self._tree
        room = self._room if levels > self._deepest + 1 else self._slots_within(levels)
        if not tokens or levels < 1:
            return Offer(tree.parents, self._none, (), room)
        chances = list(self._none)
        for node in range(tree.num_nodes):
            below = [child for child in tree.children(node) if tokens[child - 1] >= 0]
            if below and tree.depths[node] < levels:
                values = self._chances.of(tree.depths[node] + 1, [probabilities[child - 1] for child in below])
                for child, chance in zip(below, values, strict=True):
                    chances[child] = chance
        return Offer(tree.parents, chances, (), room)

    def _slots_within(self, levels: int) -> tuple[int, ...]:
        """The most slots behind each node, where candidates may be so deep: further ones would foresee nothing."""
        return tuple(max(0, min(self._slots, self._deepest - depth, levels - 1 - depth)) for depth in self._tree.depths)

    def _appraise(self, offers: dict[int, Offer]) -> None:
        """Fills in what slots are worth."""
        requests = len(offers)
        further = max(_PRICED_ROWS, requests)
        row = (self._times.at(requests + further) - self._times.at(requests)) / further
        price = requests * row / self._seconds.at(requests, requests) if requests else 0.0
        usual = [max(0.0, share - price) for share in self._expected[1:]]
        for b, offer in offers.items():
            worth = self._worth[b]
            if worth is None:
                worth = self._worth[b] = list(usual)
            if b in self._drafts:
                gains = [0.0] * len(worth)
                reach = [1.0] * len(offer.parents)
                for node in range(1, len(reach)):
                    reach[node] = reach[offer.parents[node]] * offer.chances[node]
                    gains[self._tree.depths[node] - 1] += max(0.0, reach[node] - price)
                worth[:] = [_REMEMBERED * old + (1 - _REMEMBERED) * new for old, new in zip(worth, gains, strict=True)]
            else:
                worth[:] = [old + _RETURN * (new - old) for old, new in zip(worth, usual, strict=True)]
            offers[b] = offer._replace(worth=tuple(worth))

    def _confirm(self, tokens: Sequence[int], chances: Sequence[float], text: Sequence[int]) -> None:
        """Learns from the tokens behind a root which of its candidates were right."""
        node = 0
        for depth, token in enumerate(text, 1):
            children = [child for child in self._tree.children(node) if chances[child]]
            if not children:
                return
            self._chances.learn(depth, chances[children[0]], tokens[children[0] - 1] == token)
            right = [child for child in children if tokens[child - 1] == token]
            if not right:
                return
            node = right[0]


@lru_cache(maxsize=4096)
def _pruned(
    tree: Tree, nodes: tuple[int, ...], slots: tuple[tuple[int, int], ...]
) -> tuple[Tree, tuple[tuple[int, int], ...]]:
    """The tree of these nodes, in ascending order, and the slots behind them by their new numbers."""
    place = {node: index for index, node in enumerate(nodes)}
    return Tree([place.get(tree.parents[node], -1) for node in nodes]), tuple((place[n], count) for n, count in slots)
