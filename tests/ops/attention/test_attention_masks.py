"""Visible keys in attention_tree, bit by bit; hidden keys cannot reach a row.

Queries and keys of 0 and one-hot values make `out` the indicator of a row's visible keys, divided by their number: every bit
counts.
"""

import itertools
import math

import pytest
import torch
from attention_cases import BITS, CAUSAL, CHAIN, FULL, MASKS, ONE_HOT, SINK, STAR, UNIFORM, attention_case, packed
from attention_checks import FLOATS, allowed, assert_same_runs, is_small, is_thorough, run, runs, sized, solved, threads
from support.pairwise import pairwise

from pass_ext.reference.attention import attention_mask
from pass_ext.testing import assert_same_bits


@threads(1)
def check_every_bit(backend, prefixes, sizes, *, group=2, dim=64, **options):
    kv_heads = -(-max(p + n for p, n in zip(prefixes, sizes, strict=True)) // dim)
    case = attention_case(prefixes, sizes, heads=(kv_heads, group), dim=dim, inputs=ONE_HOT, **options)
    out, lse = run(backend, case)
    bounds, depths, reach = case["cu_nodes"].tolist(), case["depths"], (case["window"], case["chunk"])
    for b, prefix in enumerate(prefixes):
        rows = slice(bounds[b], bounds[b + 1])
        if sizes[b] == 0:
            continue
        mask = attention_mask(prefix, case["visible"][rows], None if depths is None else depths[rows], *reach)
        seen = torch.zeros(sizes[b], kv_heads * dim, dtype=torch.bool)
        seen[:, : mask.shape[1]] = mask
        for g in range(group):
            wrong = (out[rows].view(sizes[b], kv_heads, group, dim)[:, :, g].flatten(1) > 0) != seen
            assert not wrong.any(), (
                f"request {b}, prefix {prefix}: {int(wrong.sum())} bits wrong, first (node, key) {wrong.nonzero()[0].tolist()}"
            )
        count = mask.sum(dim=1).double()[:, None]
        weight = torch.where(count > 0, 1 / count, 0.0)[:, :, None]
        exact = weight * seen.view(-1, kv_heads, 1, dim).expand(-1, -1, group, -1).flatten(1, 2)
        step = 2 * torch.finfo(out.dtype).eps
        assert torch.allclose(out[rows].double(), exact, rtol=step, atol=0.0)
        assert torch.allclose(lse[rows].double(), count.log().expand(-1, kv_heads * group), rtol=2**-21, atol=2e-6)


def test_the_reference_mask_by_hand():
    """attention_mask against its definition in words, key by key."""
    random = torch.Generator().manual_seed(0)
    for prefix in (0, 3):
        for window, chunk in itertools.product((-1, 1, 2, 4, 100), (-1, 1, 2, 5, 64)):
            bits = torch.rand(70, 70, generator=random) < 0.5
            depths = torch.randint(0, 70, (70,), generator=random).tolist()
            mask = attention_mask(
                prefix, packed(bits, 2, random), torch.tensor(depths, dtype=torch.int32), window, chunk
            )
            mask, bits = mask.tolist(), bits.tolist()
            for i in range(70):
                for key in range(prefix + 70):
                    position = key if key < prefix else prefix + depths[key - prefix]
                    sees = key < prefix or bits[i][key - prefix]
                    if window >= 0:
                        sees = sees and prefix + depths[i] - window < position
                    if chunk >= 0:
                        sees = sees and position >= (prefix + depths[i]) - (prefix + depths[i]) % chunk
                    assert mask[i][key] == sees


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("nodes", "mask"), pairwise([1, 2, 31, 32, 33, 63, 64, 65, 128, 255, 256], [FULL, CAUSAL, UNIFORM, BITS], "cpu")
)
def test_every_bit(backend, nodes, mask):
    if is_small(backend) and (nodes > 65 and mask != BITS):
        pytest.skip("their neighbours run")
    if not is_small(backend) and not is_thorough(backend) and (nodes > 128 or mask in (FULL, CAUSAL)):
        pytest.skip("bits are looked up alike at every instruction set")
    prefixes = sized(backend, [63] if nodes % 2 else [1], [0, 1, 63, 64])
    check_every_bit(backend, prefixes, [nodes] * len(prefixes), mask=mask)


def test_every_bit_of_the_largest_tree(backend):
    if not is_thorough(backend):
        pytest.skip("seconds, or minutes")
    for mask in (BITS, UNIFORM):
        check_every_bit(backend, [63], [1024], mask=mask, group=1)


