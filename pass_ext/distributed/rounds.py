"""The rounds of a step on shards, known before it begins: they depend on the rule, on which filters there are, and on the
tree's shape, never on logits.

A tree needs sums over what is left of p after a child was rejected. The sums behind the j-th child of a node (j from 0) are
known one round after those behind the child before it; a node can be judged when its parent has come to it:

    t(root) = 0,   t(child j of n) = t(n) + j,   sums behind child j of n: round t(n) + j + 1

Rule "rejection" needs them behind all children but the last, which the draw follows. "traversal" and "block" need them behind
all children but the root's last.
"""

from collections.abc import Sequence
from itertools import pairwise

from pass_ext.ops.shard import SELECT_ROUNDS


def rounds_of(rule: str, *, greedy: bool, top_k: bool, top_p: bool, residuals: int) -> list[str]:
    """The rounds before "finish"; ``greedy``: every request is."""
    rounds = ["peaks"]
    if greedy:
        return rounds
    if top_k:
        rounds += ["counts"] * SELECT_ROUNDS
    if top_p:
        rounds += ["top_p"] + ["nucleus"] * SELECT_ROUNDS
    if rule != "coupled":
        rounds += ["masses"] + ["residuals"] * residuals
    return [*rounds, "races"]


def residual_rounds(rule: str, parents: Sequence[int], cu_nodes: Sequence[int]) -> int:
    """The rounds of residual sums that packed trees need, if all children were drawn from a draft model."""
    if rule == "coupled":
        return 0
    most = 0
    for first, last in pairwise(cu_nodes):
        tree = parents[max(first, 0) : max(last, 0)]
        counts, reached = [0] * len(tree), [0] * len(tree)
        needed: list[list[int]] = [[] for _ in tree]
        for node, parent in enumerate(tree):
            if not 0 <= parent < node:  # the root, or no tree at all
                continue
            number = counts[parent]
            counts[parent] += 1
            reached[node] = reached[parent] + number
            needed[parent].append(reached[node] + 1)
        for node, rounds in enumerate(needed):
            needs_last = rule in ("traversal", "block") and node > 0
            most = max([most, *(rounds if needs_last else rounds[:-1])])
    return most


def residual_rounds_of_chain(rule: str, length: int) -> int:
    """The same for chains of ``length`` drafts."""
    return 1 if rule in ("traversal", "block") and length > 1 else 0
