"""``next_tree_`` in plain PyTorch: request by request, node by node. The race: draft.py.

A shape that is chosen: g look-ahead slots after the root, h after the node at depth d of the best chain, which has first
children alone, and the k first candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pass_ext.reference.common.distribution import is_greedy, log_process
from pass_ext.reference.common.noise import Purpose, exponentials
from pass_ext.reference.draft import draft_sample
from pass_ext.reference.recall import recall


def next_tree_(
    rows: Tensor,
    parents: Tensor,
    lengths: Tensor,
    prefix_lens: Tensor,
    report: Tensor,
    *,
    limits: Tensor,
    emitted: Tensor,
    path: Tensor,
    num_accepted: Tensor,
    status: Tensor,
    rates: Tensor | None = None,
    costs: Tensor | None = None,
    offered: Tensor | None = None,
    scores: Tensor | None = None,
    first: int = 0,
    left: Tensor | None = None,
    right: Tensor | None = None,
    text: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
) -> None:
    """Each request moves past its emitted tokens, and keeps its rows, or gets those that promise the most tokens."""
    ids, tokens, positions = rows
    for b in range(len(lengths)):
        accepted, limit = int(num_accepted[b]), int(limits[b])
        at_limit, last = int(lengths[b]) >= limit, -1
        drafted = int((tokens[b, 1:] >= 0).sum())
        root = int(ids[b, 0])
        if not at_limit and accepted >= 0 and emitted[b, accepted] >= 0:
            root, last = int(emitted[b, accepted]), int(path[b, accepted])
            lengths[b] += accepted + 1
            _write(text, b, int(lengths[b]), emitted[b, : accepted + 1])
        place, levels = int(lengths[b]) - 1, limit - int(lengths[b]) - 1
        slots = _slots_after(ids[b].tolist(), parents[b].tolist(), last, None if rates is None else len(rates))
        offering = [row - first for row in slots]
        if offered is None or (offering and offering[0] < 0):
            offering = []
        offering = [row for row in offering if offered is not None and row < offered.shape[1]]
        law = {
            name: None if value is None else value[b : b + 1]
            for name, value in dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p).items()
        }
        seed = torch.zeros(1, dtype=torch.int64) if seeds is None else seeds[b : b + 1]

        def below(
            path: list[int], b: int = b, place: int = place, offering: list[int] = offering,
            law: dict[str, Tensor | None] = law, seed: Tensor = seed,
        ) -> list[tuple[int, float]]:  # fmt: skip
            """The candidates below a path, the root first, the best first, and their chances."""
            assert offered is not None and scores is not None
            depth = len(path) - 1
            known = offered[b, offering[depth]], scores[b, offering[depth]]
            before = None if text is None else text[b, : place + 1]
            return _ranked(*known, path, left, right, before, law, seed, place + depth + 1)

        deepest = min(len(offering), levels)
        if rates is None:
            laid = _kept(root, ids[b].tolist(), parents[b].tolist(), len(offering) if levels > 0 else 0, below)
            used, nodes = len(laid), 1 + sum(row.token >= 0 for row in laid[1:])
        else:
            most = rows.shape[2]
            candidates = _likeliest(root, most, deepest, below)
            of_rows = None if costs is None else costs.tolist()
            shape = _best_shape(candidates, rates.tolist(), of_rows, most, levels)
            laid, used, nodes = _laid(candidates, shape, most), shape.rows, 1 + shape.candidates
        report[b] = -1
        report[b, :5] = torch.tensor([-1 if at_limit else accepted, int(status[b]), drafted, used, nodes])
        report[b, 5 : 5 + emitted.shape[1]] = emitted[b]
        prefix_lens[b] = place
        written = torch.tensor(laid)
        ids[b], tokens[b], parents[b], positions[b] = written[:, 0], written[:, 1], written[:, 2], place + written[:, 3]


class _Row(NamedTuple):
    id: int
    token: int
    parent: int
    depth: int


def _kept(
    root: int, ids: list[int], parents: list[int], levels: int, below: Callable[[list[int]], list[tuple[int, float]]]
) -> list[_Row]:
    """The rows that a request has, whose nodes get the tokens below their parents, the best first."""
    laid = [_Row(root, root, -1, 0)]
    for id, parent in zip(ids[1:], parents[1:], strict=True):
        laid.append(_Row(min(id, 0), -1, parent, laid[parent].depth + 1))
    for number in range(len(laid)):
        children = [row for row in range(number + 1, len(laid)) if parents[row] == number and ids[row] >= 0]
        _, token, _, depth = laid[number]
        if not children or token < 0 or depth >= levels:
            continue
        path = _path([row.token for row in laid], parents, number)
        for row, (token, _) in zip(children, below(path), strict=False):
            laid[row] = _Row(token, token, number, depth + 1)
    return laid


def _laid(nodes: Sequence[_Node], shape: _Shape, most: int) -> list[_Row]:
    """The rows of a shape, and those that are not in use."""
    chosen = range(1 + shape.candidates)
    chain = [node for node in _chain(nodes) if node in chosen]  # first, in the order of plain decoding
    order = [*chain, *(node for node in chosen if node not in chain)]
    laid = [
        _Row(nodes[i].token, nodes[i].token, order.index(nodes[i].parent) if i else -1, nodes[i].depth) for i in order
    ]
    for above, depth, count in ((0, 0, shape.after_root), (shape.depth, shape.depth, shape.after)):
        for slot in range(count):
            laid.append(_Row(-1 - slot, -1, above if slot == 0 else len(laid) - 1, depth + 1 + slot))
    return laid + [_Row(0, -1, 0, 1)] * (most - len(laid))


class _Node(NamedTuple):
    token: int
    parent: int
    depth: int
    rank: int
    reach: float


class _Shape(NamedTuple):
    after_root: int
    after: int
    depth: int
    candidates: int

    @property
    def rows(self) -> int:
        return 1 + self.after_root + self.after + self.candidates


def _slots_after(ids: list[int], parents: list[int], node: int, most: int | None) -> list[int]:
    """The rows of the slots that predict what follows a node. most: None: the node's own alone."""
    passed = 0
    while 0 <= node < len(ids):  # a path may lead anywhere
        starts = [row for row in range(node + 1, len(ids)) if ids[row] == -1 and parents[row] == node]
        if starts:
            group = starts[:1]
            while len(group) < (most or len(ids)) and group[-1] + 1 < len(ids):
                row = group[-1] + 1
                if ids[row] != -1 - len(group) or parents[row] != row - 1:
                    break
                group.append(row)
            return group[passed:]
        node, passed = -1 if most is None else parents[node], passed + 1
    return []


