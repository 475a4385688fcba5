"""``Tree``: the shape of one request's candidates on the host: the parent of each node, and its look-ahead slots.
``pack_trees``: packs the trees of a batch into the tensors that the ops take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pass_ext.ops.common.uploaded import sent
from pass_ext.ops.tree import tree_prepare

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_TREE_NODES = 1024  # in one request, for every op: kMaxTreeNodes of csrc/core/tree.h
_MOST_SHOWN = 24  # parents in a repr


class Tree:
    """An immutable tree of one request's candidate tokens. Row 0 is the root, the last committed token.

    ``parents``, ``depths``, ``visible``, ``positions``, ``path`` and ``len`` cover all rows: the nodes, and after them the
    look-ahead slots of ``with_lookahead``. ``children``, ``leaves``, ``max_depth`` and ``branching`` cover nodes only.

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
        """A chain of n drafted tokens: the root and n nodes below it, n + 1 rows."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ValueError(f"Tree.chain: n must be the number of nodes below the root, 0 or more, got {n!r}")
        if n >= MAX_TREE_NODES:
            raise ValueError(f"a tree has at most {MAX_TREE_NODES} rows, got {n + 1}")
        return cls(range(-1, n))

    @classmethod
    def from_branching(cls, branching: Sequence[int]) -> Tree:
        """A tree whose nodes on each level have equally many children, numbered level by level.

        ``(4, 2, 2)``: a root with 4 children, each with 2, each of these with 2; 29 rows.
        """
        parents, level = [-1], range(1)
        if not isinstance(branching, (list, tuple)):
            raise TypeError(f"branching must be a list of the children per node of each level, got {branching!r}")
        for width in branching:
            if isinstance(width, bool) or not isinstance(width, int) or width < 1:
                raise ValueError(f"branching must be the children per node of each level, 1 or more, got {branching!r}")
            if len(parents) + len(level) * width > MAX_TREE_NODES:
                raise ValueError(f"a tree has at most {MAX_TREE_NODES} rows, branching {tuple(branching)} gives more")
            parents += [parent for parent in level for _ in range(width)]
            level = range(level.stop, len(parents))
        return cls(parents)

    @classmethod
    def from_mask(cls, mask: Tensor | Sequence[Sequence[int]]) -> Tree:
        """The tree whose nodes see each other as a mask says, as other libraries give it: a node sees itself and its ancestors.

        Args:
            mask: ``[n, n]``, bool or 0 and 1: row i sees column j. Further dimensions in front may have size 1. A parent comes
                before its children. Of a mask that covers the prefix too, give the last n columns.

        Example:

            >>> pass_ext.Tree.from_mask([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]])
            Tree([-1, 0, 0, 1])
        """
        bits = _checked_mask(mask)
        if len(bits) > MAX_TREE_NODES:
            raise ValueError(f"a tree has at most {MAX_TREE_NODES} rows, got a mask of {len(bits)}")
        # The ancestors of a node come in the order of their depths, so its parent is the last one.
        before = bits.tril(-1)
        places = torch.arange(len(bits), device=bits.device)
        tree = cls([-1, *before[1:].int().mul(places + 1).amax(1).sub(1).clamp(min=0).tolist()])
        wrong = (tree_bits(tree.visible, len(tree)) != bits.cpu()).any(1).nonzero().flatten().tolist()
        if wrong:
            row = wrong[0]
            raise ValueError(
                f"Tree.from_mask: mask must let each row see itself and its ancestors alone, {list(tree.path(row))} for row "
                f"{row} below node {tree.parents[row]}, got {bits[row].nonzero().flatten().tolist()}"
            )
        return tree

    @classmethod
    def from_links(cls, next_token: Sequence[int] | Tensor, next_sibling: Sequence[int] | Tensor) -> Tree:
        """The tree of links from each node to its first child and to its next sibling, as SGLang's ``retrieve_next_token`` and
        ``retrieve_next_sibling`` give it.

        Args:
            next_token, next_sibling: ``[n]`` integers, a later node each; -1 for none.

        Example:

            >>> pass_ext.Tree.from_links([1, 3, -1, -1], [-1, 2, -1, -1])
            Tree([-1, 0, 0, 1])
        """
        children, siblings = _checked_links("next_token", next_token), _checked_links("next_sibling", next_sibling)
        if len(children) != len(siblings):
            raise ValueError(
                f"Tree.from_links: next_sibling must have a link for each of the {len(children)} nodes, got {len(siblings)}"
            )
        parents: list[int | None] = [None] * len(children)
        for node, (child, sibling) in enumerate(zip(children, siblings, strict=True)):
            if node > 0 and parents[node] is None:
                raise ValueError(f"Tree.from_links: node {node} must have a link to it from an earlier node, got none")
            for name, link, parent in (("next_token", child, node), ("next_sibling", sibling, parents[node])):
                if link == -1:
                    continue
                if not node < link < len(children) or parents[link] is not None or parent is None:
                    raise ValueError(
                        f"Tree.from_links: {name} must name a later node that no other link names, got {link} at node {node}"
                    )
                parents[link] = parent
        return cls([-1, *(parent for parent in parents[1:] if parent is not None)])

    # ---- all rows ----

    @property
    def parents(self) -> tuple[int, ...]:
        """The parent of each row, -1 for the root. A look-ahead slot's parent is its node, or the slot before it."""
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
        """``[n, ceil(n / 64)]`` int64 on the CPU: bit j of row i is set if j is i or one of its ancestors. Do not write to
        it: slices of this tree share its memory."""
        parents = torch.tensor(self._parents, dtype=torch.int32)
        return tree_prepare(parents, torch.tensor([0, len(self)], dtype=torch.int32), len(self))[0]

    def positions(self, prefix_len: int) -> Tensor:
        """``[n]`` int64: each row's text position after a prefix of ``prefix_len`` tokens."""
        return torch.tensor(self.depths) + prefix_len

    def path(self, row: int) -> tuple[int, ...]:
        """The rows from the root to ``row``, both included."""
        path = [self._checked_row(row)]
        while path[-1] != 0:
            path.append(self._parents[path[-1]])
        return tuple(reversed(path))

    # ---- nodes ----

    @property
    def num_nodes(self) -> int:
        """The number of nodes: the root and the candidates, without look-ahead slots."""
        return self._num_nodes

    def children(self, node: int) -> tuple[int, ...]:
        """The nodes right below ``node``."""
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
        """The argument of ``from_branching`` that gives these nodes; None if there is none."""
        widths = [self.depths[: self._num_nodes].count(depth) for depth in range(self.max_depth + 1)]
        branching = tuple(below // above for above, below in pairwise(widths))
        if self._num_nodes != sum(accumulate((1, *branching), int.__mul__)):
            return None
        return branching if Tree.from_branching(branching)._parents == self._parents[: self._num_nodes] else None

    # ---- other trees ----

    def slice(self, levels: int) -> Tree:
        """The tree's first ``levels`` levels below the root; the tree itself if it has no more.

        ``visible`` of the slice is the top left of this tree's, in the same memory. Nodes must be numbered level by level, as
        ``breadth_first`` does. A tree with look-ahead slots cannot be sliced: slice it before ``with_lookahead``.
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
        rows = sum(depth <= levels for depth in self.depths)
        tree = Tree._of(self._parents[:rows])
        tree.__dict__["visible"] = self.visible[:rows, : -(-rows // 64)]
        return tree

    def breadth_first(self) -> tuple[Tree, tuple[int, ...]]:
        """The same tree numbered level by level, siblings together, and the old number of each new node."""
        if self.has_lookahead:
            raise ValueError("a tree with look-ahead slots cannot be renumbered: do that first, then with_lookahead")
        order = [0]
        for node in order:
            order += self._children[node]
        place = {node: index for index, node in enumerate(order)}
        return Tree._of((-1, *(place[self._parents[node]] for node in order[1:]))), tuple(order)

    def with_lookahead(self, groups: int | Mapping[int, int] | Sequence[int]) -> Tree:
        """This tree with groups of look-ahead slots after its nodes, for a step that verifies and drafts in one call.

        A group of L slots below node g is a chain: slot i sees the prefix, g's path and slots 0 to i of its group, and has
        position i + 1 after g. Nodes see no slots. Groups come in the order of their nodes.

        Args:
            groups: slots per node: one number for all nodes, a sequence with a number for each, or a mapping from nodes to
                numbers, 0 for nodes without an entry.
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
        """True if any row is a look-ahead slot."""
        return self._num_nodes < len(self)

    @property
    def slots(self) -> tuple[int, ...]:
        """The look-ahead slot of each row; -1 for nodes."""
        return self._slots

    def group_rows(self, node: int) -> range:
        """The rows of a node's look-ahead slots, slot 0 first; empty if it has none."""
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
        """The ids for ``lookahead_embed``, ``[n]`` int64: the nodes' tokens, the root's first, then -1 - i for each slot i."""
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

    # ---- comparing, printing, drawing ----

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tree):
            return NotImplemented
        return self._parents == other._parents and self._slots == other._slots

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
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
        """The tree as text: an only child beside its parent, siblings below each other, ``+3`` for a group of 3 slots."""
        lines: list[str] = []
        pending = [(0, "", "")]  # node, text before it, text before the lines below it
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
        """Draws the tree and, beside it, its mask: each row sees the coloured columns. Needs matplotlib.

        Draws on ``ax``, or on a new figure of suitable size; returns the axes (``tree.draw().figure.savefig(…)``).
        """
        from pass_ext.tree.picture import draw_tree

        return draw_tree(self.parents, self.slots, ax)


