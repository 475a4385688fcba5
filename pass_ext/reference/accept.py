"""``accept_tree`` and ``accept_chain`` in plain PyTorch: every rule in its textbook form.

p is the target's distribution at a node, q the distribution its children were drawn from, (x)+ = max(x, 0),
norm(x) = x / sum(x), u uniform in [0, 1) and fresh for each child or leaf, K the number of children:

    coupled    the token at a node is argmax(p / E), E the noise of seed and position; go on at the first child with it
    rejection  child x: accept iff u < p(x) / q(x), else p <- norm((p - q)+), q <- norm(q without x); none: y ~ p
    rejection_with_replacement    the same, q stays
    kseq       beta(rho) = sum min(p / rho, q), p_acc = 1 - (1 - beta)^K; the smallest rho in [1, K] with p_acc <= rho beta;
               accept iff rho u q(x) < p(x); none: y ~ norm((p - min(p / rho, q) p_acc / beta)+)
    traversal  w(root) = 1, w(x) = min(1, w p(x) / q(x)); the first leaf in depth-first order: accept its whole path iff
               u < w, y ~ p there; else delete it, and at its parent, with S = sum (w p - q)+:
               p <- norm((w p - q)+), q <- norm(q without x), w <- S / (S + 1 - w); go on with the next leaf
    block      traversal on a chain, which is block verification
    coupled_inverse    coupled, but the token is the least v with F(v) > u, F the sums of p in the order of ids and u one number
               for seed and position
    adaptive_rejection    rejection, but accept iff u < p(x) / q(x) + alpha (1 - max p), p before any rejection
    typical    accept iff p(x) > min(threshold, alpha exp(-H(p))); the longest accepted path, then y ~ p
    joint      w(root) = 1, w(x) = w p(x) / q(x); the longest path that ends with w > threshold, then y ~ p

At temperature 0 every rule is greedy verification: the token at a node is the arg-max. A child whose token has q = 0, at first
or after rejections, is a fixed proposal: q is 1 at its token. All children of a node with draft row -1 are fixed proposals too.
(If there is a draft row, kseq ignores a child with q = 0.) The rules ignore a child whose token is not in the vocabulary, nodes
deeper than max_depth, children from a draft row that is no distribution, and all drafts if the parents are no tree. If a node's
target row is no distribution, the walk ends at its parent, and the node's token is the last one.

The rules take coins and draws from a `Chance`: the random numbers of noise.py, or a test that enumerates every outcome.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pass_ext.reference.common.distribution import BAD_TREE, Distribution, is_greedy, process
from pass_ext.reference.common.noise import Purpose, coin, exponentials, words

MAX_TREE_NODES = 1024  # in one request
RULES = {
    "coupled": "exact",
    "rejection": "exact",
    "rejection_with_replacement": "exact",
    "block": "exact",
    "traversal": "exact",
    "kseq": "exact",
    "typical": "approximate",
    "coupled_inverse": "exact",
    "adaptive_rejection": "approximate",
    "joint": "approximate",
}
BOUNDS = {"typical": (0.09, 0.3), "adaptive_rejection": (0.0, 0.3), "joint": (0.5, 0.0)}
"""threshold and alpha, if none are given; 0 for the other rules."""


class Accepted(NamedTuple):
    """emitted int64 and path int32 [B, max_depth + 1], -1 after the end; num_accepted and status int32 [B];
    margin fp64 [B]: about the smallest relative change of a probability that could change the result."""

    emitted: Tensor
    path: Tensor
    num_accepted: Tensor
    status: Tensor
    margin: Tensor


# ---- chance ----


class Chance(Protocol):
    """Supplies coins and draws. `size` is how much a relative error of the probabilities grows in the compared numbers."""

    def coin(self, node: int, bound: float, size: float) -> bool:
        """u < bound, for the node's u, uniform in [0, 1)."""

    def draw(self, weights: Tensor, sizes: Tensor, purpose: Purpose, depth: int) -> int:
        """A token with probability weights / sum(weights)."""

    def near(self, margin: float) -> None:
        """Records the margin of a decision made elsewhere."""


