"""tree_prepare and tree_mask on every backend: every bit against the reference, and their results for malformed input."""

from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.each import each
from support.steps import random_tree, to

import pass_ext
from pass_ext import reference
from pass_ext.testing import assert_same_bits, cpu_backends

BEST_CPU = cpu_backends()[-1].name
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129)


def star(nodes):
    return [-1] + [0] * (nodes - 1)


def chain(nodes):
    return list(range(-1, nodes - 1))


def caterpillar(nodes):
    """A chain whose every node has a leaf beside its successor."""
    return [-1] + [(node - 1) // 2 * 2 for node in range(1, nodes)]


def forest(nodes, random):
    parents = random_tree(nodes, random)
    return [-1 if float(torch.rand((), generator=random)) < 0.2 else parent for parent in parents]


def uniform(nodes, random):
    return random_tree(nodes, random)


SHAPES = {
    "uniform": uniform,
    "forest": forest,
    "chain": lambda nodes, random: chain(nodes),
    "star": lambda nodes, random: star(nodes),
    "caterpillar": lambda nodes, random: caterpillar(nodes),
}


def pack(trees, device="cpu", rows_after=0, after=-7):
    """parents and cu_nodes of a batch, with rows after the last bound that must not be read."""
    parents = [parent for tree in trees for parent in tree] + [after] * rows_after
    bounds = torch.tensor([0, *map(len, trees)]).cumsum(0)
    return torch.tensor(parents, dtype=torch.int32, device=device), bounds.int().to(device)


def integers(values, backend):
    return torch.tensor(values, dtype=torch.int32, device=backend.device)


@lru_cache(maxsize=512)
def prepared(parents, cu_nodes, max_nodes):
    """The reference's result, computed once for all backends."""
    return reference.tree_prepare(
        *(torch.tensor(values, dtype=torch.int32) for values in (parents, cu_nodes)), max_nodes
    )


def assert_prepares(parents, cu_nodes, max_nodes):
    got = pass_ext.tree_prepare(parents, cu_nodes, max_nodes)
    expected = prepared(tuple(parents.tolist()), tuple(cu_nodes.tolist()), max_nodes)
    assert_same_bits(got[0], expected[0])
    assert_same_bits(got[1], expected[1])


# ---- tree_prepare ----


@pytest.mark.sanitizer
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_size(backend, shape):
    random = torch.Generator().manual_seed(3)
    for nodes in SIZES:
        parents, cu_nodes = pack([SHAPES[shape](nodes, random)], backend.device)
        for max_nodes in (nodes, nodes + 1, nodes + 64):
            assert_prepares(parents, cu_nodes, max_nodes)


@pytest.mark.parametrize("shape", SHAPES)
@each("nodes", [26, 256, 1024])
def test_large_trees(backend, shape, nodes):
    random = torch.Generator().manual_seed(nodes)
    assert_prepares(*pack([SHAPES[shape](nodes, random)], backend.device), nodes)


def test_a_tree_by_hand(backend):
    parents, cu_nodes = pack([[-1, 0, 0, 2, -1, 4], [-1, 0]], backend.device, rows_after=1)
    visible, depths = pass_ext.tree_prepare(parents, cu_nodes, 6)
    assert visible.flatten().tolist() == [0b1, 0b11, 0b101, 0b1101, 0b10000, 0b110000, 0b1, 0b11, 0]
    assert depths.tolist() == [0, 1, 1, 2, 0, 1, 0, 1, 0]


@pytest.mark.sanitizer
@pytest.mark.parametrize("max_nodes", [70, 200])
def test_ragged_and_padded_batches(backend, max_nodes):
    random = torch.Generator().manual_seed(max_nodes)
    trees = [random_tree(n, random) if n else [] for n in (0, 5, 70, 0, 0, 64, 1, 26, 0)]
    assert_prepares(*pack(trees, backend.device), max_nodes)
    assert_prepares(*pack(trees, backend.device, rows_after=77), max_nodes)


def test_rows_before_the_first_request_belong_to_no_request_too(backend):
    parents, cu_nodes = pack([[9, 9, 9], [-1, 0], [-1]], backend.device, rows_after=2)
    visible, depths = pass_ext.tree_prepare(parents, cu_nodes[1:], 2)
    assert visible.flatten().tolist() == [0, 0, 0, 1, 3, 1, 0, 0] and depths.tolist() == [0, 0, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("bounds", [[0], [0, 0], [2, 2, 2], [4, 4]], ids=str)
def test_batches_without_any_node(backend, bounds):
    visible, depths = pass_ext.tree_prepare(integers([7, 7, 7, 7], backend), integers(bounds, backend), 65)
    assert visible.tolist() == [[0, 0]] * 4 and depths.tolist() == [0] * 4


def test_many_requests(backend):
    """More than one task on the CPU, and more rows after the last bound than one block clears on a GPU."""
    random = torch.Generator().manual_seed(1)
    count, most = 60 if backend.name == "emulated" else 700, 90
    trees = [random_tree(1 + int(torch.randint(0, most, (), generator=random)), random) for _ in range(count)]
    assert_prepares(*pack(trees, backend.device, rows_after=500), most)


def test_rows_after_the_last_bound_are_cleared_however_many(backend):
    after = 20_000  # a block that clears takes several rows per thread
    parents, cu_nodes = pack([[-1, 0]], backend.device, rows_after=after)
    visible, depths = pass_ext.tree_prepare(parents, cu_nodes, 2)
    assert visible[:2].flatten().tolist() == [1, 3] and depths[:2].tolist() == [0, 1]
    assert not visible[2:].any() and not depths[2:].any()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 70), max_size=5),
    seed=st.integers(0, 2**31),
    after=st.integers(0, 3),
    spare=st.integers(0, 80),
)
def test_any_batch(backend, sizes, seed, after, spare):
    random = torch.Generator().manual_seed(seed)
    trees = [forest(n, random) if n else [] for n in sizes]
    assert_prepares(*pack(trees, backend.device, rows_after=after), max([1, *sizes]) + spare)