def _ranked(
    offered: Tensor, scores: Tensor, path: list[int], left: Tensor | None, right: Tensor | None, text: Tensor | None,
    law: dict[str, Tensor | None], seed: Tensor, position: int,
) -> list[tuple[int, float]]:  # fmt: skip
    """Tokens of one slot below a parent, the best first, and their chances: softmax among the offered, at a temperature of the
    flattened scores of the race, times the offered tokens' mass."""
    scores = scores.where(~scores.isnan(), -math.inf)
    before = path[-1]
    if before < 0 or (left is not None and before >= len(left)) or not len(offered):
        return []
    scored = _scored(offered, scores, before, left, right)
    if text is not None:
        _recall(scored, text, path, offered)
    if not bool((scored > -math.inf).any()):
        return []
    mass = min(1.0, float(scores[scores > -math.inf].double().clamp(max=0).exp().sum()))
    heat = 0.0 if law["temperature"] is None else float(law["temperature"])
    raced = scored[0]
    if not is_greedy(heat):
        given = {name: value.item() for name, value in law.items() if value is not None}
        filters = int(given.get("top_k", 0)), given.get("top_p", 1.0), given.get("min_p", 0.0)
        raced = log_process(raced, None, heat, *filters).log_weights
        raced = (raced - exponentials(int(seed), position, Purpose.coupled, len(raced)).log()) / 1.5
    chances = (raced.softmax(0) * mass).clamp(max=1.0)
    drafts = draft_sample(scored, len(offered), mode="coupled", seeds=seed, positions=torch.tensor([position]), **law)
    return [(token, float(chances[token])) for token in drafts.tokens[0].tolist() if token >= 0]