class PhiloxChance:
    """The random numbers of noise.py for one request. `margin` is the smallest margin of its decisions."""

    def __init__(self, seed: int, position: int) -> None:
        self.seed, self.position, self.margin = seed, position, math.inf

    def coin(self, node: int, bound: float, size: float) -> bool:
        u = coin(self.seed, self.position, node)
        self.near(abs(u - bound) / size if size > 0.0 else math.inf)
        return u < bound

    def draw(self, weights: Tensor, sizes: Tensor, purpose: Purpose, depth: int) -> int:
        if purpose == Purpose.inverse:
            return self.invert(weights, depth)
        noise = exponentials(self.seed, self.position + depth, purpose, len(weights))
        scores, changes = weights / noise, sizes / noise
        token = int(scores.argmax())
        losers = (torch.arange(len(weights)) != token) & (sizes > 0.0)
        margins = (scores[token] - scores[losers]) / (changes[token] + changes[losers])
        self.near(min([math.inf, *margins.tolist()]))
        return token

    def invert(self, weights: Tensor, depth: int) -> int:
        """The least v with F(v) > u. A relative change d of the weights moves a border F by at most 2 d F."""
        borders = weights.cumsum(0) / weights.sum()
        high, low, _, _ = words(self.seed, self.position + depth, Purpose.inverse, 0, 0)
        u = (high * 2**32 + low) * 2.0**-64
        token = int((borders > u).int().argmax())
        for border in (borders[token - 1] if token else torch.zeros(()), borders[token]):
            if 0.0 < border < 1.0:
                self.near(float(abs(u - border) / (2.0 * border)))
        return token

    def near(self, margin: float) -> None:
        self.margin = min(self.margin, margin)


# ---- one request ----


class Request(Protocol):
    """A tree of drafts and the distributions at its nodes."""

    parents: list[int]
    max_depth: int
    vocabulary: int

    def token(self, node: int) -> int: ...

    def target(self, node: int) -> Distribution: ...

    def draft(self, node: int) -> Distribution | None:
        """The distribution that the node's children were drawn from; None if they are fixed proposals."""


class BadDraftRow(Exception):
    """A node names a draft row that does not exist."""


def is_tree(parents: list[int], rule: str) -> bool:
    """True if the root comes first and parents before children; for block, if the tree is also a chain."""
    if len(parents) > MAX_TREE_NODES or parents[0] != -1:
        return False
    chain_only = rule == "block"
    return all(0 <= p < i and (p == i - 1 or not chain_only) for i, p in enumerate(parents) if i > 0)


def residual(p: Tensor, q: Tensor, weight: float = 1.0) -> tuple[Tensor, float]:
    """norm((w p - q)+), and the sum before normalising."""
    rest = (weight * p - q).clamp(min=0.0)
    total = float(rest.sum())
    return (rest / total if total > 0.0 else rest), total


def without(q: Tensor, token: int) -> Tensor:
    """norm(q without the token); zero if nothing is left."""
    rest = q.index_fill(0, torch.tensor(token), 0.0)
    total = float(rest.sum())
    return rest / total if total > 0.0 else rest


UNKNOWN = Distribution(torch.zeros(0), 0, math.inf)  # a leaf's target before it is needed


@dataclass
class Judge:
    """p, q and w at a node while its children are judged.

    `size`: in floats p(v) is off by some ulp of size(v). It exceeds p(v) if p is the remainder of a difference.
    """

    node: int
    depth: int
    target: Distribution
    children: Iterator[int]  # not judged yet
    q: Tensor | None = None
    weight: float = 1.0
    weight_size: float = 1.0
    changed: bool = False  # a child was rejected

    def __post_init__(self) -> None:
        self.p = self.size = self.target.probs

    def q_at(self, token: int) -> Tensor:
        """q; for a fixed proposal, 1 at its token and 0 elsewhere."""
        if self.q is not None and self.q[token] > 0.0:
            return self.q
        return torch.zeros_like(self.p).index_fill_(0, torch.tensor(token), 1.0)

    def ratio(self, token: int) -> tuple[float, float]:
        """p / q at a token, and the size of its error."""
        p, size, q = float(self.p[token]), float(self.size[token]), float(self.q_at(token)[token])
        return p / q, (p + size) / q

    def inherit(self, parent: "Judge", token: int) -> None:
        """w <- min(1, w p(x) / q(x)), with w, p and q of the parent and this node's token x"""
        ratio, size = parent.ratio(token)
        weight = parent.weight * ratio
        self.weight = min(1.0, weight)
        self.weight_size = (parent.weight * size + parent.weight_size * ratio) / max(1.0, weight)

    def reject(self, token: int, replaced: bool = False) -> None:
        """p <- norm((w p - q)+), q <- norm(q without the token) unless `replaced`, w <- S / (S + 1 - w)"""
        if self.weight <= 0.0:
            return
        q, w = self.q_at(token), self.weight
        size = self.weight_size * self.p + w * self.size + q
        p, total = residual(self.p, q, w)
        self.changed = True
        if q is self.q and not replaced:
            self.q = without(q, token)
        self.p = p
        if total > 0.0:
            self.size = (size + p * size.sum()) / total
        if w < 1.0:
            rest = total + 1.0 - w
            self.weight = total / rest
            self.weight_size = self.weight + ((1.0 - w) * float(size.sum()) + total * self.weight_size) / rest**2