# ---- malformed input of tree_prepare ----


@pytest.mark.parametrize("bad", [3, 4, 5, 100, -2, 2**31 - 1, -(2**31)])
def test_a_malformed_parent(backend, bad):
    parents, cu_nodes = pack([[-1, 0, 0], [-1, 0, 1, bad, 3, 4], [-1, 0]], backend.device)
    if backend.name.startswith("cpu"):
        message = rf"parents must be -1 or an earlier node of the same request, got {bad} at flat index 6, node 3 of "
        with pytest.raises(RuntimeError, match=message + "request 1"):
            pass_ext.tree_prepare(parents, cu_nodes, 6)
        return
    assert_prepares(parents, cu_nodes, 6)  # in the reference, as on the GPU, such a node is a root
    assert pass_ext.tree_prepare(parents, cu_nodes, 6)[1].tolist() == [0, 1, 1, 0, 1, 2, 0, 1, 2, 0, 1]


def test_the_first_of_several_malformed_parents_is_named():
    random = torch.Generator().manual_seed(0)
    trees = [random_tree(80, random) for _ in range(500)]
    for request in (123, 124, 480):
        trees[request][7] = 7
    with pytest.raises(RuntimeError, match=r"got 7 at flat index 9847, node 7 of request 123"):
        pass_ext.tree_prepare(*pack(trees), 80)


BROKEN = [[0, 8, 4], [4, 2, 8], [-1, 4, 8], [0, 4, 9], [0, 2**31 - 1, 8], [-(2**31), 0, 8], [9, 9, 9], [0, 5, 3, 8]]


