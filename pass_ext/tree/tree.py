"""``Tree``: the shape of one request's candidates, decided on the host: who hangs below whom, and where look-ahead slots go.
``pack_trees``: the trees of a batch as the ops take them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pass_ext.ops.tree import tree_prepare

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_TREE_NODES = 1024  # of one request, in every op: kMaxTreeNodes of csrc/core/tree.h
_MOST_SHOWN = 24  # parents in a repr


class Tree:
    """An immutable tree of candidates. Row 0 is the root, the last committed token; the others hang below it.

    ``parents``, ``depths``, ``visible``, ``positions``, ``path`` and ``len`` speak of all rows: the nodes, and behind them the
    look-ahead slots of ``with_lookahead``. ``children``, ``leaves``, ``max_depth`` and ``branching`` speak of nodes only.

    Args:
        parents: the parent of each node, -1 for node 0 and an earlier node for the others; any sequence or tensor of ints.
    """

    def __init__(self, parents: Iterable[int] | Tensor) -> None:
        self._set(_checked_parents(parents))

    def _set(self, parents: tuple[int, ...], slots: tuple[int, ...] | None = None) -> None:
        self._parents = parents
        self._slots = slots or (-1,) * len(parents)
        self._num_nodes = self._slots.count(-1)

    @classmethod
    def _of(cls, parents: tuple[int, ...], slots: tuple[int, ...] | None = None) -> Tree:
        tree = cls.__new__(cls)
        tree._set(parents, slots)
        return tree

    @classmethod
    def chain(cls, n: int) -> Tree:
        """n drafted tokens one behind the other: the root and n nodes below it, n + 1 rows."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ValueError(f"a chain has a number of nodes below its root, 0 or more, got {n!r}")
        return cls(range(-1, n))

    @classmethod
    def from_branching(cls, branching: Sequence[int]) -> Tree:
        """``(4, 2, 2)``: a root with 4 children, each with 2, each with 2, numbered level by level; 29 rows."""
        parents, level = [-1], range(1)
        for width in branching:
            if isinstance(width, bool) or not isinstance(width, int) or width < 1:
                raise ValueError(f"branching must be children per node for each level, 1 or more, got {branching!r}")
            if len(parents) + len(level) * width > MAX_TREE_NODES:
                raise ValueError(f"a tree has at most {MAX_TREE_NODES} rows, branching {tuple(branching)} gives more")
            parents += [parent for parent in level for _ in range(width)]
            level = range(level.stop, len(parents))
        return cls(parents)

    # ---- all rows ----

    @property
    def parents(self) -> tuple[int, ...]:
        """The parent of each row, -1 for the root. A look-ahead slot hangs below its node, or below the slot before."""
        return self._parents

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Edges from the root to each row."""
        depths = [0]
        for parent in self._parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    def __len__(self) -> int:
        return len(self._parents)

    @cached_property
    def visible(self) -> Tensor:
        """``[n, ceil(n / 64)]`` int64 on the CPU: bit j of row i is set where j is i or one of its ancestors. Do not write to
        it: slices of this tree share it."""
        parents = torch.tensor(self._parents, dtype=torch.int32)
        return tree_prepare(parents, torch.tensor([0, len(self)], dtype=torch.int32), len(self))[0]

    def positions(self, prefix_len: int) -> Tensor:
        """``[n]`` int64: each row's text position behind a prefix of so many tokens."""
        return torch.tensor(self.depths) + prefix_len

    def path(self, row: int) -> tuple[int, ...]:
        """The rows from the root to this one, both included."""
        path = [self._checked_row(row)]
        while path[-1] != 0:
            path.append(self._parents[path[-1]])
        return tuple(reversed(path))

    # ---- nodes ----

    @property
    def num_nodes(self) -> int:
        """Rows that are no look-ahead slots: the root and the candidates."""
        return self._num_nodes

    def children(self, node: int) -> tuple[int, ...]:
        """The nodes right below this one."""
        return self._children[self._checked_row(node)]

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        children: list[list[int]] = [[] for _ in self._parents]
        for node in range(1, self._num_nodes):
            children[self._parents[node]].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """The nodes without children."""
        return tuple(node for node in range(self._num_nodes) if not self._children[node])

    @cached_property
    def max_depth(self) -> int:
        """Edges from the root to the deepest node: the most drafts that one step can accept."""
        return max(self.depths[: self._num_nodes])

    @cached_property
    def branching(self) -> tuple[int, ...] | None:
        """What ``from_branching`` makes these nodes from; None where there is no such thing."""
        widths = [self.depths[: self._num_nodes].count(depth) for depth in range(self.max_depth + 1)]
        branching = tuple(below // above for above, below in pairwise(widths))
        if self._num_nodes != sum(accumulate((1, *branching), int.__mul__)):
            return None
        return branching if Tree.from_branching(branching)._parents == self._parents[: self._num_nodes] else None

    # ---- other trees ----

    def slice(self, levels: int) -> Tree:
        """The tree of the first ``levels`` levels below the root; itself, where it has no more.

        Its ``visible`` is the top left of this tree's, in the same storage: nothing is computed again. Nodes must be numbered
        level by level (``breadth_first`` gives that). Slots come after: slice first, then ``with_lookahead``.
        """
        if isinstance(levels, bool) or not isinstance(levels, int) or levels < 0:
            raise ValueError(f"levels must be 0 or more, got {levels!r}")
        if self.has_lookahead:
            raise ValueError(
                "a tree with look-ahead slots cannot be sliced: slice it first, then give it look-ahead slots"
            )
        if any(above > below for above, below in pairwise(self.depths)):
            raise ValueError(
                "only a tree whose nodes are numbered level by level can be sliced: breadth_first() gives that"
            )
        if levels >= self.max_depth:
            return self
        kept = sum(depth <= levels for depth in self.depths)
        tree = Tree._of(self._parents[:kept])
        tree.__dict__["visible"] = self.visible[:kept, : -(-kept // 64)]
        return tree

    def breadth_first(self) -> tuple[Tree, tuple[int, ...]]:
        """The same tree numbered level by level, siblings together, and the former number of each of its nodes."""
        if self.has_lookahead:
            raise ValueError("a tree with look-ahead slots cannot be renumbered: do that first, then with_lookahead")
        order = [0]
        for node in order:
            order += self._children[node]
        place = {node: index for index, node in enumerate(order)}
        return Tree._of((-1, *(place[self._parents[node]] for node in order[1:]))), tuple(order)

    def with_lookahead(self, groups: int | Mapping[int, int] | Sequence[int]) -> Tree:
        """This tree with groups of look-ahead slots behind its nodes, for a step that verifies and drafts at once.

        A group of L slots below node g is a chain: slot i sees the prefix, g's path and slots 0 to i of its own group, and
        stands i + 1 positions behind g. Nodes see no slots. Groups follow each other in the order of their nodes.

        Args:
            groups: slots per group: a number for every node, or one for each node (a mapping may leave nodes out). 0: none.
        """
        if self.has_lookahead:
            raise ValueError("this tree has look-ahead slots already")
        parents, slots = list(self._parents), [-1] * len(self)
        for node, count in enumerate(_checked_groups(groups, len(self))):
            for slot in range(count):
                parents.append(node if slot == 0 else len(parents) - 1)
                slots.append(slot)
            if len(parents) > MAX_TREE_NODES:
                raise ValueError(f"a tree has at most {MAX_TREE_NODES} rows; these look-ahead slots make it more")
        return Tree._of(tuple(parents), tuple(slots))

    # ---- look-ahead slots ----

    @property
    def has_lookahead(self) -> bool:
        """Whether any row is a look-ahead slot."""
        return self._num_nodes < len(self)

    @property
    def slots(self) -> tuple[int, ...]:
        """For each row the look-ahead slot that it is; -1 for nodes."""
        return self._slots

    def group_rows(self, node: int) -> range:
        """The rows of a node's look-ahead slots, slot 0 first; empty where it has none."""
        if not 0 <= node < self._num_nodes:
            raise ValueError(f"node must be in [0, {self._num_nodes}), got {node}")
        return self._group_rows.get(node, range(0))

    @cached_property
    def _group_rows(self) -> dict[int, range]:
        firsts = [row for row in range(self._num_nodes, len(self)) if self._slots[row] == 0]
        return {
            self._parents[first]: range(first, last)
            for first, last in zip(firsts, [*firsts[1:], len(self)], strict=False)
        }

    def ids(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """``[n]`` int64, what ``lookahead_embed`` takes: the nodes' tokens, the root's first, then -1 - i for each slot i."""
        tokens = torch.as_tensor(tokens)
        if tokens.shape != (self._num_nodes,) or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(
                f"tokens must be {self._num_nodes} integers, one for each node, the root included, got {tokens.dtype} "
                f"{list(tokens.shape)}"
            )
        return torch.cat([tokens.long(), self._slot_ids.to(tokens.device)])

    @cached_property
    def _slot_ids(self) -> Tensor:
        return -1 - torch.tensor(self._slots[self._num_nodes :], dtype=torch.int64)

    def _checked_row(self, row: int) -> int:
        if not 0 <= row < len(self):
            raise ValueError(f"row must be in [0, {len(self)}), got {row}")
        return row

    # ---- as a value, and for people ----

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tree):
            return NotImplemented
        return self._parents == other._parents and self._slots == other._slots

    def __hash__(self) -> int:
        return hash((self._parents, self._slots))

    def __repr__(self) -> str:
        branching = self.branching
        if branching is not None and set(branching) <= {1}:
            text = f"Tree.chain({len(branching)})"
        elif branching is not None:
            text = f"Tree.from_branching({branching})"
        elif self._num_nodes <= _MOST_SHOWN:
            text = f"Tree({list(self._parents[: self._num_nodes])})"
        else:
            text = f"<Tree of {self._num_nodes} nodes, {self.max_depth} levels, {len(self.leaves)} leaves>"
        if not self.has_lookahead:
            return text
        groups = {node: len(rows) for node, rows in self._group_rows.items()}
        same = len(groups) == self._num_nodes and len(set(groups.values())) == 1
        return f"{text}.with_lookahead({groups[0] if same else groups})"

    def __str__(self) -> str:
        """The tree in characters: an only child beside its parent, siblings below each other, ``+3`` for a group of 3 slots."""
        lines: list[str] = []
        pending = [(0, "", "")]  # node, what stands before it, what stands before the lines below it
        while pending:
            node, line, indent = pending.pop()
            while True:
                group = len(self.group_rows(node))
                label = f"{node} +{group}" if group else f"{node}"
                line, indent = line + label, indent + " " * len(label)
                if len(self._children[node]) != 1:
                    break
                node, line, indent = self._children[node][0], line + " ─ ", indent + "   "
            lines.append(line)
            below = indent[: len(indent) - len(label)]
            for child in reversed(self._children[node]):
                last = child == self._children[node][-1]
                pending.append((child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  ")))
        return "\n".join(lines)

    def draw(self, ax: Axes | None = None) -> Axes:
        """A picture: the tree, and beside it the mask, who (row) sees whom (column). Needs matplotlib.

        Draws on ``ax``, or on a new figure of a fitting size; returns the axes (``tree.draw().figure.savefig(…)``).
        """
        from pass_ext.tree.picture import draw_tree

        return draw_tree(self.parents, self.slots, ax)


class PackedTrees(NamedTuple):
    """A batch of trees, back to back, as ``attention_tree``, ``tree_mask`` and ``accept_tree`` take them."""

    parents: Tensor
    """``[N]`` int32, indices in the request."""
    cu_nodes: Tensor
    """``[B + 1]`` int32; request b owns rows ``cu_nodes[b]:cu_nodes[b + 1]``."""
    max_nodes: int
    """Rows of the largest tree; at least 1."""
    visible: Tensor
    """``[N, ceil(max_nodes / 64)]`` int64."""
    depths: Tensor
    """``[N]`` int32."""


def pack_trees(trees: Sequence[Tree | Sequence[int] | None], device: torch.device | str | None = None) -> PackedTrees:
    """One tree per request as one batch, computed on the host, in one copy to the device.

    Args:
        trees: a Tree or its parents for each request; None, or no parents, is a padded request.
        device: where the tensors go; None is the CPU.
    """
    rows = [tree.parents if isinstance(tree, Tree) else _parents_of_entry(tree) for tree in trees]
    bounds = list(accumulate(map(len, rows), initial=0))
    max_nodes = max([1, *map(len, rows)])
    parents = torch.tensor([parent for own in rows for parent in own], dtype=torch.int32)
    cu_nodes = torch.tensor(bounds, dtype=torch.int32)
    visible, depths = tree_prepare(parents, cu_nodes, max_nodes)
    if device is None or torch.device(device).type == "cpu":
        return PackedTrees(parents, cu_nodes, max_nodes, visible, depths)
    integers = torch.cat([visible.flatten().view(torch.int32), parents, depths, cu_nodes]).to(device)
    words, *sizes = 2 * visible.numel(), len(parents), len(depths), len(cu_nodes)
    bits, parents, depths, cu_nodes = integers.split([words, *sizes])
    return PackedTrees(parents, cu_nodes, max_nodes, bits.view(torch.int64).view(visible.shape), depths)


def _parents_of_entry(parents: Sequence[int] | None) -> tuple[int, ...]:
    return () if parents is None or len(parents) == 0 else _checked_parents(parents)


def _checked_parents(parents: Iterable[int] | Tensor) -> tuple[int, ...]:
    if isinstance(parents, Tensor):
        if parents.dim() != 1 or parents.is_floating_point() or parents.dtype == torch.bool:
            raise ValueError(f"parents must be one row of integers, got {parents.dtype} {list(parents.shape)}")
        parents = parents.tolist()
    checked = tuple(parents)
    if not checked:
        raise ValueError("a tree has at least a root: parents [-1]")
    if len(checked) > MAX_TREE_NODES:
        raise ValueError(f"a tree has at most {MAX_TREE_NODES} rows, got {len(checked)} parents")
    for node, parent in enumerate(checked):
        if isinstance(parent, bool) or not isinstance(parent, int):
            raise ValueError(f"parents must be integers, got {parent!r} at node {node}")
        if node == 0 and parent != -1:
            raise ValueError(f"node 0 is the root, its parent must be -1, got {parent}")
        if node > 0 and not 0 <= parent < node:
            raise ValueError(f"the parent of node {node} must be an earlier node, 0 to {node - 1}, got {parent}")
    return checked


def _checked_groups(groups: int | Mapping[int, int] | Sequence[int], nodes: int) -> list[int]:
    if isinstance(groups, Mapping):
        strange = [node for node in groups if node not in range(nodes)]
        if strange:
            raise ValueError(f"look-ahead groups belong to nodes 0 to {nodes - 1}, got node {strange[0]!r}")
        counts = [groups.get(node, 0) for node in range(nodes)]
    elif isinstance(groups, Sequence):
        counts = list(groups)
        if len(counts) != nodes:
            raise ValueError(f"look-ahead groups must be one number for each of the {nodes} nodes, got {len(counts)}")
    else:
        counts = [groups] * nodes
    for node, count in enumerate(counts):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"a group has a number of look-ahead slots, 0 or more, got {count!r} for node {node}")
    return counts