@pytest.mark.parametrize(("group", "dtype"), pairwise([1, 3, 7, 16], FLOATS, "best"), ids=str)
def test_every_bit_of_every_type_and_group(backend, dtype, group):
    for dim in sized(backend, [80, 128], [80, 128, 256]):
        prefixes, sizes = sized(backend, ([30], [35]), ([30, 0, 64], [35, 70, 5]))
        check_every_bit(backend, prefixes, sizes, mask=BITS, dtype=dtype, group=group, dim=dim, spare=2)


@pytest.mark.parametrize("layout", ["heads", "unaligned", "paged 1", "paged 3", "paged 16", "paged 128"])
@pytest.mark.parametrize("new", [False, True], ids=["nodes in the cache", "nodes beside it"])
def test_every_bit_across_pages(backend, layout, new):
    layout = allowed(backend, layout)
    for prefixes, sizes in sized(
        backend, [([15, 48, 128], [3, 17, 2])], [([15, 48, 127, 16], [3, 17, 66, 0]), ([128, 1], [1, 130])]
    ):
        check_every_bit(backend, prefixes, sizes, mask=BITS, layout=layout, new=new, spare=5)


@pytest.mark.by_tiles
@pytest.mark.parametrize("window", [1, 2, 3, 5, 64, 2**31 - 1])
@pytest.mark.parametrize("mask", MASKS)
def test_every_bit_in_a_window(backend, window, mask):
    """Positions are depths: siblings have the same position, and a leaf's cache slot means nothing."""
    if not is_thorough(backend) and (window in (3, 64) or mask not in (CHAIN, UNIFORM, BITS)):
        pytest.skip("their neighbours run")
    prefixes, sizes = sized(backend, ([3, 65], [14, 5]), ([0, 3, 63, 65, 130], [9, 40, 64, 3, 70]))
    for new in sized(backend, [False], [False, True]):
        check_every_bit(backend, prefixes, sizes, mask=mask, window=window, new=new, group=1, spare=1)


@pytest.mark.parametrize(("chunk", "mask"), pairwise([1, 2, 5, 64, 2**31 - 1], [CHAIN, UNIFORM, BITS], "cpu"), ids=str)
def test_every_bit_in_chunks(backend, chunk, mask):
    prefixes, sizes = sized(backend, ([3, 65], [14, 5]), ([0, 3, 63, 65, 130], [9, 40, 64, 3, 70]))
    for new in sized(backend, [False], [False, True]):
        for options in ({}, {"dim": 128}, {"window": 4}):
            check_every_bit(backend, prefixes, sizes, mask=mask, chunk=chunk, new=new, group=1, spare=1, **options)


def test_rows_that_see_nothing(backend):
    """No prefix and no bits, and everything out of the window's reach: out 0 and lse -inf, neighbours unchanged."""
    for prefix, window, layout in ((0, -1, "rows"), (40, 1, "paged 16")):
        case, _ = solved([prefix, 20], [6, 3], mask=FULL, window=window, layout=layout, spare=1)
        visible = case["visible"].clone()
        visible[[0, 3, 4]] = ~torch.tensor(63)  # bits of missing nodes
        out, lse = run(backend, case | {"visible": visible})
        assert (out[[0, 3, 4]] == 0).all() and (lse[[0, 3, 4]] == -torch.inf).all()
        assert out[[1, 2, 5, 6, 7, 8]].isfinite().all() and (lse[[1, 2, 5, 6, 7, 8]] > -torch.inf).all()
        assert (out[[1, 2, 5]] != 0).any(dim=-1).all()


# ---- poison ----