@pytest.mark.parametrize("bounds", BROKEN, ids=str)
def test_bounds_that_divide_nothing(backend, bounds):
    parents, cu_nodes = integers([-1, 0, 1, 2, -1, 0, 1, 2], backend), integers(bounds, backend)
    if backend.name.startswith("cpu"):
        with pytest.raises(RuntimeError, match=r"tree_prepare: cu_nodes must rise from 0 to at most 8 \(the packed"):
            pass_ext.tree_prepare(parents, cu_nodes, 9)
        return
    visible, depths = pass_ext.tree_prepare(parents, cu_nodes, 9)
    assert not visible.any() and not depths.any()


@pytest.mark.parametrize("max_nodes", [1, 5, 64, 65])
def test_more_nodes_than_max_nodes(backend, max_nodes):
    parents, cu_nodes = pack(
        [chain(max_nodes), chain(max_nodes + 40), chain(3 if max_nodes > 2 else 1)], backend.device
    )
    if backend.name.startswith("cpu"):
        message = f"must be at least the nodes of every request, got {max_nodes}, but request 1 has {max_nodes + 40}"
        with pytest.raises(RuntimeError, match=message):
            pass_ext.tree_prepare(parents, cu_nodes, max_nodes)
        return
    visible, depths = pass_ext.tree_prepare(parents, cu_nodes, max_nodes)
    fitting, last = reference.tree_prepare(*pack([chain(max_nodes)], backend.device), max_nodes), 2 * max_nodes + 40
    for first in (0, max_nodes):
        assert_same_bits(visible[first : first + max_nodes], fitting[0])
        assert_same_bits(depths[first : first + max_nodes], fitting[1])
    assert not visible[2 * max_nodes : last].any() and not depths[2 * max_nodes : last].any()
    assert visible[last:].flatten()[0] == 1


def test_debug_mode_reports_malformed_input_on_every_device(backend, debug_mode):
    parents, cu_nodes = pack([[-1, 0], [-1, 1, 0]], backend.device)
    visible = torch.ones(5, 1, dtype=torch.int64, device=backend.device)
    mask = lambda bounds, prefixes: pass_ext.tree_mask(  # noqa: E731
        visible, bounds, 3, integers(prefixes, backend), 10, torch.float32
    )
    with pytest.raises(IndexError, match="got 1 at flat index 3, node 1 of request 1"):
        pass_ext.tree_prepare(parents, cu_nodes, 3)
    with pytest.raises(IndexError, match="in steps of at most 2, got 2 and 5 at 1"):
        pass_ext.tree_prepare(parents, cu_nodes, 2)
    with pytest.raises(IndexError, match="tree_mask: cu_nodes must rise to at most 5"):
        mask(cu_nodes + 1, [0, 0])
    with pytest.raises(IndexError, match=r"prefix_lens must be in .* got 8 at 1, with kv_len 10 and 3 nodes"):
        mask(cu_nodes, [8, 8])
    assert mask(cu_nodes, [8, 7]).shape == (2, 1, 3, 10)


# ---- tree_mask ----


