"""A guide's view of a tree of candidates: the nodes that it allows, and the chains that it forces behind them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pass_ext.decoding.requests.grammar.guide import Guide
from pass_ext.tree import Tree


def path_to(tree: Tree, tokens: Sequence[int], node: int) -> list[int]:
    """The drafted tokens on the way to a node. tokens: of each node, the root's first."""
    return [tokens[v] for v in tree.path(node)[1:]]


def allowed_nodes(guide: Guide, tree: Tree, tokens: Sequence[int], fixed_parents: Sequence[bool]) -> list[int]:
    """The nodes worth a row of the model's call: those that the guide allows, in their order.

    A child that was drawn from the draft's distribution stays even if it is forbidden, as a leaf: the rules that divide by that
    distribution must reject it, or the rest would be judged wrongly. Without a mask at drafting such children exist.

    Args:
        tokens: of each node, the root's first; -1: no token.
        fixed_parents: of each node: True: its children are fixed proposals.
    """
    allowed = {0}
    kept = [0]
    for node in range(1, tree.num_nodes):
        parent = tree.parents[node]
        if parent not in allowed or tokens[node] < 0:
            continue
        if guide.allows(path_to(tree, tokens, node)):
            allowed.add(node)
        elif fixed_parents[parent]:
            continue
        kept.append(node)
    return kept


def forced_chains(
    guide: Guide, tree: Tree, tokens: Sequence[int], nodes: Iterable[int], levels: int, most: int
) -> dict[int, list[int]]:
    """The tokens that the grammar forces behind these nodes, at most ``most`` in all, no deeper than ``levels``."""
    chains: dict[int, list[int]] = {}
    for node in nodes:
        path = path_to(tree, tokens, node)
        room = min(most, levels - len(path))
        if room <= 0 or not guide.allows(path):
            continue
        chain = guide.forced(path, room)
        if chain:
            chains[node] = chain
            most -= len(chain)
    return chains