def _likeliest(root: int, most: int, levels: int, below: Callable[[list[int]], list[tuple[int, float]]]) -> list[_Node]:
    """The root and the candidates of the largest reach, each after its parent and better siblings."""
    nodes, children = [_Node(root, -1, 0, 0, 1.0)], [below([root]) if levels > 0 and root >= 0 else []]
    taken = [0]
    while len(nodes) < most:
        open_nodes = [
            (nodes[parent].reach * children[parent][taken[parent]][1], -parent)
            for parent in range(len(nodes))
            if taken[parent] < len(children[parent])
        ]
        reach, parent = max(open_nodes, default=(0.0, 0))
        parent = -parent
        if _units(reach) < 2**8:  # a row must be worth 2^-10 tokens
            break
        token, depth = children[parent][taken[parent]][0], nodes[parent].depth + 1
        nodes.append(_Node(token, parent, depth, taken[parent], reach))
        taken[parent] += 1
        taken.append(0)
        path = _path([node.token for node in nodes], [node.parent for node in nodes], len(nodes) - 1)
        children.append(below(path) if depth < levels else [])
    return nodes


def _chain(nodes: Sequence[_Node]) -> list[int]:
    """The root and the first children of first children."""
    chain = [0]
    for number, node in enumerate(nodes):
        if number and node.parent == chain[-1] and node.rank == 0:
            chain.append(number)
    return chain


def _best_shape(
    nodes: Sequence[_Node], rates: list[float], costs: list[float] | None, most: int, levels: int
) -> _Shape:
    """The shape of the largest value; among equals the one with the fewest rows, then smaller g, h, d."""
    slots, chain = len(rates), _chain(nodes)
    found: list[tuple[int, int, int, int, int, _Shape]] = []
    for g in range(slots + 1):
        for h in range(slots + 1):
            for d in range(1, len(chain)) if h else [0]:
                if (g and g >= levels) or (h and d + h >= levels):
                    continue
                value = (_units(1) + _worth(rates, 0, g)) << 20
                for k, node in enumerate(nodes[: max(0, most - g - h)]):
                    if k:
                        gain = _after(nodes, chain, rates, k, g, h, d) - _after(
                            nodes, chain, rates, node.parent, g, h, d
                        )
                        value += _units(node.reach) * (_units(1) + gain)
                    if k >= chain[d]:
                        shape = _Shape(g, h, d, k)
                        cost = (shape.rows << 30) + (0 if costs is None else _fixed_point(costs[shape.rows - 1]))
                        found.append((value - cost, -shape.rows, -g, -h, -d, shape))
    return max(found)[-1]


def _after(
    nodes: Sequence[_Node], chain: Sequence[int], rates: list[float], number: int, g: int, h: int, d: int
) -> int:
    """W of the slots that predict what follows a node."""
    depth, at = nodes[number].depth, number
    while at > 0:
        if h and at == chain[d]:
            return _worth(rates, depth - d, h)
        at = nodes[at].parent
    return _worth(rates, depth, g)


def _worth(rates: list[float], passed: int, slots: int) -> int:
    """W(passed, slots), in whole numbers of 2^-20."""
    total, right = 0.0, 0.8
    for rate in rates[passed:slots]:
        right *= min(max(rate, 0.0), 1.0) if rate == rate else 0.0
        total += right
        right *= 0.6
    return _units(total)


def _units(value: float) -> int:
    return int(value * 2**20 + 0.5)


def _fixed_point(cost: float) -> int:
    """A cost in whole numbers of 2^-40; NaN: 0."""
    return int(min(max(cost, -(2.0**20)), 2.0**20) * 2**40) if cost == cost else 0


def _scored(offered: Tensor, scores: Tensor, before: int, left: Tensor | None, right: Tensor | None) -> Tensor:
    """``[1, V]``: the offered tokens' scores with transitions, -inf for all others."""
    size = len(right) if right is not None else 1 + max([0, *offered.tolist()])
    row = torch.full((1, size), -math.inf, dtype=torch.float64)
    there = (offered >= 0) & (offered < size)
    known = offered[there]
    row[0, known] = scores[there].double()
    if left is not None and right is not None:
        row[0, known] += right[known].double() @ left[before].double()
    return row


def _write(text: Tensor | None, b: int, length: int, emitted: Tensor) -> None:
    """Writes the emitted tokens, the last ones of a text of this length."""
    if text is not None:
        text[b, length - len(emitted) : length] = emitted


def _path(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """The tokens from the root to a node."""
    path = [tokens[node]]
    while node > 0:
        node = parents[node]
        path.append(tokens[node])
    return path[::-1]


def _recall(scored: Tensor, text: Tensor, path: Sequence[int], offered: Tensor) -> None:
    """Raises the scores of the offered tokens by what the text, with the root, recalls after a path."""
    known = text.tolist()
    there = offered[(offered >= 0) & (offered < scored.shape[1])]
    scored[0, there] += recall(known, [*known[:-1], *path], there.tolist()).double()