def random_bits(rows, max_nodes, random, device):
    """Any bits, also beyond the request's nodes."""
    words = -(-max_nodes // 64)
    return torch.randint(-(2**63), 2**63 - 1, (rows, words), generator=random).to(device)


def assert_masks(*arguments):
    assert_same_bits(pass_ext.tree_mask(*arguments), reference.tree_mask(*arguments))


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_of_every_alignment(backend, dtype):
    """Row lengths and prefixes that put rows, the end of the prefix and the last node at every place of a vector."""
    random = torch.Generator().manual_seed(5)
    cu_nodes = integers([0, 3, 3, 8], backend)
    bits = random_bits(9, 6, random, backend.device)
    for kv_len in range(40, 58):
        for first in (0, 1, 7, 8, 13, 35):
            assert_masks(bits, cu_nodes, 6, integers([first, 9, kv_len - 5], backend), kv_len, dtype)


@each("nodes", [1, 31, 33, 63, 64, 65, 127, 128, 129, 256])
def test_masks_of_every_size(backend, nodes):
    random = torch.Generator().manual_seed(nodes)
    bits, cu_nodes = random_bits(nodes, nodes, random, backend.device), integers([0, nodes], backend)
    for prefix, spare, more in ((0, 0, 0), (5, 3, 1), (100, 40, 2)):
        kv_len = prefix + nodes + spare
        max_nodes = nodes + more if -(-nodes // 64) == -(-(nodes + more) // 64) else nodes
        assert_masks(bits, cu_nodes, max_nodes, integers([prefix], backend), kv_len, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_of_many_segments(backend, dtype):
    """Rows longer than one warp writes, more rows than one task has on the CPU."""
    random = torch.Generator().manual_seed(2)
    sizes, kv_len = ((5, 0, 1), 20_011) if backend.name == "emulated" else ((26, 0, 64, 1), 20_011)
    cu_nodes = integers([0, *torch.tensor(sizes).cumsum(0).tolist()], backend)
    bits = random_bits(sum(sizes), 64, random, backend.device)
    prefixes = [int(torch.randint(0, kv_len - 64, (), generator=random)) for _ in sizes]
    assert_masks(bits, cu_nodes, max(sizes), integers(prefixes, backend), kv_len, dtype)


def test_a_mask_by_hand(backend):
    visible, cu_nodes = torch.tensor([[0b1], [0b11], [0b101]], device=backend.device), integers([0, 3, 3], backend)
    mask = pass_ext.tree_mask(visible, cu_nodes, 4, integers([2, 0], backend), 6, torch.float16)
    low = torch.finfo(torch.float16).min
    rows = [[0, 0, 0, low, low, low], [0, 0, 0, 0, low, low], [0, 0, 0, low, 0, low], [low] * 6]
    assert mask.tolist() == [[rows], [[[low] * 6] * 4]]


def test_a_row_that_sees_nothing_survives_softmax(backend):
    visible, cu_nodes = torch.zeros(1, 1, dtype=torch.int64, device=backend.device), integers([0, 1], backend)
    for dtype in DTYPES:
        mask = pass_ext.tree_mask(visible, cu_nodes, 2, integers([0], backend), 7, dtype)
        assert torch.isfinite(mask).all() and torch.isfinite(mask.float().softmax(-1)).all()


def test_empty_masks(backend):
    none = torch.zeros(0, 1, dtype=torch.int64, device=backend.device)
    assert pass_ext.tree_mask(none, integers([0], backend), 3, integers([], backend), 9, torch.float32).numel() == 0
    bounds, prefixes = integers([0, 0], backend), integers([4], backend)
    assert pass_ext.tree_mask(none, bounds, 3, prefixes, 0, torch.float32).shape == (1, 1, 3, 0)
    padded = pass_ext.tree_mask(none, bounds, 3, integers([-5], backend), 4, torch.bfloat16)
    assert (padded == torch.finfo(torch.bfloat16).min).all()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    kv_len=st.integers(9, 60),
    dtype=st.sampled_from(DTYPES),
)
def test_any_mask(backend, sizes, seed, kv_len, dtype):
    random = torch.Generator().manual_seed(seed)
    cu_nodes = integers([0, *torch.tensor(sizes).cumsum(0).tolist()], backend)
    prefixes = [int(torch.randint(0, kv_len - n + 1, (), generator=random)) for n in sizes]
    bits = random_bits(sum(sizes) + 1, 9, random, backend.device)
    assert_masks(bits, cu_nodes, max([1, *sizes]), integers(prefixes, backend), kv_len, dtype)


@pytest.mark.parametrize(("prefix", "kv_len"), [(6, 8), (8, 8), (9, 8), (2**31 - 1, 8), (-3, 8), (-(2**31), 8)])
def test_columns_that_do_not_fit(backend, prefix, kv_len):
    random = torch.Generator().manual_seed(0)
    bits, cu_nodes = random_bits(5, 3, random, backend.device), integers([0, 2, 5], backend)
    arguments = bits, cu_nodes, 3, integers([0, prefix], backend), kv_len, torch.bfloat16
    if backend.name.startswith("cpu"):
        problem = "kv_len must be at least" if prefix > 0 else "prefix_lens must not be negative"
        with pytest.raises(RuntimeError, match=f"pass_ext::tree_mask: {problem}.*"):
            pass_ext.tree_mask(*arguments)
        return
    fits = max(prefix, 0)
    wide = reference.tree_mask(bits, cu_nodes, 3, integers([0, min(fits, 20)], backend), 40, torch.bfloat16)
    assert_same_bits(pass_ext.tree_mask(*arguments), wide[..., :kv_len].contiguous())


@pytest.mark.parametrize("bounds", BROKEN, ids=str)
def test_masks_with_invalid_bounds(backend, bounds):
    """The CPU refuses; elsewhere the result is undefined, but nothing out of bounds is read or written."""
    random = torch.Generator().manual_seed(0)
    bits, prefixes = random_bits(8, 9, random, backend.device), integers([3] * (len(bounds) - 1), backend)
    if backend.name.startswith("cpu"):
        with pytest.raises(RuntimeError, match=r"tree_mask: cu_nodes must rise from 0 to at most 8"):
            pass_ext.tree_mask(bits, integers(bounds, backend), 9, prefixes, 20, torch.float32)
        return
    mask = pass_ext.tree_mask(bits, integers(bounds, backend), 9, prefixes, 20, torch.float32)
    assert ((mask == 0) | (mask == torch.finfo(torch.float32).min)).all()


def test_requests_larger_than_max_nodes_are_cut_in_the_mask(backend):
    random = torch.Generator().manual_seed(0)
    bits, prefixes = random_bits(8, 9, random, backend.device), integers([3, 2], backend)
    arguments = bits, integers([0, 7, 8], backend), 5, prefixes, 20, torch.float32
    if backend.name.startswith("cpu"):
        with pytest.raises(RuntimeError, match="max_nodes must be at least the nodes of every request, got 5"):
            pass_ext.tree_mask(*arguments)
        return
    kept = bits[[0, 1, 2, 3, 4, 7]]
    assert_same_bits(
        pass_ext.tree_mask(*arguments),
        reference.tree_mask(kept, integers([0, 5, 6], backend), 5, prefixes, 20, torch.float32),
    )


def test_masks_are_the_same_bits_with_any_thread_count(with_threads):
    random = torch.Generator().manual_seed(1)
    bits, cu_nodes = random_bits(200, 100, random, "cpu"), torch.arange(0, 201, 100).int()
    parents = torch.tensor(random_tree(100, random) * 200, dtype=torch.int32)
    many = torch.arange(0, 20_001, 100).int()

    def both():
        mask = pass_ext.tree_mask(bits, cu_nodes, 100, torch.tensor([50, 900]).int(), 1003, torch.bfloat16)
        return mask, *pass_ext.tree_prepare(parents, many, 100)

    results = with_threads(both)
    for other in results[1:]:
        for one, another in zip(results[0], other, strict=True):
            assert_same_bits(one, another)


# ---- refusals ----

TREE = dict(parents=torch.tensor([-1, 0, 0, -1]).int(), cu_nodes=torch.tensor([0, 3, 4]).int(), max_nodes=3)
PREPARE_REFUSALS = [
    ({"parents": torch.tensor([-1.0, 0.0])}, r"parents must be int32, got float32\[2\]"),
    ({"parents": torch.zeros(2, 2).int()}, r"parents must have shape \[n\], one number each, got int32\[2, 2\]"),
    ({"parents": torch.zeros(8).int()[::2]}, r"parents must be contiguous, got int32\[4\] on .* with stride 2"),
    ({"cu_nodes": torch.tensor([0.0, 4.0])}, r"cu_nodes must be int32, got float32\[2\]"),
    ({"cu_nodes": torch.zeros(0).int()}, r"cu_nodes must have shape \[B \+ 1\], got int32\[0\]"),
    ({"max_nodes": 0}, r"max_nodes must be in \[1, 1024\], got 0"),
    ({"max_nodes": 1025}, r"max_nodes must be in \[1, 1024\], got 1025"),
]
MASK = dict(
    visible=torch.ones(4, 1, dtype=torch.int64),
    cu_nodes=TREE["cu_nodes"],
    max_nodes=3,
    prefix_lens=torch.tensor([1, 2]).int(),
    kv_len=9,
    dtype=torch.float32,
)
MASK_REFUSALS = [
    ({"visible": torch.ones(4, 1).int()}, r"visible must be int64, got int32\[4, 1\]"),
    ({"visible": torch.tensor(3)}, r"visible must have shape \[N, ceil\(max_nodes / 64\)\], got int64\[\]"),
    ({"max_nodes": 65}, r"visible must have 2 \(ceil\(max_nodes / 64\)\) in dimension 1, got int64\[4, 1\]"),
    ({"visible": torch.ones(2, 4, dtype=torch.int64).t(), "max_nodes": 65}, r"visible must be contiguous in its last"),
    ({"prefix_lens": torch.zeros(3).int()}, r"prefix_lens must have 2 \(the requests of cu_nodes\) in dimension 0"),
    ({"kv_len": -1}, r"kv_len must be in \[0, 2\^31\), got -1"),
    ({"kv_len": 2**31}, r"kv_len must be in \[0, 2\^31\), got 2147483648"),
    ({"dtype": torch.float64}, r"dtype must be bfloat16, float16 or float32, got float64"),
    ({"dtype": torch.bool}, r"dtype must be bfloat16, float16 or float32, got bool"),
]
REFUSALS = [("tree_prepare", TREE, *one) for one in PREPARE_REFUSALS] + [
    ("tree_mask", MASK, *one) for one in MASK_REFUSALS
]


@pytest.mark.quick_on("best")
@pytest.mark.parametrize(("op", "good", "change", "message"), REFUSALS, ids=[r[3][:24] for r in REFUSALS])
def test_bad_input_is_refused_in_words(backend, op, good, change, message):
    arguments = to(good | change, backend.device)
    with pytest.raises(RuntimeError, match=f"pass_ext::{op}: .*{message}"):
        getattr(pass_ext, op)(**arguments)


# ---- what only a GPU can show ----


def test_replays_in_a_cuda_graph(cuda):
    random = torch.Generator().manual_seed(0)
    parents, cu_nodes = pack([random_tree(64, random)] * 3, cuda.device, rows_after=10)
    prefixes = torch.full((3,), 100, dtype=torch.int32, device=cuda.device)

    def step():
        visible, depths = pass_ext.tree_prepare(parents, cu_nodes, 64)
        return visible, depths, pass_ext.tree_mask(visible, cu_nodes, 64, prefixes, 300, torch.float16)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        visible, depths, mask = step()
    for sizes in ((64, 64, 64), (3, 0, 40), (0, 0, 0)):
        fresh, bounds = pack([random_tree(n, random) if n else [] for n in sizes], cuda.device)
        parents.fill_(99)[: len(fresh)].copy_(fresh)
        cu_nodes.copy_(bounds)
        prefixes.random_(0, 200)
        graph.replay()
        expected = reference.tree_prepare(parents, cu_nodes, 64)
        assert_same_bits(visible, expected[0])
        assert_same_bits(depths, expected[1])
        assert_same_bits(mask, reference.tree_mask(visible, cu_nodes, 64, prefixes, 300, torch.float16))