class _PackedTensors(NamedTuple):
    parents: Tensor
    """``[N]`` int32: each row's parent as an index in its request, -1 for roots."""
    cu_nodes: Tensor
    """``[B + 1]`` int32; request b owns rows ``cu_nodes[b]:cu_nodes[b + 1]``."""
    max_nodes: int
    """The number of rows of the largest tree; at least 1."""
    visible: Tensor
    """``[N, ceil(max_nodes / 64)]`` int64: bit j of row i is set if row i sees row j of its request."""
    depths: Tensor
    """``[N]`` int32: edges from the root."""


class PackedTrees(_PackedTensors):
    """B trees with N rows in all, back to back: the arguments of ``attention_tree``, ``tree_mask`` and ``accept_tree``."""

    @cached_property
    def owners(self) -> Tensor:
        """``[N]`` int64: the request of each row; of rows after the last one's, the last one."""
        # Not repeat_interleave, whose threads, one per request, spin beside those of a model's layers.
        rows = torch.arange(len(self.parents), dtype=torch.int32, device=self.parents.device)
        return torch.bucketize(rows, self.cu_nodes[1:], right=True).clamp(max=len(self.cu_nodes) - 2)

    @cached_property
    def has_rows(self) -> Tensor:
        """``[B]`` int32: 1 for a request with rows, 0 for a padded one."""
        return (self.cu_nodes.diff() > 0).int()

    @cached_property
    def rows_of_nodes(self) -> Tensor:
        """``[B, max_nodes]`` int64: the row of each node of each request; beyond its last one, some other row."""
        nodes = torch.arange(self.max_nodes, device=self.parents.device)
        return (self.cu_nodes[:-1, None] + nodes).clamp(max=len(self.parents) - 1)

    def slices(self) -> list[slice]:
        """The rows of each request; the host waits for a GPU."""
        return [slice(first, last) for first, last in pairwise(self.cu_nodes.tolist())]

    def seen(self, rows: slice | Tensor = slice(None)) -> Tensor:
        """bool ``[n, max_nodes]``: the rows of its request that each of these rows sees."""
        return tree_bits(self.visible[rows], self.max_nodes)


