"""Tree and pack_trees: every property against its definition, refusals, sharing, and the picture."""

import re
import sys
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import ROOT
from support.steps import depths_of, random_tree

import pass_ext
from pass_ext import Tree, pack_trees, reference
from pass_ext.testing import assert_same_bits
from pass_ext.tree import MAX_TREE_NODES, PackedTrees

trees = st.builds(
    lambda nodes, seed: Tree(random_tree(nodes, torch.Generator().manual_seed(seed))),
    st.integers(1, 90),
    st.integers(0, 2**31),
)


def bits_of(visible):
    """visible as sets of columns."""
    seen = (visible.unsqueeze(-1) >> torch.arange(64) & 1).bool().flatten(1)
    return [set(row.nonzero().flatten().tolist()) for row in seen]


# ---- making a tree ----


KINDS = {"list": list, "tuple": tuple, "iter": iter, "int64": torch.tensor, "int32": lambda p: torch.tensor(p).int()}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_any_sequence_or_tensor_of_parents(kind):
    tree = Tree(kind([-1, 0, 0, 2]))
    assert tree.parents == (-1, 0, 0, 2) and tree.depths == (0, 1, 1, 2) and len(tree) == tree.num_nodes == 4


def test_a_chain_counts_the_nodes_below_its_root():
    assert Tree.chain(3).parents == (-1, 0, 1, 2)
    assert Tree.chain(3).max_depth == 3 and len(Tree.chain(0)) == 1
    assert len(Tree.chain(1023)) == 1024 and Tree.chain(1023).depths[-1] == 1023


def test_the_limit_of_nodes_is_the_kernels_and_the_specifications():
    header = ROOT / "csrc" / "core" / "tree.h"
    (limit,) = re.findall(r"constexpr int32_t kMaxTreeNodes = (\d+);", header.read_text())
    assert MAX_TREE_NODES == int(limit) == reference.accept.MAX_TREE_NODES == len(Tree.chain(MAX_TREE_NODES - 1))


def test_branching_is_numbered_level_by_level():
    tree = Tree.from_branching((2, 3, 1))
    assert tree.parents == (-1, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8)
    assert len(Tree.from_branching((4, 2, 2))) == 1 + 4 + 8 + 16
    assert Tree.from_branching(()) == Tree.chain(0) and Tree.from_branching([1, 1, 1]) == Tree.chain(3)


BAD_PARENTS = [
    ([], r"at least a root: parents \[-1\]"),
    ([0], "node 0 is the root, its parent must be -1, got 0"),
    ([-1, 1], "the parent of node 1 must be an earlier node, 0 to 0, got 1"),
    ([-1, 0, 5], "the parent of node 2 must be an earlier node, 0 to 1, got 5"),
    ([-1, 0, -1], "the parent of node 2 must be an earlier node, 0 to 1, got -1"),
    ([-1, 0.0], "parents must be integers, got 0.0 at node 1"),
    ([-1, False], "parents must be integers, got False at node 1"),
    (range(-1, 1024), "at most 1024 rows, got 1025 parents"),
    (torch.tensor([-1.0, 0.0]), r"one row of integers, got torch.float32 \[2\]"),
    (torch.tensor([[-1, 0]]), r"one row of integers, got torch.int64 \[1, 2\]"),
]


@pytest.mark.parametrize(("parents", "message"), BAD_PARENTS, ids=[m[:24] for _, m in BAD_PARENTS])
def test_bad_parents_are_refused_in_words(parents, message):
    with pytest.raises(ValueError, match=message):
        Tree(parents)


def test_bad_chains_and_branchings_are_refused_in_words():
    for bad in (-1, 2.0, True):
        with pytest.raises(ValueError, match=f"0 or more, got {bad!r}"):
            Tree.chain(bad)
    with pytest.raises(ValueError, match="at most 1024 rows"):
        Tree.chain(1024)
    with pytest.raises(ValueError, match=r"1 or more, got \(2, 0\)"):
        Tree.from_branching((2, 0))
    with pytest.raises(ValueError, match=r"at most 1024 rows, branching \(1000, 1000, 1000\)"):
        Tree.from_branching((1000, 1000, 1000))