@pytest.mark.by_tiles
@pytest.mark.parametrize(
    ("value", "name"), pairwise([math.nan, math.inf, -math.inf], ["k_cache", "v_cache", "k_new", "v_new"], "cpu")
)
def test_a_broken_node_breaks_only_rows_that_see_it(backend, name, value):
    """To the bit: a row that does not see the node has the same result as with a sound node."""
    new = name.endswith("_new")
    for dtype in sized(backend, [torch.bfloat16], FLOATS):
        for mask, node, dim in ((UNIFORM, 3, 64), (STAR, 5, 64), (BITS, 2, 256)):
            prefixes, sizes = sized(backend, ([5], [9]), ([62, 5], [9, 4]))
            case, _ = solved(prefixes, sizes, dtype=dtype, mask=mask, new=new, heads=(2, 3), dim=dim, layout="paged 3")
            sees = case["visible"][: sizes[0], 0] >> node & 1 == 1
            sees = torch.cat([sees, torch.zeros(sum(sizes[1:]), dtype=torch.bool)])
            broken, fine = case[name].clone(), case[name].clone()
            slot = prefixes[0] + node
            where = (node,) if new else (int(case["block_table"][0, slot // 3]), slot % 3)
            fine[where] = 0.0
            broken[(*where, 0)] = value  # one key head entirely, and one number of the other
            fine[(*where, 1)] = broken[(*where, 1)] = 0.25
            broken[(*where, 1, 7)] = value
            before, after = runs(backend, case | {name: fine}), runs(backend, case | {name: broken})
            assert_same_runs(after, before, ~sees)
            assert sees.any() and not sees.all()
            out = after[0][sees].view(-1, 2, 3, dim)
            if name.startswith("v"):
                assert not out[:, 0].isfinite().any() and not out[:, 1, :, 7].isfinite().any()
                others = [d for d in range(dim) if d != 7]
                whole = before[0][sees].view(-1, 2, 3, dim)
                assert_same_bits(out[:, 1][..., others], whole[:, 1][..., others])
                assert_same_bits(after[1], before[1])
            elif math.isnan(value):
                assert out.isnan().all() and after[1][sees].isnan().all()


@pytest.mark.by_tiles
@pytest.mark.parametrize("node", [0, 9, 19])
def test_a_row_that_sees_only_infinity_gets_infinity(backend, node):
    case, _ = solved([8], [20], mask=BITS, window=20)
    case = case | {"visible": torch.full((20, 1), 1 << node), "depths": torch.full((20,), 19, dtype=torch.int32)}
    case |= {"window": 1, "v_cache": case["v_cache"].clone()}
    case["v_cache"][0, 8 + node] = math.inf
    out, lse = run(backend, case)
    assert (out == math.inf).all() and lse.isfinite().all()


@pytest.mark.by_tiles
def test_a_broken_prefix_key_breaks_only_rows_that_reach_it(backend):
    case, _ = solved([40], [8], mask=CHAIN, window=6, heads=(1, 2))
    fine = case["v_cache"].clone()
    for key in (35, 37, 39):  # node i stands at 40 + i and sees positions from 35 + i on
        broken = fine.clone()
        broken[0, key] = math.nan
        before, after = runs(backend, case), runs(backend, case | {"v_cache": broken})
        reaches = torch.arange(8) <= key - 35
        assert_same_runs(after, before, ~reaches)
        assert after[0][reaches].isnan().all()


def test_a_broken_query_breaks_only_its_own_row(backend):
    for dtype in sized(backend, [torch.bfloat16], FLOATS):
        case, _ = solved([70, 3], [5, 4], heads=(2, 3), dtype=dtype)
        before = runs(backend, case)
        for value in (math.nan, math.inf):
            q = case["q"].clone()
            q[2, 4, 11] = value
            after = runs(backend, case | {"q": q})
            others = torch.ones(9, 6, dtype=torch.bool)
            others[2, 4] = False
            assert_same_runs(after, before, others)
            if math.isnan(value):
                assert after[0][2, 4].isnan().all() and after[1][2, 4].isnan()


@pytest.mark.by_tiles
def test_nothing_unread_leaks(backend):
    """Cases are poisoned wherever nothing may be read. This case has much of that: unused slots, pages, nodes and rows."""
    for layout in ("rows", "paged 16"):
        for new in (False, True):
            case, _ = solved([17, 3], [4, 2], layout=layout, new=new, mask=CAUSAL, window=3, spare=30, inputs=SINK)
            out, lse = run(backend, case)
            assert out.isfinite().all() and not lse.isnan().any() and (lse < math.inf).all()
            cached = case["k_cache"]
            assert cached.isnan().sum() > cached.isfinite().sum()


@pytest.mark.by_tiles
def test_zero_values_stay_zero(backend):
    """Not true if a hidden value comes in with however small a weight."""
    case, _ = solved([0], [6], mask=UNIFORM, heads=(1, 2), new=True)
    v_new = torch.full_like(case["v_new"], 1e30)
    sees = case["visible"][:6, 0]
    for node in range(6):
        hidden = sees >> node & 1 == 0
        only = v_new.clone()
        only[torch.arange(6) != node] = 0.0
        out, _ = run(backend, case | {"v_new": only})
        assert (out[hidden] == 0).all() and (out[~hidden] != 0).all()