def pack_trees(
    trees: Tree | Sequence[Tree | Sequence[int] | None], device: torch.device | str | None = None
) -> PackedTrees:
    """Packs one tree per request into the tensors that the ops take; computes on the host and copies to the device once.

    Args:
        trees: for each request a Tree or its parents; None or an empty sequence is a padded request. Or one Tree: that of the
            only request.
        device: the device of the tensors; None is the CPU.

    Example:

        >>> trees = pass_ext.pack_trees([pass_ext.Tree.from_branching((2,)), pass_ext.Tree.chain(1)])
        >>> trees.parents, trees.cu_nodes
        (tensor([-1,  0,  0, -1,  0], dtype=torch.int32), tensor([0, 3, 5], dtype=torch.int32))
    """
    try:
        device = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f'pack_trees: device must be a device of torch such as "cuda", got {device!r}') from None
    if isinstance(trees, Tree):
        trees = [trees]
    if not isinstance(trees, (list, tuple)) or any(isinstance(tree, (int, float)) for tree in trees):
        raise TypeError(f"pack_trees: trees must be a list, one entry for each request, got {trees!r}")
    rows = [tree.parents if isinstance(tree, Tree) else _parents_of_entry(tree) for tree in trees]
    bounds = list(accumulate(map(len, rows), initial=0))
    max_nodes = max([1, *map(len, rows)])
    parents = torch.tensor([parent for tree_parents in rows for parent in tree_parents], dtype=torch.int32)
    cu_nodes = torch.tensor(bounds, dtype=torch.int32)
    visible, depths = tree_prepare(parents, cu_nodes, max_nodes)
    if device.type == "cpu":
        return PackedTrees(parents, cu_nodes, max_nodes, visible, depths)
    integers = torch.cat([visible.flatten().view(torch.int32), parents, depths, cu_nodes])
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"pack_trees: device is {device}, but torch {torch.__version__} sees no GPU here")
    integers = sent(integers, device)
    words, *sizes = 2 * visible.numel(), len(parents), len(depths), len(cu_nodes)
    bits, parents, depths, cu_nodes = integers.split([words, *sizes])
    return PackedTrees(parents, cu_nodes, max_nodes, bits.view(torch.int64).view(visible.shape), depths)