@settings(max_examples=40, deadline=None)
@given(tree=trees)
def test_a_mask_gives_the_tree_back(tree):
    mask = torch.tensor([[column in tree.path(row) for column in range(len(tree))] for row in range(len(tree))])
    assert Tree.from_mask(mask) == Tree.from_mask(mask.tolist()) == Tree.from_mask(mask.float()[None, None]) == tree


@settings(max_examples=40, deadline=None)
@given(tree=trees)
def test_links_give_the_tree_back(tree):
    first, sibling = ([-1] * len(tree) for _ in range(2))
    for node in range(len(tree)):
        children = tree.children(node)
        first[node] = children[0] if children else -1
        for one, after in pairwise(children):
            sibling[one] = after
    assert Tree.from_links(first, sibling) == Tree.from_links(torch.tensor(first), torch.tensor(sibling).int()) == tree


BAD_MASKS = [
    ([[1, 1], [1, 1]], r"\[0\] for row 0 below node -1, got \[0, 1\]"),
    ([[1, 0], [0, 1]], r"\[0, 1\] for row 1 below node 0, got \[1\]"),
    ([[1, 0], [1, 0]], r"\[0, 1\] for row 1 below node 0, got \[0\]"),
    ([[1, 0, 0], [1, 1, 0], [0, 1, 1]], r"\[0, 1, 2\] for row 2 below node 1, got \[1, 2\]"),
    ([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]], r"\[0, 2, 3\] for row 3 .*, got \[0, 1, 2, 3\]"),
    ([[1, 1, 0], [1, 1, 0]], r"shape \[n, n\], n at least 1, got \[2, 3\]"),
    (torch.zeros(2, 1, 1), r"shape \[n, n\], n at least 1, got \[2, 1, 1\]"),
    (torch.zeros(0, 0), r"shape \[n, n\], n at least 1, got \[0, 0\]"),
    ([[0.0, -1e9], [0.0, 0.0]], "bool, or 0 and 1, got other numbers"),
    (torch.eye(1025), "at most 1024 rows, got a mask of 1025"),
]


@pytest.mark.parametrize(("mask", "message"), BAD_MASKS, ids=[m[:30] for _, m in BAD_MASKS])
def test_bad_masks_are_refused_in_words(mask, message):
    with pytest.raises(ValueError, match=message):
        Tree.from_mask(mask)


BAD_LINKS = [
    (([1, -1, -1], [-1, -1, -1]), "node 2 must have a link to it from an earlier node, got none"),
    (([1, 0, -1], [-1, 2, -1]), "next_token must name a later node that no other link names, got 0 at node 1"),
    (([1, 2, -1], [-1, 2, -1]), "next_sibling must name a later node that no other link names, got 2 at node 1"),
    (([-1, -1], [1, -1]), "next_sibling must name a later node that no other link names, got 1 at node 0"),
    (([1, 2], [-1, -1]), "next_token must name a later node that no other link names, got 2 at node 1"),
    (([1, -2], [-1, -1]), "next_token must name a later node that no other link names, got -2 at node 1"),
    (([1, -1], [-1]), "next_sibling must have a link for each of the 2 nodes, got 1"),
    (([], []), r"next_token must be \[n\] integers, n at least 1, got"),
    (([-1], [0.5]), r"next_sibling must be \[n\] integers, n at least 1, got torch.float32 \[1\]"),
]


@pytest.mark.parametrize(("links", "message"), BAD_LINKS, ids=[m[:40] for _, m in BAD_LINKS])
def test_bad_links_are_refused_in_words(links, message):
    with pytest.raises(ValueError, match=f"Tree.from_links: {message}"):
        Tree.from_links(*links)
    with pytest.raises(TypeError, match=r"Tree.from_mask: mask must be \[n, n\] numbers, got 'no mask'"):
        Tree.from_mask("no mask")


def test_it_is_a_value():
    tree = Tree([-1, 0, 0])
    assert tree == Tree((-1, 0, 0)) and hash(tree) == hash(Tree((-1, 0, 0))) and tree != Tree([-1, 0, 1])
    assert tree != tree.with_lookahead(1) and tree != (-1, 0, 0)
    assert tree.with_lookahead(1) != Tree(tree.with_lookahead(1).parents)  # the rows of the first tree are slots
    assert len({tree, Tree([-1, 0, 0]), tree.with_lookahead(1)}) == 2
    for name in ("parents", "slots", "num_nodes"):
        with pytest.raises(AttributeError):
            setattr(tree, name, ())