class Walk:
    """Runs a rule on one request. run() returns the last accepted node and the token after it; `status` collects bits."""

    def __init__(
        self,
        request: Request,
        chance: Chance,
        rule: str,
        greedy: bool = False,
        threshold: float | None = None,
        alpha: float | None = None,
    ) -> None:
        self.request, self.chance, self.rule, self.greedy = request, chance, rule, greedy
        bounds = BOUNDS.get(rule, (0.0, 0.0))
        self.threshold = bounds[0] if threshold is None else threshold
        self.alpha = bounds[1] if alpha is None else alpha
        self.status = 0

    def run(self) -> tuple[int, int]:
        if self.greedy or self.rule in ("coupled", "coupled_inverse"):
            return self.walk_coupled()
        if self.rule in ("traversal", "block"):
            return self.walk_traversal()
        if self.rule == "typical":
            return self.walk_typical()
        if self.rule == "joint":
            return self.walk_joint()
        return self.walk_down()

    # -- what the rules share --

    def children(self, node: int, depth: int) -> Iterator[int]:
        """The children of a node at `depth` that the rules judge, in order."""
        if depth < self.request.max_depth:
            for i in range(node + 1, len(self.request.parents)):
                if self.request.parents[i] == node and 0 <= self.request.token(i) < self.request.vocabulary:
                    yield i

    def target(self, node: int) -> Distribution:
        distribution = self.request.target(node)
        self.status |= distribution.status
        self.chance.near(distribution.margin)
        return distribution

    def open(self, node: int, depth: int) -> Judge:
        judge = Judge(node, depth, self.target(node), iter(()))
        if judge.target.status != 0 or next(self.children(node, depth), None) is None:
            return judge
        try:
            draft = self.request.draft(node)
        except BadDraftRow:
            self.status |= BAD_TREE
            return judge
        if draft is not None:
            self.status |= draft.status
            self.chance.near(draft.margin)
            if draft.status != 0:
                return judge
            judge.q = draft.probs
        judge.children = self.children(node, depth)
        return judge

    def draw(self, judge: Judge, rejected: bool) -> int:
        """y ~ p; if rounding left p zero, y ~ the target's distribution."""
        purpose = Purpose.residual if rejected else Purpose.bonus
        if not judge.p.any():
            return self.chance.draw(judge.target.probs, judge.target.probs, purpose, judge.depth)
        return self.chance.draw(judge.p, judge.size, purpose, judge.depth)

    def stop_before(self, node: int) -> tuple[int, int]:
        """The result if the row of `node` is no distribution: its parent, and its own token as the last one."""
        return (0, -1) if node == 0 else (self.request.parents[node], self.request.token(node))

    # -- the rules --

    def walk_coupled(self) -> tuple[int, int]:
        node, depth = 0, 0
        purpose = Purpose.inverse if self.rule == "coupled_inverse" else Purpose.coupled
        while True:
            distribution = self.target(node)
            if distribution.status != 0:
                return self.stop_before(node)
            token = (
                int(distribution.probs.argmax())
                if self.greedy
                else self.chance.draw(distribution.probs, distribution.probs, purpose, depth)
            )
            child = next((i for i in self.children(node, depth) if self.request.token(i) == token), None)
            if child is None:
                return node, token
            node, depth = child, depth + 1

    def walk_down(self) -> tuple[int, int]:
        node, depth = 0, 0
        while True:
            judge = self.open(node, depth)
            if judge.target.status != 0:
                return self.stop_before(node)
            judge_all = self.judge_kseq if self.rule == "kseq" and judge.q is not None else self.judge_in_turn
            accepted, judged = judge_all(judge)
            if accepted is None:
                return node, self.draw(judge, rejected=judged)
            node, depth = accepted, depth + 1

    def judge_in_turn(self, judge: Judge) -> tuple[int | None, bool]:
        """The accepted child, and whether any child was judged. If none is accepted, the next token is drawn from judge.p."""
        judged, tolerance, size_of_tolerance = False, 0.0, 0.0
        if self.rule == "adaptive_rejection":
            most = float(judge.p.max())
            tolerance, size_of_tolerance = self.alpha * (1.0 - most), self.alpha * most
        for child in judge.children:
            judged, token = True, self.request.token(child)
            ratio, size = judge.ratio(token)
            # A token that the target cannot give stays impossible: there the chance jumps from 0 to the tolerance.
            if tolerance > 0.0 and judge.changed and size > ratio:
                self.chance.near(ratio / (size - ratio))
            if ratio > 0.0 and self.chance.coin(child, ratio + tolerance, size + size_of_tolerance):
                return child, True
            judge.reject(token, replaced=self.rule == "rejection_with_replacement")
        return None, judged

    def judge_kseq(self, judge: Judge) -> tuple[int | None, bool]:
        """``judge_in_turn`` for K-SEQ."""
        children, p, q = list(judge.children), judge.p, judge.q
        assert q is not None
        drawn = [i for i in children if q[self.request.token(i)] > 0.0]
        if drawn:
            rho = self.choose_rho(p, q, len(drawn))
            for child in drawn:
                ratio, size = judge.ratio(self.request.token(child))
                if self.chance.coin(child, ratio / rho, size / rho):
                    return child, True
            overlap = torch.minimum(p / rho, q)
            beta = float(overlap.sum())
            taken = overlap * (accepted_by_any(beta, len(drawn)) / beta if beta > 0.0 else 0.0)
            judge.p, total = residual(p, taken)
            judge.size = (p + taken + 2.0 * judge.p) / total if total > 0.0 else p
        return None, len(children) > 0

    def choose_rho(self, p: Tensor, q: Tensor, count: int) -> float:
        """The smallest candidate rho with p_acc <= rho beta. Any such rho is exact; the smallest accepts most. Three passes
        narrow it to (K - 1) / 448: the first tries 7 of the 8 borders of 7 equal parts of [1, K] (K always meets the
        condition), each other pass the 7 inner borders of 8 equal parts of the remaining interval."""
        if count == 1:
            return 1.0
        low, high = 1.0, float(count)
        for attempt in range(3):
            candidates = [low + (high - low) * (i / 7.0 if attempt == 0 else (i + 1) / 8.0) for i in range(7)]
            for i, rho in enumerate(candidates):
                beta = float(torch.minimum(p / rho, q).sum())
                accepted = accepted_by_any(beta, count)
                if beta > 0.0:
                    self.chance.near(abs(accepted - rho * beta) / (accepted + rho * beta))
                if accepted <= rho * beta:
                    high = rho
                    if attempt == 0 and i == 0:
                        return rho
                    break
                low = rho
        return high

    def walk_traversal(self) -> tuple[int, int]:
        trail = [self.open(0, 0)]  # the nodes from the root to the current one
        while True:
            judge = trail[-1]
            child = next(judge.children, None)
            if child is not None:
                # A leaf's row is needed only if its coin accepts it. Below a weight of 0 no node is ever accepted.
                depth, weight = len(trail), judge.weight * judge.ratio(self.request.token(child))[0]
                is_leaf = weight <= 0.0 or next(self.children(child, depth), None) is None
                trail.append(Judge(child, depth, UNKNOWN, iter(())) if is_leaf else self.open(child, depth))
                trail[-1].inherit(judge, self.request.token(child))
            elif judge.node == 0 or self.chance.coin(judge.node, judge.weight, judge.weight_size):
                if judge.target is UNKNOWN:
                    judge = self.open(judge.node, judge.depth)
                if judge.target.status != 0:
                    return self.stop_before(judge.node)
                return judge.node, self.draw(judge, rejected=judge.changed)
            else:
                trail.pop()
                trail[-1].reject(self.request.token(judge.node))

    def walk_typical(self) -> tuple[int, int]:
        depths = {0: 0}  # depths of accepted nodes; parents come before their children
        for node in range(len(self.request.parents)):
            if node not in depths or not (children := list(self.children(node, depths[node]))):
                continue
            status = self.status
            distribution = self.target(node)
            if distribution.status != 0:
                self.status = status  # it matters where the path ends at it
                continue
            entropy = -float(torch.special.xlogy(distribution.probs, distribution.probs).sum())
            bound = min(self.threshold, self.alpha * math.exp(-entropy))
            for child in children:
                p = float(distribution.probs[self.request.token(child)])
                self.chance.near(abs(p - bound) / (p + bound))
                if p > bound:
                    depths[child] = depths[node] + 1
        best = max(depths, key=lambda node: (depths[node], -node))
        distribution = self.target(best)
        if distribution.status != 0:
            return self.stop_before(best)
        return best, self.chance.draw(distribution.probs, distribution.probs, Purpose.bonus, depths[best])

    def walk_joint(self) -> tuple[int, int]:
        weights, depths = {0: 1.0}, {0: 0}  # of nodes that a path can go on at
        for node in range(len(self.request.parents)):
            if node not in weights or next(self.children(node, depths[node]), None) is None:
                continue
            status = self.status
            judge = self.open(node, depths[node])
            if judge.target.status != 0:
                self.status = status  # it matters where the path ends at it
            for child in judge.children:
                weight = weights[node] * judge.ratio(self.request.token(child))[0]
                if weight > 0.0:
                    weights[child], depths[child] = weight, depths[node] + 1
                    # A product of 2 d numbers, each off by a relative change, is off by 2 d such changes.
                    self.chance.near(abs(weight - self.threshold) / (2 * depths[child] * weight))
        accepted = [node for node, weight in weights.items() if node == 0 or weight > self.threshold]
        best = max(accepted, key=lambda node: (depths[node], -node))
        distribution = self.target(best)
        if distribution.status != 0:
            return self.stop_before(best)
        return best, self.chance.draw(distribution.probs, distribution.probs, Purpose.bonus, depths[best])


