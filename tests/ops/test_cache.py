"""cache_commit_ on every backend: whole storages of random bits against the reference, and every known misuse."""

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.each import each

import pass_ext
from pass_ext import reference
from pass_ext.testing import assert_same_bits, cpu_backends

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
LAYOUTS = ["slots", "heads", 1, 3, 16]  # [B, S, Hkv, D]; [B, Hkv, S, D] transposed; pages of so many slots
BEST_CPU = cpu_backends()[-1].name
random = torch.Generator().manual_seed(11)


def integer(low, high):
    return int(torch.randint(low, high, (), generator=random))


def int32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


# ---- storages full of random bits, NaN and huge numbers among them ----


def random_bits(shape, dtype, offset=0, gap=0):
    """A tensor [..., D] with `gap` elements after each D, `offset` elements into its storage."""
    *leading, dim = shape
    strides = [1]
    for size in reversed([*leading[1:], dim + gap]):
        strides.insert(0, strides[0] * size)
    count = offset + (strides[0] * leading[0] if leading else dim) + gap
    flat = torch.randint(0, 256, (count * dtype.itemsize,), generator=random, dtype=torch.uint8)
    return flat.view(dtype).as_strided(shape, strides, offset)


def make_cache(layout, requests, slots, heads, dim, dtype, **where):
    if layout == "slots":
        return random_bits((requests, slots, heads, dim), dtype, **where)
    if layout == "heads":
        return random_bits((requests, heads, slots, dim), dtype, **where).transpose(1, 2)
    return random_bits((requests * -(-slots // layout) + 2, layout, heads, dim), dtype, **where)


def make_table(layout, requests, slots):
    """Every request's pages in random order; entries after them name no page."""
    if isinstance(layout, str):
        return None
    pages = -(-slots // layout)
    table = torch.full((requests, pages + 1), 2**31 - 1, dtype=torch.int32)
    table[:, :pages] = torch.randperm(requests * pages + 2, generator=random)[: requests * pages].view(requests, pages)
    return table


def storage_of(tensor):
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def moved(tensors, device):
    """Copies of whole storages, with strides and sharing."""
    storages = {t.untyped_storage().data_ptr(): storage_of(t).clone().to(device).untyped_storage() for t in tensors}
    return [
        torch.empty(0, dtype=t.dtype, device=device).set_(
            storages[t.untyped_storage().data_ptr()], t.storage_offset(), t.shape, t.stride()
        )
        for t in tensors
    ]


def as_integers(tensors):
    return None if tensors is None else [t.view(INTEGERS[t.element_size()]) for t in tensors]


# ---- steps ----


def tree_path(nodes):
    """A root and an increasing choice of nodes, as accept_tree gives it."""
    return [0, *(i for i in range(1, nodes) if torch.rand((), generator=random) < 0.5)]


def any_path(nodes):
    """Any nodes in any order, some twice, some missing."""
    return [integer(-1, nodes) for _ in range(integer(1, 2 * nodes + 1))]


def make_step(sizes, *, path=tree_path, extra=0, paths=None):
    """(prefix_lens, cu_nodes, path, num_accepted) of requests with `sizes` nodes; garbage in the lengths of padded ones."""
    paths = paths or [path(nodes) if nodes else [] for nodes in sizes]
    width = max([1, *map(len, paths)]) + extra
    prefix_lens = int32([integer(0, 9) if nodes else 2**31 - 1 for nodes in sizes])
    rows = torch.full((len(sizes), width + 2), 10**9, dtype=torch.int32)[:, :width]
    for b, nodes in enumerate(paths):
        rows[b] = int32([*nodes, *[-1] * (width - len(nodes))])
    return prefix_lens, int32([0, *sizes]).cumsum(0).int(), rows, int32([max(0, len(nodes) - 1) for nodes in paths])


def slots_for(step):
    """Just enough slots for each request's nodes and its path."""
    prefix_lens, cu_nodes, _, num_accepted = step
    nodes = cu_nodes.diff()
    return int(torch.where(nodes > 0, prefix_lens + torch.maximum(nodes, num_accepted + 1), 0).max())


def commit_both(backend, caches, step, new=None, table=None):
    """The op on one copy of everything, the reference on another. Returns both sets of storages."""
    step = [tensor.to(backend.device) if tensor.is_contiguous() else tensor for tensor in step]
    step[2] = moved([step[2]], backend.device)[0]
    ours, theirs = moved(caches, backend.device), moved(caches, backend.device)
    fresh = None if new is None else moved(new, backend.device)
    table = None if table is None else table.to(backend.device)
    pass_ext.cache_commit_(ours, *step, new=fresh, block_table=table)
    reference.cache_commit_(as_integers(theirs), *step, new=as_integers(fresh), block_table=table)
    return ours, theirs


def check(backend, caches, step, new=None, table=None):
    ours, theirs = commit_both(backend, caches, step, new, table)
    for i, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
        try:
            assert_same_bits(storage_of(got), storage_of(expected))
        except AssertionError as error:
            raise AssertionError(f"caches[{i}] {list(got.shape)}: {error}") from None


def check_random(
    backend, layout, sizes, *, from_new=False, path=tree_path, paths=None, heads=2, dim=8, dtype=torch.bfloat16, tensors=2,
    extra=0, offset=0, gap=0,
):  # fmt: skip
    step = make_step(sizes, path=path, paths=paths, extra=extra)
    slots = max(1, slots_for(step))
    where = dict(offset=offset, gap=gap)
    caches = [make_cache(layout, len(sizes), slots, heads, dim, dtype, **where) for _ in range(tensors)]
    new = [random_bits((sum(sizes), heads, dim), dtype, **where) for _ in range(tensors)] if from_new else None
    check(backend, caches, step, new, make_table(layout, len(sizes), slots))


# ---- the reference itself, by hand ----


def test_a_step_by_hand(backend):
    """Nodes 0, 2 and 3 of five are accepted after a prefix of two."""
    cache = torch.arange(10.0, device=backend.device).reshape(1, 10, 1, 1)
    step = [int32(values, backend.device) for values in ([2], [0, 5], [[0, 2, 3, -1]], [2])]
    for commit in (pass_ext.cache_commit_, reference.cache_commit_):
        ours = cache.clone()
        commit([ours], *step)
        assert ours.flatten().tolist() == [0, 1, 2, 4, 5, 5, 6, 7, 8, 9]
        ours = cache.clone()
        commit([ours], *step, new=[100 + cache[0, :5].clone()])
        assert ours.flatten().tolist() == [0, 1, 100, 102, 103, 5, 6, 7, 8, 9]


# ---- layouts, types, widths ----


@pytest.mark.sanitizer
@pytest.mark.parametrize("from_new", [False, True], ids=["in place", "from new"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout(backend, layout, from_new):
    for sizes in ([6], [0, 9, 1, 0, 5, 12], [40, 3]):
        for extra in (0, 3):
            check_random(backend, layout, sizes, from_new=from_new, extra=extra)


@pytest.mark.parametrize("from_new", [False, True], ids=["in place", "from new"])
@each("dtype", DTYPES)
def test_every_type(backend, dtype, from_new):
    check_random(backend, "slots", [7, 0, 4], from_new=from_new, dtype=dtype)
    check_random(backend, 3, [12], from_new=from_new, dtype=dtype, dim=5, path=any_path)


@pytest.mark.sanitizer
@pytest.mark.parametrize("from_new", [False, True], ids=["in place", "from new"])
@each("dim", [1, 2, 5, 8, 12, 31, 64, 160])
def test_every_width_and_alignment(backend, dim, from_new):
    for offset, gap in [(0, 0), (1, 0), (4, 4), (8, 8), (0, 3)]:
        for layout in ("slots", "heads"):
            check_random(backend, layout, [5], from_new=from_new, dim=dim, offset=offset, gap=gap, tensors=1)


def test_rows_wider_than_a_block(backend):
    for path in (tree_path, any_path):
        check_random(backend, "heads", [14], heads=3, dim=700, dtype=torch.float32, path=path, tensors=1)
        check_random(backend, "slots", [11], heads=70, dim=3, dtype=torch.int8, path=path, tensors=1)
    check_random(backend, 3, [9], heads=3, dim=700, dtype=torch.float32, from_new=True, tensors=1)


def test_new_rows_and_caches_may_have_strides_of_their_own(backend):
    step = make_step([4, 6])
    by_slot, by_head = (make_cache(layout, 2, slots_for(step), 3, 8, torch.float16) for layout in ("slots", "heads"))
    fresh = [
        random_bits((10, 3, 8), torch.float16, gap=8),
        random_bits((3, 10, 8), torch.float16).transpose(0, 1),
        random_bits((10, 6, 8), torch.float16)[:, ::2],
        random_bits((1, 3, 8), torch.float16).expand(10, 3, 8),
    ]
    for new in fresh:
        check(backend, [by_slot, by_head], step, [new, new])


def test_keys_and_values_in_one_buffer(backend):
    step = make_step([9, 0, 5])
    halves = random_bits((2, 3, slots_for(step), 2, 8), torch.bfloat16)
    interleaved = random_bits((3, slots_for(step), 2, 2, 8), torch.bfloat16)
    check(backend, [halves[0], halves[1]], step)
    if backend.name != "emulated":  # it allows one owner per byte
        check(backend, [interleaved[:, :, 0], interleaved[:, :, 1]], step)


@pytest.mark.sanitizer
@pytest.mark.parametrize("from_new", [False, True], ids=["in place", "from new"])
def test_tensors_of_any_geometry_in_one_call(backend, from_new):
    """Latent caches, wide and narrow heads, scales beside quantised rows, pages of several sizes."""
    step = make_step([7, 0, 13])
    slots = slots_for(step)
    kinds = [(2, 64, torch.bfloat16), (1, 576, torch.bfloat16), (4, 5, torch.float32), (8, 1, torch.float16),
             (2, 64, torch.int8), (2, 64, torch.bfloat16)]  # fmt: skip
    new = [random_bits((20, heads, dim), dtype) for heads, dim, dtype in kinds] if from_new else None
    caches = [make_cache("heads" if i % 2 else "slots", 3, slots, *kind) for i, kind in enumerate(kinds)]
    check(backend, caches, step, new)
    table = make_table(1, 3, slots)  # enough pages for all
    caches = [random_bits((3 * slots + 2, 1 + i % 3, heads, dim), dtype) for i, (heads, dim, dtype) in enumerate(kinds)]
    check(backend, caches, step, new, table)


def test_more_tensors_than_one_launch_takes(backend):
    for from_new in (False, True):
        check_random(backend, "slots", [5], from_new=from_new, heads=1, dim=3, tensors=500)


def test_many_bytes_are_shared_by_threads(backend):
    if backend.name == "emulated":
        pytest.skip("megabytes, and nothing about the kernel that smaller cases do not show")
    for path in (tree_path, any_path):
        check_random(backend, "heads", [40, 0, 30], heads=8, dim=256, dtype=torch.float32, path=path, tensors=12)


def test_a_cache_past_two_billion_elements(backend):
    if backend.name not in ("cuda", "emulated", BEST_CPU):
        pytest.skip("the address arithmetic is the same at every instruction set, and one reservation of 4 GB will do")
    torch.utils.deterministic.fill_uninitialized_memory = False  # or 4 GB would be written, not reserved
    slots = 2**31 // 512 + 9
    cache = torch.empty(1, slots, 1, 512, dtype=torch.bfloat16, device=backend.device)
    cache[0, -4:, 0, :] = torch.arange(4, device=backend.device)[:, None]
    step = [int32(values, backend.device) for values in ([slots - 4], [0, 4], [[0, 2, 3]], [2])]
    pass_ext.cache_commit_([cache], *step)
    assert cache[0, -4:, 0, 0].tolist() == [0, 2, 3, 3]


# ---- paths ----

ADVERSARIAL = {
    "swap": [0, 2, 1],
    "reversed": list(range(39, -1, -1)),
    "reversed by eight": [7, 6, 5, 4, 3, 2, 1, 0],
    "reversed by nine": [8, 7, 6, 5, 4, 3, 2, 1, 0],
    "one step back": [0, *range(40)],
    "cycle": [*range(1, 40), 0],
    "cycle the other way": [39, *range(39)],
    "two cycles": [*range(1, 20), 0, *range(21, 40), 20],
    "the last everywhere": [39] * 40,
    "the first everywhere": [0] * 40,
    "one in the middle everywhere": [17] * 40,
    "all in place": list(range(40)),
    "holes": [0, -1, 5, -1, -1, 3, -1, 1, 38, -1, 2, 4],
    "longer than the tree": [i % 7 for i in range(75)],
    "more than one warp forward": list(range(2, 40)),
}


@pytest.mark.sanitizer
@pytest.mark.parametrize("path", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_any_path_reads_all_before_it_writes(backend, path):
    nodes = max(path) + 1
    check_random(backend, "slots", [nodes, 0, nodes], paths=[path, [], path[::-1]])
    check_random(backend, 3, [nodes], paths=[path], dim=5, extra=30, tensors=1)


def test_random_permutations(backend):
    for nodes in (2, 7, 8, 9, 31, 33, 65):
        paths = [torch.randperm(nodes, generator=random).tolist() for _ in range(2)]
        check_random(backend, "heads", [nodes, nodes], paths=paths, dim=4, tensors=1)


def test_the_longest_path(backend):
    """1,024 rows: shared memory holds two columns of them at a time."""
    for paths in ([list(range(1023, -1, -1))], [[*range(1, 1024), 0]]):
        check_random(backend, "slots", [1024], paths=paths, heads=1, dim=40, tensors=1)
        check_random(backend, "slots", [1024], paths=paths, heads=1, dim=3, dtype=torch.int8, tensors=1)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=st.sampled_from(LAYOUTS),
    sizes=st.lists(st.sampled_from([0, 1, 2, 5, 11]), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    dim=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES[:5]),
    from_new=st.booleans(),
    path=st.sampled_from([tree_path, any_path]),
    extra=st.integers(0, 2),
)
def test_any_step(backend, layout, sizes, heads, dim, dtype, from_new, path, extra):
    check_random(
        backend, layout, sizes, heads=heads, dim=dim, dtype=dtype, from_new=from_new, path=path, extra=extra, tensors=2
    )


def test_only_the_root_and_nothing_at_all(backend):
    check_random(backend, "slots", [5, 1], paths=[[0], [0]], extra=4)
    check_random(backend, "slots", [5, 1], paths=[[0], [0]], extra=4, from_new=True)
    check_random(backend, 3, [5, 2], paths=[[-1], [-1]], from_new=True)
    check_random(backend, "slots", [0, 0, 0])
    check_random(backend, "slots", [0, 0, 0], from_new=True)
    check_random(backend, "slots", [3], heads=0, from_new=True)
    check_random(backend, "slots", [3], dim=0)
    none = [torch.empty(0, dtype=torch.int32, device=backend.device), int32([0], backend.device)]
    path = torch.empty(0, 3, dtype=torch.int32, device=backend.device)
    pass_ext.cache_commit_([torch.ones(0, 4, 1, 2, device=backend.device)], *none, path, none[0])
    step = [tensor.to(backend.device) for tensor in make_step([3])]
    pass_ext.cache_commit_([], *step)
    pass_ext.cache_commit_([], *step, new=[])


def test_cache_commit_takes_the_result_of_accept_tree(backend):
    """Greedy acceptance of a tree whose third and fifth node follow the target."""
    parents, cu_nodes = int32([-1, 0, 0, 2, 2, 4], backend.device), int32([0, 6, 6], backend.device)
    target = torch.full((6, 16), -1.0, device=backend.device)
    for row, token in enumerate([3, 0, 7, 0, 9, 2]):
        target[row, token] = 1.0
    tokens = torch.tensor([0, 5, 3, 6, 7, 8], device=backend.device)
    accepted = pass_ext.accept_tree(target, tokens, parents, cu_nodes, 3)
    assert accepted.path.tolist() == [[0, 2, 4, -1], [-1] * 4]
    cache = torch.arange(20.0, device=backend.device).reshape(2, 10, 1, 1)
    pass_ext.cache_commit_([cache], int32([3, 0], backend.device), cu_nodes, accepted.path, accepted.num_accepted)
    assert cache[0].flatten().tolist() == [0, 1, 2, 3, 5, 7, 6, 7, 8, 9]
    assert cache[1].flatten().tolist() == list(range(10, 20))


# ---- values that do not fit ----

SLOTS, PAGE = 12, 4
# The fault, its place, and the CPU's message; the other devices leave those rows out.
BAD_VALUES = {
    "bounds that fall": ("cu_nodes", 1, 9, r"cu_nodes must rise from 0 to at most \d+ \(the packed nodes\), got"),
    "bounds below 0": ("cu_nodes", 0, -2, r"cu_nodes must rise .*got -2 and 4 at 0"),
    "prefix below 0": ("prefix_lens", 1, -3, "prefix_lens must not be negative, got -3 at 1"),
    "prefix past the cache": ("prefix_lens", 1, SLOTS, r"caches\[0\] must have slot 12 for request 1 \(prefix_lens 12\), got"),
    "huge prefix": ("prefix_lens", 0, 2**31 - 1, r"caches\[0\] must have slot 2147483647 for request 0 .*got 12 slots"),
    "no room for the last": ("prefix_lens", 1, SLOTS - 1, r"caches\[0\] must have slot 1[23] for request 1 .*got 12 slots"),
    "too many accepted": ("num_accepted", 0, 4, r"num_accepted must be in \[0, 4\) \(path has 4 columns\), got 4 at 0"),
    "huge accepted": ("num_accepted", 0, 2**31 - 1, r"num_accepted must be in \[0, 4\).*got 2147483647 at 0"),
    "negative accepted": ("num_accepted", 1, -1, r"num_accepted must be in \[0, 4\).*got -1 at 1"),
    "node past the tree": ("path", (0, 2), 4, r"path must be in \[-1, 4\) \(the nodes of request 0\), got 4 at \[0, 2\]"),
    "node below -1": ("path", (1, 1), -2, r"path must be in \[-1, 3\).*got -2 at \[1, 1\]"),
    "huge node": ("path", (1, 1), 2**31 - 1, r"path must be in \[-1, 3\).*got 2147483647"),
    "page past the pool": ("block_table", (0, 1), 8, r"block_table must name pages below 8 .*got 8 at \[0, 1\]"),
    "page below 0": ("block_table", (1, 1), -1, r"block_table must name pages below 8 .*got -1 at \[1, 1\]"),
    "huge page": ("block_table", (1, 1), 2**31 - 1, r"block_table must name pages .*got 2147483647"),
}  # fmt: skip


def bad_step(argument, place, value):
    step = dict(
        prefix_lens=int32([3, 6]),
        cu_nodes=int32([0, 4, 7]),
        path=int32([[0, 2, 3, -1], [0, 2, -1, -1]]),
        num_accepted=int32([2, 1]),
        block_table=int32([[5, 0, 3], [1, 7, 2]]),
    )
    step[argument][place] = value
    return step


def row_by_row(cache, fresh, prefix_lens, cu_nodes, path, num_accepted, block_table):
    """The op for one tensor in which anything may be wrong: a row that does not fit is left out."""
    before, width = cache.clone(), path.shape[1]

    def place(b, slot):
        if block_table is None:
            return (b, slot) if 0 <= slot < cache.shape[1] else None
        if not 0 <= slot < cache.shape[1] * block_table.shape[1]:
            return None
        page = int(block_table[b, slot // cache.shape[1]])
        return (page, slot % cache.shape[1]) if 0 <= page < cache.shape[0] else None

    for b in range(len(prefix_lens)):
        first, last, prefix = int(cu_nodes[b]), int(cu_nodes[b + 1]), int(prefix_lens[b])
        if not 0 <= first < last or prefix < 0 or (fresh is not None and last > fresh.shape[0]):
            continue
        for j in range(min(int(num_accepted[b]) + 1, width)):
            node = int(path[b, j])
            target, source = place(b, prefix + j), place(b, prefix + node) if node >= 0 else None
            if not 0 <= node < last - first or target is None or (fresh is None and source is None):
                continue
            cache[target] = before[source] if fresh is None else fresh[first + node]


@pytest.mark.sanitizer
@pytest.mark.parametrize("from_new", [False, True], ids=["in place", "from new"])
@pytest.mark.parametrize(("argument", "place", "value", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_values_that_do_not_fit(backend, argument, place, value, message, from_new):
    step = bad_step(argument, place, value)
    for paged in (False, True):
        if not paged and argument == "block_table":
            continue
        step["block_table"] = bad_step(argument, place, value)["block_table"] if paged else None
        caches = [make_cache(PAGE if paged else "slots", 2, SLOTS, 2, 8, torch.float32) for _ in range(2)]
        new = [random_bits((7, 2, 8), torch.float32) for _ in caches] if from_new else None
        ours, theirs = moved(caches, backend.device), moved(caches, "cpu")
        arguments = {k: v.to(backend.device) for k, v in step.items() if v is not None}
        fresh = None if new is None else moved(new, backend.device)
        if backend.name.startswith("cpu"):
            if from_new and argument == "prefix_lens" and value == SLOTS - 1:
                message = r"caches\[0\] must have slot 12 for request 1 .*got 12 slots"
            with pytest.raises(RuntimeError, match="pass_ext::cache_commit_: .*" + message):
                pass_ext.cache_commit_(ours, new=fresh, **arguments)
        else:
            pass_ext.cache_commit_(ours, new=fresh, **arguments)
            for i, cache in enumerate(as_integers(theirs)):
                row_by_row(cache, as_integers(new)[i] if new else None, **step)
        for got, expected in zip(ours, theirs, strict=True):
            assert_same_bits(storage_of(got).cpu(), storage_of(expected))
        former = pass_ext.set_debug(True)
        try:
            first_word = re.match("[a-z_]+", message)[0]
            with pytest.raises(IndexError, match=f"pass_ext::cache_commit_: .*{first_word}"):
                pass_ext.cache_commit_(ours, new=fresh, **arguments)
        finally:
            pass_ext.set_debug(former)


def test_row_by_row_is_the_reference_where_all_is_right():
    step = bad_step("path", (0, 3), -1)
    for from_new in (False, True):
        cache = make_cache(PAGE, 2, SLOTS, 2, 8, torch.int32)
        fresh = random_bits((7, 2, 8), torch.int32) if from_new else None
        ours, theirs = cache.clone(), cache.clone()
        row_by_row(ours, fresh, **step)
        reference.cache_commit_([theirs], new=[fresh] if from_new else None, **step)
        assert_same_bits(ours, theirs)


def test_nothing_is_written_where_a_later_tensor_is_refused(backend):
    if not backend.name.startswith("cpu"):
        pytest.skip("only the CPU checks values")
    step = make_step([9], paths=[[0, 4, 6, 8]])
    slots = slots_for(step)
    caches = [make_cache("slots", 1, size, 2, 8, torch.float32) for size in (slots, slots - 1)]
    ours = moved(caches, "cpu")
    with pytest.raises(RuntimeError, match=r"caches\[1\] must have slot"):
        pass_ext.cache_commit_(ours, *step)
    assert_same_bits(storage_of(ours[0]), storage_of(caches[0]))


# ---- refusals ----

good = dict(
    caches=[torch.zeros(2, 9, 2, 8), torch.zeros(2, 9, 2, 8)],
    prefix_lens=int32([1, 2]),
    cu_nodes=int32([0, 3, 5]),
    path=int32([[0, 2], [0, -1]]),
    num_accepted=int32([1, 0]),
    new=None,
    block_table=None,
)
rows, table = torch.zeros(5, 2, 8), int32([[0, 1], [1, 0]])


def second(tensor):
    return [good["caches"][0], tensor]


REFUSALS = [
    ({"caches": second(torch.zeros(2, 9, 8))}, r"caches\[1\] must have shape \[B, S, Hkv, D\], got float32\[2, 9, 8\]"),
    ({"caches": second(torch.zeros(9, 8)), "block_table": table}, r"caches\[1\] must have shape \[pages, page, Hkv, D\]"),
    ({"caches": second(torch.zeros(3, 9, 2, 8))}, r"caches\[1\] must have 2 \(the requests of cu_nodes; no block_table"),
    ({"caches": second(torch.zeros(2, 9, 8, 2).mT)}, r"caches\[1\] must be contiguous in its last dimension"),
    ({"caches": second(torch.zeros(1, 9, 2, 8).expand(2, 9, 2, 8))}, r"caches\[1\] must not be expanded.*dimension 0"),
    ({"caches": [good["caches"][0]] * 2}, "caches must be different tensors, got the same memory twice"),
    ({"caches": second(good["caches"][0][..., :4])}, "caches must be different tensors"),
    ({"caches": second(torch.zeros(2, 0, 2, 8)), "block_table": table}, r"caches\[1\] must have pages of at least 1 slot"),
    ({"prefix_lens": torch.zeros(2)}, r"prefix_lens must be int32, got float32\[2\]"),
    ({"prefix_lens": int32([1])}, r"prefix_lens must have 2 \(the requests of cu_nodes\)"),
    ({"cu_nodes": torch.tensor([0.0, 3.0, 5.0])}, r"cu_nodes must be int32, got float32\[3\]"),
    ({"cu_nodes": int32([])}, r"cu_nodes must have shape \[B \+ 1\]"),
    ({"path": int32([0, 1])}, r"path must have shape \[B, A\], got int32\[2\]"),
    ({"path": int32([[0]])}, r"path must have 2 \(the requests of cu_nodes\) in dimension 0"),
    ({"path": torch.zeros(2, 2)}, r"path must be int32, got float32\[2, 2\]"),
    ({"path": int32([[0, 1], [1, 0]]).t()}, "path must be contiguous in its last dimension"),
    ({"path": torch.zeros(2, 1025, dtype=torch.int32)}, r"path must have at most 1024 columns, got int32\[2, 1025\]"),
    ({"num_accepted": int32([1, 0, 2])}, r"num_accepted must have 2 \(the requests of cu_nodes\)"),
    ({"num_accepted": int32([1, 9, 0, 9])[::2]}, r"num_accepted must be contiguous, got int32\[2\] on .* with stride 2"),
    ({"new": [rows]}, "new must have one tensor for each of the 2 caches, got 1"),
    ({"new": [rows, rows[0]]}, r"new\[1\] must have shape \[N, Hkv, D\], got float32\[2, 8\]"),
    ({"new": [rows, rows.half()]}, r"new\[1\] must have the dtype of caches\[1\] \(float32\[2, 9, 2, 8\].*got float16"),
    ({"new": [rows, rows[:4]]}, r"new\[1\] must have 5 \(the packed nodes of new\[0\]\) in dimension 0"),
    ({"new": [rows, rows[:, :1]]}, r"new\[1\] must have 2 \(the heads of the cache\) in dimension 1"),
    ({"new": [rows, rows[..., :7]]}, r"new\[1\] must have 8 \(the head size D of the cache\) in dimension 2"),
    ({"new": [rows, torch.zeros(5, 8, 2).mT]}, r"new\[1\] must be contiguous in its last dimension"),
    ({"block_table": table[:1]}, r"block_table must have 2 \(the requests of cu_nodes\)"),
    ({"block_table": table.float()}, r"block_table must be int32, got float32\[2, 2\]"),
]  # fmt: skip


@pytest.mark.quick_on("best")
@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[m[:40] for _, m in REFUSALS])
def test_bad_input_is_refused_in_words(backend, change, message):
    arguments = good | change
    if backend.device.type == "cuda":
        for name, value in arguments.items():
            if value is not None:
                arguments[name] = moved(value, "cuda") if isinstance(value, list) else moved([value], "cuda")[0]
    with pytest.raises(RuntimeError, match="pass_ext::cache_commit_: .*" + message):
        pass_ext.cache_commit_(**arguments)


# ---- autograd ----


def test_a_backward_that_saved_the_cache_notices(backend):
    step = [tensor.to(backend.device) for tensor in make_step([3], paths=[[0, 2]])]
    cache = torch.ones(1, 20, 1, 2, device=backend.device)
    weight = torch.ones(2, device=backend.device, requires_grad=True)
    loss = (cache * weight).sum()
    pass_ext.cache_commit_([cache], *step)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- what only a GPU can show ----


def gpu_case(cuda, from_new):
    step = [tensor.to(cuda.device) for tensor in make_step([9, 0, 5], paths=[[0, 2, 3, 7], [], [0, 4]])]
    caches = [torch.randn(3, 2048, 8, 128, device=cuda.device).bfloat16() for _ in range(8)]
    new = [torch.randn(14, 8, 128, device=cuda.device).bfloat16() for _ in caches] if from_new else None
    return caches, step, new


@pytest.mark.parametrize("from_new", [False, True], ids=["in place", "from new"])
def test_replays_in_a_cuda_graph(cuda, from_new):
    caches, step, new = gpu_case(cuda, from_new)
    graph = torch.cuda.CUDAGraph()
    pass_ext.cache_commit_(caches, *step, new=new)
    with torch.cuda.graph(graph):
        pass_ext.cache_commit_(caches, *step, new=new)
    for sizes in ([9, 0, 5], [0, 11, 3], [14, 0, 0], [0, 0, 0]):
        for cache in caches:
            cache.normal_()
        for static, fresh in zip(
            step, make_step(sizes, paths=[[0, n // 2, n - 1] if n > 2 else [] for n in sizes]), strict=True
        ):
            static.fill_(-1)[tuple(slice(0, size) for size in fresh.shape)] = fresh.to(cuda.device)
        expected = [cache.clone() for cache in caches]
        reference.cache_commit_(expected, *step, new=new)
        graph.replay()
        for got, reference_cache in zip(caches, expected, strict=True):
            assert_same_bits(got, reference_cache)