def _parents_of_entry(parents: Sequence[int] | None) -> tuple[int, ...]:
    return () if parents is None or (isinstance(parents, (list, tuple)) and not parents) else _checked_parents(parents)


def _checked_parents(parents: Iterable[int] | Tensor) -> tuple[int, ...]:
    if isinstance(parents, Tensor):
        if parents.dim() != 1 or parents.is_floating_point() or parents.dtype == torch.bool:
            raise ValueError(f"parents must be one row of integers, got {parents.dtype} {list(parents.shape)}")
        parents = parents.tolist()
    if isinstance(parents, (str, bytes)) or not isinstance(parents, Iterable):
        raise TypeError(f"parents must be a list of each node's parent, got {parents!r}")
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


def tree_bits(visible: Tensor, columns: int) -> Tensor:
    """bool ``[rows, columns]`` of the words of ``visible``."""
    places = torch.arange(columns, device=visible.device)
    return (visible[:, places // 64] >> places % 64 & 1).bool()


def _checked_mask(mask: Tensor | Sequence[Sequence[int]]) -> Tensor:
    try:
        bits = torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"Tree.from_mask: mask must be [n, n] numbers, got {mask!r}") from None
    while bits.dim() > 2 and bits.shape[0] == 1:
        bits = bits[0]
    if bits.dim() != 2 or bits.shape[0] != bits.shape[1] or not len(bits):
        raise ValueError(f"Tree.from_mask: mask must have shape [n, n], n at least 1, got {list(bits.shape)}")
    if bits.dtype != torch.bool and not bool(((bits == 0) | (bits == 1)).all()):
        raise ValueError(
            "Tree.from_mask: mask must be bool, or 0 and 1, got other numbers (an additive mask: give mask == 0)"
        )
    return bits.bool()


def _checked_links(name: str, links: Sequence[int] | Tensor) -> list[int]:
    try:
        tensor = torch.as_tensor(links)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"Tree.from_links: {name} must be [n] integers, got {links!r}") from None
    if tensor.dim() != 1 or not len(tensor) or tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise ValueError(
            f"Tree.from_links: {name} must be [n] integers, n at least 1, got {tensor.dtype} {list(tensor.shape)}"
        )
    numbers: list[int] = tensor.tolist()
    return numbers


def _checked_groups(groups: int | Mapping[int, int] | Sequence[int], nodes: int) -> list[int]:
    if isinstance(groups, Mapping):
        missing = [node for node in groups if node not in range(nodes)]
        if missing:
            raise ValueError(f"look-ahead groups belong to nodes 0 to {nodes - 1}, got node {missing[0]!r}")
        counts = [groups.get(node, 0) for node in range(nodes)]
    elif isinstance(groups, Sequence):
        counts = list(groups)
        if len(counts) != nodes:
            raise ValueError(f"look-ahead groups must be one number for each of the {nodes} nodes, got {len(counts)}")
    else:
        counts = [groups] * nodes
    for node, count in enumerate(counts):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"a group's number of look-ahead slots must be 0 or more, got {count!r} for node {node}")
    return counts