def accepted_by_any(beta: float, count: int) -> float:
    """1 - (1 - beta)^K"""
    return 1.0 - (1.0 - beta) ** count


# ---- tensors ----

Parameters = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


@dataclass
class TensorRequest:
    """Request b of accept_tree's arguments."""

    parents: list[int]
    max_depth: int
    vocabulary: int
    tokens: list[int]
    target_logits: Tensor
    allowed: Tensor | None
    draft_rows: list[int]
    draft_logits: Tensor | None
    draft_allowed: Tensor | None
    target_parameters: Parameters
    draft_parameters: Parameters

    def token(self, node: int) -> int:
        return self.tokens[node]

    def target(self, node: int) -> Distribution:
        return process(
            self.target_logits[node], None if self.allowed is None else self.allowed[node], *self.target_parameters
        )

    def draft(self, node: int) -> Distribution | None:
        row = self.draft_rows[node]
        if self.draft_logits is None or row == -1:
            return None
        if not 0 <= row < len(self.draft_logits):
            raise BadDraftRow
        return process(
            self.draft_logits[row],
            None if self.draft_allowed is None else self.draft_allowed[row],
            *self.draft_parameters,
        )


def accept_tree(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor | None,
    cu_nodes: Tensor,
    max_depth: int,
    *,
    rule: str = "coupled",
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    draft_top_k: Tensor | None = None,
    draft_top_p: Tensor | None = None,
    draft_min_p: Tensor | None = None,
    allowed: Tensor | None = None,
    draft_allowed: Tensor | None = None,
    seeds: Tensor,
    positions: Tensor,
    threshold: float | None = None,
    alpha: float | None = None,
) -> Accepted:
    """target_logits [N, V]; tokens, parents [N]; cu_nodes [B + 1]; draft_logits [R, V]; draft_rows [N], None: row i for node
    i; parameters, seeds and positions [B], draft parameters of None are the target's; allowed int32 words [N, ceil(V / 32)]
    for target rows, draft_allowed [R, ceil(V / 32)] for draft rows. parents None: chains."""
    requests, (nodes, vocabulary) = len(cu_nodes) - 1, target_logits.shape
    emitted = torch.full((requests, max_depth + 1), -1)
    path = torch.full((requests, max_depth + 1), -1, dtype=torch.int32)
    num_accepted, status = torch.zeros(requests, dtype=torch.int32), torch.zeros(requests, dtype=torch.int32)
    margin = torch.full((requests,), math.inf, dtype=torch.float64)
    rows = torch.arange(nodes) if draft_rows is None else draft_rows

    def parameters_of(
        b: int, heat: Tensor | None, k: Tensor | None, p: Tensor | None, least: Tensor | None
    ) -> Parameters:
        return (
            0.0 if heat is None else float(heat[b]),
            0 if k is None else int(k[b]),
            1.0 if p is None else float(p[b]),
            0.0 if least is None else float(least[b]),
        )

    def draft_or_target(draft: Tensor | None, target: Tensor | None) -> Tensor | None:
        return target if draft is None else draft

    bounds = [0, *cu_nodes.tolist(), nodes]
    if bounds != sorted(bounds):  # rows cannot be assigned to requests
        return Accepted(emitted, path, num_accepted, status + BAD_TREE, margin)
    for b in range(requests):
        first, last = int(cu_nodes[b]), int(cu_nodes[b + 1])
        if first == last:
            continue
        tree_parents = [*range(-1, last - first - 1)] if parents is None else [int(i) for i in parents[first:last]]
        if not is_tree(tree_parents, rule):
            status[b], tree_parents = BAD_TREE, [-1]
        target_parameters = parameters_of(b, temperature, top_k, top_p, min_p)
        request = TensorRequest(
            tree_parents,
            max_depth,
            vocabulary,
            tokens[first:last].tolist(),
            target_logits[first:last],
            None if allowed is None else allowed[first:last],
            rows[first:last].tolist(),
            draft_logits,
            draft_allowed,
            target_parameters,
            parameters_of(
                b,
                draft_or_target(draft_temperature, temperature),
                draft_or_target(draft_top_k, top_k),
                draft_or_target(draft_top_p, top_p),
                draft_or_target(draft_min_p, min_p),
            ),
        )
        chance = PhiloxChance(int(seeds[b]), int(positions[b]))
        walk = Walk(request, chance, rule, is_greedy(target_parameters[0]), threshold, alpha)
        node, token = walk.run()
        status[b] |= walk.status
        margin[b] = chance.margin
        accepted = [node]
        while accepted[0] != 0:
            accepted.insert(0, tree_parents[accepted[0]])
        num_accepted[b] = len(accepted) - 1
        path[b, : len(accepted)] = torch.tensor(accepted)
        emitted[b, : len(accepted)] = torch.tensor([*(request.tokens[i] for i in accepted[1:]), token])
    return Accepted(emitted, path, num_accepted, status, margin)