# ---- what follows from the parents ----


@settings(max_examples=40, deadline=None)
@given(tree=trees)
def test_every_property_is_what_its_name_says(tree):
    parents, n = tree.parents, len(tree)
    assert list(tree.depths) == depths_of(list(parents)) and tree.max_depth == max(tree.depths)
    assert [tree.children(i) for i in range(n)] == [
        tuple(j for j in range(n) if parents[j] == i and j > 0) for i in range(n)
    ]
    assert tree.leaves == tuple(i for i in range(n) if i not in parents)
    for row in range(n):
        path = tree.path(row)
        assert path[0] == 0 and path[-1] == row and all(parents[b] == a for a, b in pairwise(path))
    assert bits_of(tree.visible) == [set(tree.path(row)) for row in range(n)]
    assert tree.visible.shape == (n, -(-n // 64)) and tree.visible is tree.visible
    assert tree.positions(100).tolist() == [100 + depth for depth in tree.depths]
    assert tree.positions(0).dtype == torch.int64


@pytest.mark.parametrize("branching", [(), (1,), (4, 2, 2), (1, 3, 1), (3,), (2, 2, 2, 2)], ids=str)
def test_branching_is_found_again(branching):
    tree = Tree.from_branching(branching)
    assert tree.branching == branching == tree.with_lookahead(2).branching
    assert tree.max_depth == len(branching)


def test_other_trees_have_no_branching():
    for parents in ([-1, 0, 0, 1], [-1, 0, 0, 1, 2, 1], [-1, 0, 0, 2, 1], [-1, 0, 1, 0, 3], [-1, 0, 0, 1, 1]):
        assert Tree(parents).branching is None
    assert Tree([-1, 0, 0, 1, 2]).branching == (2, 1)


def test_rows_that_are_not_there_are_refused():
    tree = Tree.chain(2).with_lookahead({2: 1})
    for function in (tree.children, tree.path):
        for row in (-1, 4):
            with pytest.raises(ValueError, match=rf"row must be in \[0, 4\), got {row}"):
                function(row)
    with pytest.raises(ValueError, match=r"node must be in \[0, 3\), got 3"):
        tree.group_rows(3)


# ---- slices and order ----


@pytest.mark.parametrize("branching", [(4, 2, 2), (8, 4, 4), (2,) * 7], ids=str)
def test_a_slice_is_the_top_left_of_the_same_storage(branching):
    tree = Tree.from_branching(branching)
    sizes = list(accumulate(accumulate((1, *branching), int.__mul__)))
    for levels, size in enumerate(sizes):
        part = tree.slice(levels)
        assert part == Tree.from_branching(branching[:levels]) and len(part) == size
        assert part.visible.data_ptr() == tree.visible.data_ptr()
        assert part.visible.untyped_storage().data_ptr() == tree.visible.untyped_storage().data_ptr()
        assert torch.equal(part.visible, Tree(part.parents).visible)
        assert part.slice(0).visible.data_ptr() == tree.visible.data_ptr()
    assert tree.slice(len(branching)) is tree and tree.slice(99) is tree


def test_other_orders_and_trees_with_slots_cannot_be_sliced():
    with pytest.raises(ValueError, match=r"numbered level by level can be sliced: breadth_first\(\) gives that"):
        Tree([-1, 0, 1, 0]).slice(1)
    with pytest.raises(ValueError, match="levels must be 0 or more, got -1"):
        Tree.chain(2).slice(-1)
    with pytest.raises(ValueError, match="slice it first, then give it look-ahead slots"):
        Tree.chain(2).with_lookahead(1).slice(1)
    with pytest.raises(ValueError, match="do that first, then with_lookahead"):
        Tree.chain(2).with_lookahead(1).breadth_first()


@settings(max_examples=40, deadline=None)
@given(tree=trees)
def test_breadth_first_is_the_same_tree_level_by_level(tree):
    sorted_tree, order = tree.breadth_first()
    assert sorted(order) == list(range(len(tree))) and order[0] == 0
    for new, old in enumerate(order[1:], 1):
        assert order[sorted_tree.parents[new]] == tree.parents[old]
    assert list(sorted_tree.depths) == sorted(tree.depths)
    assert list(sorted_tree.parents) == sorted(sorted_tree.parents)  # siblings together, in the order of their parents
    again, same = sorted_tree.breadth_first()
    assert again == sorted_tree and same == tuple(range(len(tree)))
    for levels in range(tree.max_depth + 1):
        assert len(sorted_tree.slice(levels)) == sum(depth <= levels for depth in tree.depths)


# ---- look-ahead slots ----


@settings(max_examples=40, deadline=None)
@given(tree=trees, data=st.data())
def test_look_ahead_rows_see_their_node_its_path_and_their_own_group(tree, data):
    groups = data.draw(st.dictionaries(st.integers(0, len(tree) - 1), st.integers(0, 4), max_size=12))
    step = tree.with_lookahead(groups)
    assert step.num_nodes == len(tree) and len(step) == len(tree) + sum(groups.values())
    assert step.parents[: len(tree)] == tree.parents and step.slots[: len(tree)] == (-1,) * len(tree)
    seen, positions = bits_of(step.visible), step.positions(50).tolist()
    assert seen[: len(tree)] == bits_of(tree.visible)  # nodes see no slots
    next_row = len(tree)
    for node in range(len(tree)):
        rows = step.group_rows(node)
        assert (
            list(rows) == list(range(next_row, next_row + groups.get(node, 0))) or groups.get(node, 0) == len(rows) == 0
        )
        next_row += len(rows)
        for slot, row in enumerate(rows):
            assert step.slots[row] == slot
            assert seen[row] == set(tree.path(node)) | set(rows[: slot + 1])
            assert positions[row] == 50 + tree.depths[node] + slot + 1
    assert next_row == len(step)
    assert (step.max_depth, step.leaves) == (tree.max_depth, tree.leaves)
    assert all(step.children(node) == tree.children(node) for node in range(len(tree)))


def test_groups_in_every_form():
    tree = Tree([-1, 0, 0])
    assert tree.with_lookahead(2) == tree.with_lookahead([2, 2, 2]) == tree.with_lookahead({0: 2, 1: 2, 2: 2})
    assert tree.with_lookahead({1: 3}) == tree.with_lookahead((0, 3, 0))
    assert tree.with_lookahead({1: 3}).parents == (-1, 0, 0, 1, 3, 4)
    assert tree.with_lookahead(0) == tree and not tree.with_lookahead({}).has_lookahead


def test_bad_groups_are_refused_in_words():
    tree = Tree([-1, 0, 0])
    for bad, message in [
        (-1, "0 or more, got -1 for node 0"),
        ([1, 2], "one number for each of the 3 nodes, got 2"),
        ({3: 1}, "belong to nodes 0 to 2, got node 3"),
        ({1: 1.5}, "0 or more, got 1.5 for node 1"),
        (500, "at most 1024 rows; these look-ahead slots make it more"),
    ]:
        with pytest.raises(ValueError, match=message):
            tree.with_lookahead(bad)
    with pytest.raises(ValueError, match="has look-ahead slots already"):
        tree.with_lookahead(1).with_lookahead(1)


def test_ids_are_what_lookahead_embed_takes():
    step = Tree([-1, 0, 0]).with_lookahead({0: 2, 2: 3})
    expected = [7, 0, 5, -1, -2, -1, -2, -3]
    for tokens in ([7, 0, 5], (7, 0, 5), torch.tensor([7, 0, 5]), torch.tensor([7, 0, 5]).int()):
        ids = step.ids(tokens)
        assert ids.dtype == torch.int64 and ids.tolist() == expected
    table, lookahead = torch.arange(8.0)[:, None], torch.tensor([[100.0], [101.0], [102.0]])
    embedded = pass_ext.lookahead_embed(step.ids([7, 0, 5]), table, lookahead).flatten()
    assert embedded.tolist() == [7, 0, 5, 100, 101, 100, 101, 102]
    assert Tree.chain(1).ids([4, 5]).tolist() == [4, 5]
    for bad in ([1, 2], [1, 2, 3, 4], [1.0, 2.0, 3.0], [[1, 2, 3]]):
        with pytest.raises(ValueError, match="3 integers, one for each node, the root included"):
            step.ids(bad)


def test_ids_stay_on_the_tokens_device(cuda):
    ids = Tree([-1, 0]).with_lookahead(1).ids(torch.tensor([3, 4], device=cuda.device))
    assert ids.is_cuda and ids.tolist() == [3, 4, -1, -1]


# ---- a batch ----


@settings(max_examples=40, deadline=None)
@given(batch=st.lists(st.one_of(st.none(), trees), max_size=5))
def test_a_packed_batch_is_what_tree_prepare_makes(batch):
    packed = pack_trees(batch)
    sizes = [0 if tree is None else len(tree) for tree in batch]
    assert packed.max_nodes == max([1, *sizes])
    assert packed.cu_nodes.tolist() == [0, *accumulate(sizes)]
    assert packed.parents.tolist() == [parent for tree in batch if tree for parent in tree.parents]
    expected = reference.tree_prepare(packed.parents, packed.cu_nodes, packed.max_nodes)
    for got, other in zip((packed.visible, packed.depths), expected, strict=True):
        assert_same_bits(got, other)
    assert packed.parents.dtype == packed.cu_nodes.dtype == torch.int32
    assert packed.owners.tolist() == [b for b, size in enumerate(sizes) for _ in range(size)]
    assert packed.has_rows.tolist() == [int(size > 0) for size in sizes]
    rows = [list(range(len(packed.parents)))[mine] for mine in packed.slices()]
    assert rows == [[row for row, owner in enumerate(packed.owners.tolist()) if owner == b] for b in range(len(sizes))]
    assert [nodes[:size] for nodes, size in zip(packed.rows_of_nodes.tolist(), sizes, strict=True)] == rows
    paths = [tree.path(row) for tree in batch if tree for row in range(len(tree))]
    assert [row.nonzero()[:, 0].tolist() for row in packed.seen()] == list(map(list, paths))
    assert torch.equal(packed.seen(slice(1, 3)), packed.seen()[1:3])


def test_one_tree_is_a_batch_of_one():
    tree = Tree.from_branching((3, 2)).with_lookahead(1)
    for one, batch in zip(pack_trees(tree), pack_trees([tree]), strict=True):
        assert one == batch if isinstance(one, int) else torch.equal(one, batch)


def test_packed_entries_may_be_parents_or_nothing():
    step = Tree.chain(2).with_lookahead(2)
    packed = pack_trees([None, [-1, 0], (), step, Tree.chain(0)])
    assert isinstance(packed, PackedTrees)
    assert packed.cu_nodes.tolist() == [0, 0, 2, 2, 11, 12] and packed.max_nodes == 9
    assert packed.visible[2:11].tolist() == step.visible.tolist()
    with pytest.raises(ValueError, match="the parent of node 1 must be an earlier node"):
        pack_trees([[-1, 3]])


@pytest.mark.parametrize("batch", [[], [None], [Tree.from_branching((9, 9)), None, Tree.chain(4)]], ids=len)
def test_one_copy_brings_the_same_to_another_device(batch):
    """The meta device takes the same path as a GPU: values are checked where there are any."""
    here, there = pack_trees(batch), pack_trees(batch, device="meta")
    for one, other in zip(here, there, strict=True):
        if isinstance(one, torch.Tensor):
            assert (other.shape, other.dtype, other.device.type) == (one.shape, one.dtype, "meta")
            assert other.is_contiguous()


def test_a_batch_on_the_gpu(cuda):
    batch = [Tree.from_branching((9, 9)), None, Tree.chain(4)]
    for one, other in zip(pack_trees(batch), pack_trees(batch, device=cuda.device), strict=True):
        if isinstance(one, torch.Tensor):
            assert other.is_cuda
            assert_same_bits(other, one)
        else:
            assert one == other


# ---- repr, str and pictures ----


def test_repr_is_short_and_says_it_all():
    for tree, text in [
        (Tree.chain(0), "Tree.chain(0)"),
        (Tree.chain(7), "Tree.chain(7)"),
        (Tree.from_branching((4, 2, 2)), "Tree.from_branching((4, 2, 2))"),
        (Tree([-1, 0, 0, 1]), "Tree([-1, 0, 0, 1])"),
        (Tree.chain(2).with_lookahead(3), "Tree.chain(2).with_lookahead(3)"),
        (Tree([-1, 0, 0, 1]).with_lookahead({0: 2, 3: 1}), "Tree([-1, 0, 0, 1]).with_lookahead({0: 2, 3: 1})"),
    ]:
        assert repr(tree) == text and eval(text) == tree
    large = Tree(random_tree(300, torch.Generator().manual_seed(0)))
    assert repr(large) == f"<Tree of 300 nodes, {large.max_depth} levels, {len(large.leaves)} leaves>"


def test_printing_shows_the_tree():
    assert str(Tree.chain(3)) == "0 ─ 1 ─ 2 ─ 3"
    tree = Tree([-1, 0, 0, 1, 1, 2, 4, 6, 6])
    assert str(tree).split("\n") == [
        "0",
        "├─ 1",
        "│  ├─ 3",
        "│  └─ 4 ─ 6",
        "│         ├─ 7",
        "│         └─ 8",
        "└─ 2 ─ 5",
    ]
    assert str(Tree([-1, 0, 0]).with_lookahead({0: 2, 2: 1})) == "0 +2\n├─ 1\n└─ 2 +1"
    deep = str(Tree([-1] + [(node - 1) // 2 * 2 for node in range(1, 1023)]))  # no recursion
    assert len(deep.split("\n")) == 1023


@pytest.fixture
def pyplot(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def colours_at(figure, ax, places):
    """The colours of the rendered picture at data coordinates, as hex."""
    from matplotlib.colors import to_hex

    figure.canvas.draw()
    image = figure.canvas.buffer_rgba()
    pixels = [ax.transData.transform(place) for place in places]
    return [to_hex([image[len(image) - 1 - round(y), round(x), i] / 255 for i in range(3)]) for x, y in pixels]


def test_the_picture_shows_who_sees_whom(pyplot, tmp_path):
    from pass_ext.tree import picture

    tree = Tree([-1, 0, 0, 1]).with_lookahead({3: 2, 0: 1})
    ax = tree.draw()
    figure = ax.get_figure()
    path = tmp_path / "tree.png"
    figure.savefig(path)
    assert path.stat().st_size > 5000
    rows = len(tree)
    numbers = [text for text in ax.texts if text.get_text() == "0" and text.get_position()[1] < 0]
    first = numbers[0].get_position()[0]  # the middle of the mask's first column
    corners = [(first + column + 0.3, row + 0.2) for row in range(rows) for column in range(rows)]
    expected = []
    for row in range(rows):
        for column in range(rows):
            seen = column in tree.path(row)
            expected.append((picture.NODE if tree.slots[column] < 0 else picture.SLOT) if seen else picture.HIDDEN)
    assert colours_at(figure, ax, corners) == expected
    prefix = [(first - picture.PREFIX_COLUMNS - 0.5 + 0.3, row + 0.5) for row in range(rows)]
    assert colours_at(figure, ax, prefix) == [picture.PREFIX] * rows
    beside = [(x, y + 0.36) for x, y in picture._places(tree.parents)]  # inside the circle, below its number
    assert colours_at(figure, ax, beside) == [picture.NODE if slot < 0 else picture.SLOT for slot in tree.slots]


@settings(max_examples=20, deadline=None)
@given(tree=trees)
def test_circles_of_the_picture_never_touch_and_levels_go_down(tree):
    from pass_ext.tree.picture import _places

    places = _places(tree.parents)
    assert all(places[row][1] > places[parent][1] for row, parent in enumerate(tree.parents) if parent >= 0)
    by_level = {}
    for (x, y), depth in zip(places, tree.depths, strict=True):
        by_level.setdefault(depth, []).append((x, y))
    for level in by_level.values():
        assert len({y for _, y in level}) == 1
        across = sorted(x for x, _ in level)
        assert all(b - a > 0.9 for a, b in pairwise(across))


def test_it_draws_on_given_axes_and_trees_of_any_size(pyplot):
    _, (left, right) = pyplot.subplots(1, 2)
    assert Tree.chain(0).draw(left) is left and Tree.from_branching((7, 7, 2)).draw(ax=right) is right
    assert not [text for text in right.texts if text.get_text().isdigit()]  # too many for numbers


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'pass_ext\[bench\]'"):
        Tree.chain(2).draw()