def accept_chain(
    target_logits: Tensor,
    draft_tokens: Tensor,
    *,
    cu_nodes: Tensor | None = None,
    draft_logits: Tensor | None = None,
    allowed: Tensor | None = None,
    draft_allowed: Tensor | None = None,
    **shared: Any,
) -> Accepted:
    """accept_tree of chains: target_logits [B, K + 1, V], draft_tokens [B, K], draft_logits [B, K, V]; allowed and
    draft_allowed have a row of words for each row of their logits; `shared`: the other arguments of accept_tree. With cu_nodes
    [B + 1] the chains are packed, and all is as in accept_tree."""
    if cu_nodes is not None:
        packed: dict[str, Any] = dict(draft_logits=draft_logits, allowed=allowed, draft_allowed=draft_allowed)
        return accept_tree(target_logits, draft_tokens, None, cu_nodes, **packed, **shared)
    requests, count, vocabulary = target_logits.shape
    draft_rows = torch.full((requests, count), -1)
    if draft_logits is not None:
        draft_rows[:, :-1] = torch.arange(requests * (count - 1)).view(requests, count - 1)
    return accept_tree(
        target_logits.reshape(-1, vocabulary),
        torch.cat([torch.full((requests, 1), -1), draft_tokens], 1).flatten(),
        torch.arange(-1, count - 1).repeat(requests),
        torch.arange(requests + 1) * count,
        count - 1,
        draft_logits=None if draft_logits is None else draft_logits.reshape(-1, vocabulary),
        draft_rows=draft_rows.flatten(),
        allowed=None if allowed is None else allowed.reshape(requests * count, -1),
        draft_allowed=None if draft_allowed is None else draft_allowed.reshape(requests * (count - 1), -1),
        **shared,
    )
