"""attention_tree on every backend: against fp64 with a bound on each element, and changes that must not change a bit.

Visibility: test_attention_masks.py. Planted faults: make mutants.
"""

import emulator
import pytest
import torch
from attention_cases import BITS, CHAIN, FLAT, FULL, INPUTS, LAYOUTS, MASKS, PEAKY, RANDOM, SINK, UNUSED_PAGES
from attention_checks import (
    FLOAT16,
    FLOATS,
    allowed,
    assert_right,
    assert_same_runs,
    check,
    is_small,
    is_thorough,
    run,
    runs,
    sized,
    solved,
    threads,
)  # fmt: skip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.pairwise import pairwise
from support.steps import to

import pass_ext
from pass_ext.ops.attention import HEAD_DIMS, TWO_WIDTHS
from pass_ext.reference.attention import attention_terms
from pass_ext.testing import assert_error_within, assert_same_bits

FAST_WIDTHS = [*((dim, dim) for dim in HEAD_DIMS), TWO_WIDTHS]

# ---- the exact result ----


@pytest.mark.by_tiles
@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("widths", FAST_WIDTHS, ids=str)
def test_every_type_and_head_size(backend, dtype, widths):
    options = dict(dim=widths[0], value_dim=widths[1], dtype=dtype)
    check(backend, [70, 0], [5, 2], heads=(1, 3), **options)
    check(backend, [3, 64, 9], [30, 1, 0], heads=(2, 1), layout="paged 3", new=True, spare=2, **options)
    if not is_small(backend):
        check(backend, [130, 3, 0, 64], [7, 0, 40, 1], layout="paged 16", new=True, spare=2, **options)
        check(backend, [100, 9], [3, 30], layout="gaps", heads=(3, 2), inputs=PEAKY, **options)


WIDTHS = [(16, 16), (48, 32), (64, 128), (160, 160), (192, 112), (256, 272), (512, 512), (576, 512)]


@pytest.mark.by_tiles
@pytest.mark.sanitizer
@pytest.mark.parametrize(("widths", "dtype"), pairwise(WIDTHS, FLOATS, "cpu"), ids=str)
def test_keys_and_values_of_any_width(backend, dtype, widths):
    dim, value_dim = widths
    options = dict(dim=dim, value_dim=value_dim, dtype=dtype)
    check(backend, [70, 0], [5, 2], heads=(1, 3), **options)
    if is_small(backend) and dim > 192 and widths != WIDTHS[-1]:
        return
    check(
        backend, [3, 64, 9], [3, 1, 0], heads=(2, 2), layout="paged 3", new=True, spare=2, window=40, sinks=True,
        softcap=20.0, **options,
    )  # fmt: skip
    if not is_small(backend):
        check(backend, [1000, 3, 0, 64], [7, 0, 80, 1], layout="paged 16", new=True, spare=2, **options)
        check(backend, [100, 9], [3, 30], layout="gaps", heads=(3, 2), inputs=PEAKY, **options)


@pytest.mark.by_tiles
def test_values_that_are_the_first_numbers_of_the_keys(backend):
    """One latent for both, as multi-head latent attention caches it: to the bit what a copy gives."""
    for dtype in FLOATS:
        case, _ = solved([130], [4], heads=(1, 5), dim=576, value_dim=512, dtype=dtype, new=True)
        latent = {name: case[f"k_{name}"][..., :512] for name in ("cache", "new")}
        shared = {f"v_{name}": rows for name, rows in latent.items()}
        copies = {f"v_{name}": rows.clone() for name, rows in latent.items()}
        out, lse = run(backend, case | shared)
        assert_right((out, lse), case | shared, attention_terms(**case | shared))
        assert_same_runs([out, lse], list(run(backend, case | copies)))


@pytest.mark.by_tiles
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 33])
def test_every_number_of_heads(backend, group):
    for kv_heads, nodes in sized(backend, [(1, 1), (2, 5)], [(1, 1), (2, 9), (5, 3)]):
        for dtype in FLOATS:
            check(backend, [sized(backend, 40, 200)], [nodes], heads=(kv_heads, group), dtype=dtype)


@pytest.mark.by_tiles
@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 127, 129, 1000, 8192])
def test_every_length(backend, prefix):
    if is_small(backend) and prefix > 1000:
        pytest.skip("half a minute")
    for new in (False, True):
        for layout in ("heads", "paged 16"):
            check(backend, [prefix], [sized(backend, 3, 6)], heads=(1, 4), new=new, layout=layout, dtype=torch.bfloat16)
            check(backend, [prefix], [2], heads=(1, 3), new=new, layout=layout, dtype=torch.float32)


@pytest.mark.by_tiles
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inputs", INPUTS)
def test_every_shape_of_weights(backend, dtype, inputs):
    """Random, peaky and flat weights, and half of the weight on one key: rounded weights add up differently in each."""
    for prefix, nodes in sized(backend, [(300, 4)], [(1000, 10), (70, 33)]):
        check(backend, [prefix], [nodes], heads=(1, 4), dim=128, dtype=dtype, inputs=inputs)


def test_a_row_with_many_small_weights(backend):
    """Together they are as heavy as the one large weight; rounded down to 0 they would be missed."""
    for dtype in FLOATS:
        check(backend, [sized(backend, 190, 6000)], [1], heads=(1, 1), dtype=dtype, inputs=SINK)


@pytest.mark.by_tiles
@pytest.mark.sanitizer
@pytest.mark.parametrize(("layout", "new"), pairwise(LAYOUTS, [False, True], "cpu"))
def test_every_layout(backend, layout, new):
    layout = allowed(backend, layout)
    for prefixes, sizes in sized(
        backend, [([17, 0, 48], [6, 3, 16])], [([17, 0, 48, 250], [6, 3, 16, 0]), ([129], [70])]
    ):
        for dtype in (torch.bfloat16, torch.float32):
            check(backend, prefixes, sizes, layout=layout, new=new, dtype=dtype, spare=3)


@pytest.mark.by_tiles
@pytest.mark.parametrize("mask", MASKS)
def test_every_kind_of_tree(backend, mask):
    check(backend, [30, 7], [26, 63], mask=mask, heads=(1, 2))
    if not is_small(backend):
        check(backend, [100, 31], [63, 9], mask=mask)
        check(backend, [65], [256], mask=mask, heads=(1, 2), dtype=torch.float16)


@pytest.mark.by_tiles
@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_softcap(backend, softcap):
    for inputs in (RANDOM, PEAKY, FLAT):
        for dtype in sized(backend, [torch.bfloat16], FLOATS):
            check(backend, [66], [4], softcap=softcap, inputs=inputs, dtype=dtype, heads=(1, 2))


@pytest.mark.parametrize("softcap", [1e4, 1e9, 3e38])
def test_a_softcap_far_beyond_the_logits_is_none(backend, softcap):
    case, exact = solved([66], [4], heads=(1, 2), dtype=torch.float32)
    assert_right(run(backend, case | {"softcap": softcap}), case, exact)


@pytest.mark.parametrize("scale", [1.0, 0.05, -0.2, 0.0])
def test_scale(backend, scale):
    for dtype in sized(backend, [torch.bfloat16], FLOATS):
        check(backend, [66], [4], scale=scale, dtype=dtype, heads=(1, 2), inputs=FLAT if scale == 1.0 else RANDOM)


@pytest.mark.by_tiles
@pytest.mark.parametrize("scale", [1e10, -1e10])
def test_logits_of_billions_leave_one_key(backend, scale):
    for dtype in sized(backend, [torch.bfloat16], FLOATS):
        case, exact = solved([66], [4], scale=scale, dtype=dtype, heads=(1, 2))
        out, lse = run(backend, case)
        torch.testing.assert_close(out.double(), exact.out, rtol=2.0**-8, atol=0.0)
        torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-6, atol=0.0)


@pytest.mark.by_tiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_hardly_worse_than_rounding_the_exact_result(backend, dtype):
    """The bound holds for every input, so it is wide; on random inputs the error is little more than out's own rounding."""
    for prefix, nodes in sized(backend, [(120, 8)], [(64, 16), (1000, 16), (4000, 8)]):
        case, exact = solved([prefix], [nodes], heads=(1, 4), dim=128, dtype=dtype, inputs=RANDOM)
        rms = lambda got, exact=exact: (got.double() - exact.out).square().mean().sqrt().item()  # noqa: E731
        assert rms(run(backend, case)[0]) <= 1.5 * rms(exact.out.to(dtype))


def test_in_fp32_as_close_as_pytorch(backend):
    for prefix, nodes, inputs in sized(
        backend, [(120, 8, RANDOM)], [(200, 8, RANDOM), (3000, 6, RANDOM), (1000, 6, FLAT)]
    ):
        case, exact = solved([prefix], [nodes], heads=(2, 3), dim=96, dtype=torch.float32, inputs=inputs)
        with threads(1):
            plain = attention_terms(**case, precision=torch.float32)
        out, lse = run(backend, case)
        assert_error_within(out, plain.out, exact.out)
        assert_error_within(lse, plain.lse, exact.lse)


@st.composite
def any_case(draw, longest, most_nodes, most_requests, most_heads):
    requests = draw(st.integers(1, most_requests))
    number = lambda most: st.lists(st.integers(0, most), min_size=requests, max_size=requests)  # noqa: E731
    return dict(
        prefixes=draw(number(longest)),
        sizes=draw(number(most_nodes)),
        seed=draw(st.integers(0, 2**31)),
        heads=(draw(st.integers(1, most_heads)), draw(st.integers(1, 9))),
        dim=draw(st.sampled_from([*HEAD_DIMS, TWO_WIDTHS[0]])),
        value_dim=draw(st.sampled_from([None, None, None, 64, 128])),
        dtype=draw(st.sampled_from(FLOATS)),
        layout=draw(st.sampled_from(LAYOUTS)),
        new=draw(st.booleans()),
        mask=draw(st.sampled_from(MASKS)),
        inputs=draw(st.sampled_from(INPUTS)),
        window=draw(st.sampled_from([-1, -1, 1, 2, 5, 40, 1000])),
        softcap=draw(st.sampled_from([0.0, 0.0, 20.0])),
        sinks=draw(st.booleans()),
        chunk=draw(st.sampled_from([-1, -1, 1, 3, 8, 64, 100])),
        listed=draw(st.sampled_from([None, None, None, 0.0, 0.2, 1.0])),
        spare=draw(st.sampled_from([0, 1, 60])),
    )


@pytest.mark.by_tiles
def test_anything(backend):
    limits = sized(backend, (200, 30, 3, 2), (300, 70, 4, 4))

    @settings(
        max_examples=60 if is_thorough(backend) else 15,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(any_case(*limits))
    def right(case):
        check(backend, **case | {"layout": allowed(backend, case["layout"])})

    right()


@pytest.mark.by_tiles
@pytest.mark.parametrize("window", [1, 63, 64, 65, 130, 200])
def test_a_window_far_after_the_start(backend, window):
    """Tiles of keys out of every row's reach, which are poison, and tiles that the root sees in full but its descendants do
    not.
    """
    for prefix, nodes in sized(backend, [(190, 40)], [(1000, 30), (5003, 3), (64, 70), (190, 40)]):
        options = dict(window=window, heads=(1, 3), layout="paged 16", mask=CHAIN, new=window > 64)
        for dtype in sized(backend, [torch.bfloat16], FLOATS):
            check(backend, [prefix], [nodes], dtype=dtype, **options)


@pytest.mark.parametrize("chunk", [1, 63, 64, 65, 130, 200, 10_000])
def test_a_chunk_far_after_the_start(backend, chunk):
    """The same of chunks, whose start the nodes of one step may have before and after them."""
    for prefix, nodes in sized(backend, [(190, 40)], [(1000, 30), (5003, 3), (64, 70), (190, 40)]):
        options = dict(chunk=chunk, heads=(1, 3), layout="paged 16", mask=CHAIN, new=chunk > 64)
        for dtype in sized(backend, [torch.bfloat16], FLOATS):
            for dim in (64, 128):  # on a GPU 128 has kernels of its own
                if dim == 64 or not backend.name.startswith("cpu"):
                    check(backend, [prefix], [nodes], dtype=dtype, dim=dim, **options)
            check(backend, [prefix], [nodes], dtype=dtype, dim=128, window=50, **options)


# ---- sinks ----


@pytest.mark.by_tiles
@pytest.mark.sanitizer
@pytest.mark.parametrize(("widths", "dtype"), pairwise(FAST_WIDTHS, FLOATS, "cpu"), ids=str)
def test_sinks(backend, dtype, widths):
    """Every fifth head has none; blocks of a GPU share the long prefix."""
    options = dict(dim=widths[0], value_dim=widths[1], dtype=dtype, sinks=True)
    check(backend, [70, 0], [5, 2], heads=(2, 3), **options)
    prefixes, sizes = sized(backend, ([200, 0], [30, 1]), ([3000, 0, 64], [30, 1, 0]))
    check(
        backend, prefixes, sizes, heads=(2, 4), layout="paged 16", new=True, spare=2, window=100, softcap=20.0,
        **options,
    )  # fmt: skip


def test_sinks_leave_the_lse_alone(backend):
    for dtype in FLOATS:
        case, _ = solved([sized(backend, 100, 300)], [9], dtype=dtype, heads=(2, 4), sinks=True)
        with_sinks, without = runs(backend, case), runs(backend, case | {"sinks": None})
        assert_same_runs(with_sinks[1::2], without[1::2])
        none = runs(backend, case | {"sinks": torch.full((8,), -torch.inf)})
        assert_same_runs(none, without)


def test_sinks_of_any_size(backend):
    """Far above all logits nothing is left, far below them everything; NaN is a matter of its own head."""
    for dtype in FLOATS:
        case, _ = solved([100], [4], dtype=dtype, heads=(2, 4))
        sinks = torch.tensor([-torch.inf, -1e38, -200.0, 200.0, 1e38, torch.inf, torch.nan, -torch.inf])
        out, without = run(backend, case | {"sinks": sinks})[0], run(backend, case)[0]
        if is_small(backend):
            torch.testing.assert_close(out[:, [0, 1, 2, 7]], without[:, [0, 1, 2, 7]])
        else:
            assert_same_bits(out[:, [0, 1, 2, 7]], without[:, [0, 1, 2, 7]])
        assert (out[:, 3:6] == 0).all() and out[:, 6].isnan().all()


def test_rows_that_see_nothing_get_nothing_beside_a_sink(backend):
    for dtype in FLOATS:
        case, _ = solved([0, 30], [3, 2], dtype=dtype, heads=(1, 4), spare=2)
        visible = case["visible"].clone()
        visible[1] = 0
        for sink in (-torch.inf, 0.0, 50.0, torch.inf):
            out, lse = run(backend, case | {"visible": visible, "sinks": torch.full((4,), sink)})
            assert (out[[1, 5, 6]] == 0).all() and (lse[[1, 5, 6]] == -torch.inf).all()


def test_sinks_may_have_any_float_type(backend):
    case, _ = solved([30], [2], heads=(1, 4))
    sinks = torch.tensor([0.5, 2.0, -1.0, 3.0])
    expected = runs(backend, case | {"sinks": sinks})
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert_same_runs(runs(backend, case | {"sinks": sinks.to(dtype)}), expected)


# ---- the shapes that a decoder pads with ----


def test_no_rows_and_no_requests(backend):
    for prefixes, sizes, spare in (([], [], 0), ([], [], 3), ([5, 0], [0, 0], 0), ([5], [0], 2)):
        for layout in ("rows", "paged 16"):
            case, _ = solved(prefixes, sizes, layout=layout, spare=spare)
            out, lse = run(backend, case)
            assert out.shape == case["q"].shape and lse.shape == out.shape[:2]
            assert (out == 0).all() and (lse == -torch.inf).all()


def test_rows_without_a_request(backend):
    """Their queries are NaN, their bits and depths garbage."""
    for new in (False, True):
        case, exact = solved([9, 30, 4], [3, 0, 5], spare=9, window=4, new=new)
        out, lse = run(backend, case)
        assert_right((out, lse), case, exact)
        assert (out[8:] == 0).all() and (lse[8:] == -torch.inf).all()


def test_rows_before_the_first_bound_belong_to_no_request(backend):
    case, _ = solved([9, 30], [3, 2], new=True)
    case = case | {"cu_nodes": torch.tensor([2, 3, 5], dtype=torch.int32)}
    exact = attention_terms(**case)
    out, lse = run(backend, case)
    assert_right((out, lse), case, exact)
    assert (out[:2] == 0).all() and (lse[:2] == -torch.inf).all()


def test_queries_need_not_be_contiguous(backend):
    case, exact = solved([20], [4], heads=(2, 2))
    wide = torch.full((4, 3, 4, 64), torch.nan, dtype=case["q"].dtype)
    wide[:, 1] = case["q"]
    assert_right(run(backend, case | {"q": wide[:, 1]}), case, exact)


def test_bits_may_be_a_slice_of_wider_ones(backend):
    case, exact = solved([20, 9], [4, 3])
    wide = torch.full((7, 3), -1)
    wide[:, 1:2] = case["visible"]
    assert_right(run(backend, case | {"visible": wide[:, 1:2]}), case, exact)


def test_pages_before_the_window_may_be_gone(backend):
    case, exact = solved([100], [3], layout="paged 16", window=20)
    table = case["block_table"].clone()
    table[:, : (100 - 20 + 1) // 16] = -1
    assert_right(run(backend, case | {"block_table": table}), case, exact)


def test_two_requests_may_share_pages(backend):
    case, _ = solved([33, 33], [2, 2], layout="paged 16", new=True)
    case = case | {"block_table": case["block_table"][:1].repeat(2, 1)}
    assert_right(run(backend, case), case, attention_terms(**case))


def test_a_cache_past_two_billion_elements(backend):
    if not is_thorough(backend):
        pytest.skip("the address arithmetic is the same at every instruction set, and one reservation of 4 GB will do")
    torch.utils.deterministic.fill_uninitialized_memory = False  # or 4 GB would be written, not reserved
    case, _ = solved([4, 7], [2, 3])
    far = 2**31 + 64
    storage = torch.empty(far + 10 * 2 * 64, dtype=torch.bfloat16, device=backend.device)
    cache = storage.as_strided((2, 10, 2, 64), (far, 2 * 64, 64, 1))
    cache.copy_(case["k_cache"])
    exact = attention_terms(**case | {"v_cache": case["k_cache"]})
    moved = to({name: value for name, value in case.items() if "cache" not in name}, backend.device)
    out, lse = pass_ext.attention_tree(**moved, k_cache=cache, v_cache=cache)
    assert_right((out.cpu(), lse.cpu()), case, exact)


# ---- the same bits ----


def test_the_same_bits_in_every_run(backend):
    case, _ = solved(*sized(backend, ([60, 9], [5, 2]), ([700, 9, 64], [30, 0, 12])), layout="paged 3")
    first = runs(backend, case)
    for _ in range(sized(backend, 1, 3)):
        assert_same_runs(runs(backend, case), first)


@pytest.mark.by_tiles
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_on_the_cpu_the_same_bits_for_any_number_of_threads_and_any_batch(backend, dtype):
    if not backend.name.startswith("cpu"):
        pytest.skip("a GPU divides the work by its amount")
    prefixes, sizes = [700, 9, 64, 2000], [30, 0, 12, 3]
    case, _ = solved(prefixes, sizes, dtype=dtype, heads=(2, 3))
    results = []
    for count in (1, 2, 3, 7):
        with threads(count):
            results.append(pass_ext.attention_tree(**case))
    for other in results[1:]:
        assert_same_runs(other, results[0])
    for b in range(4):
        first, last = case["cu_nodes"][b : b + 2].tolist()
        rows = slice(first, last)
        alone = case | {
            "q": case["q"][rows], "visible": case["visible"][rows], "prefix_lens": case["prefix_lens"][b : b + 1],
            "k_cache": case["k_cache"][b : b + 1], "v_cache": case["v_cache"][b : b + 1],
            "cu_nodes": torch.tensor([0, sizes[b]], dtype=torch.int32),
        }  # fmt: skip
        assert_same_runs(run(backend, alone), [tensor[rows] for tensor in results[0]])


@pytest.mark.by_tiles
def test_layouts_do_not_change_a_bit(backend):
    """The same keys in another place: dense, paged, in the cache or beside it."""
    expected = None
    for layout in ("rows", "heads", "gaps", "paged 3", "paged 128"):
        for new in (False, True):
            case, _ = solved([50, 70], [4, 3], layout=layout, new=new, mask=FULL)
            contents = list(_contents_of(case))
            if expected is None:
                expected, first = contents, runs(backend, case)
            assert all(torch.equal(left, right) for left, right in zip(contents, expected, strict=True))
            assert_same_runs(runs(backend, case), first)


def _contents_of(case):
    """All keys in use, request by request: equal in all layouts that are compared."""
    from pass_ext.reference.attention import _rows_of

    bounds = case["cu_nodes"].tolist()
    for b, prefix in enumerate(case["prefix_lens"].tolist()):
        table = None if case["block_table"] is None else case["block_table"][b]
        keys = torch.arange(prefix + bounds[b + 1] - bounds[b])
        yield _rows_of(case["k_cache"], case["k_new"], b, table, prefix, bounds[b], keys)
        yield _rows_of(case["v_cache"], case["v_new"], b, table, prefix, bounds[b], keys)


def test_numbers_that_do_not_fit_are_clamped_on_a_gpu(backend):
    """Nothing is read out of bounds and no neighbour changes, though the first request's numbers are nonsense."""
    if backend.name.startswith("cpu"):
        pytest.skip("refused there: test_attention_refusals.py")
    for layout in ("rows", "paged 16"):
        case, _ = solved([30, 9], [3, 4], layout=layout, window=20, chunk=16)
        expected = runs(backend, case)
        deep = torch.full((7,), 2**31 - 1, dtype=torch.int32)
        deep[3:] = case["depths"][3:]
        changes = [
            {"prefix_lens": torch.tensor([2**31 - 1, 9], dtype=torch.int32)},
            {"prefix_lens": torch.tensor([-5, 9], dtype=torch.int32)},
            {"cu_nodes": torch.tensor([-7, 3, 7], dtype=torch.int32)},
            {"depths": deep},
        ]
        if layout != "rows":
            table = case["block_table"].clone()
            table[0] = torch.tensor(UNUSED_PAGES, dtype=torch.int32).repeat(len(table[0]))[: len(table[0])]
            changes.append({"block_table": table})
        for change in changes:
            assert_same_runs(runs(backend, case | change), expected, slice(3, 7))
        out, lse = run(backend, case | {"max_nodes": 3})  # one row too many: it belongs to no request
        assert out.isfinite().all() and (out[6] == 0).all() and (lse[6] == -torch.inf).all()


@pytest.mark.parametrize("layout", ["rows", "paged 1"])
def test_a_cache_with_no_room_for_the_nodes_on_a_gpu(backend, layout):
    """Nothing is read out of bounds; the result does not matter."""
    if backend.name.startswith("cpu"):
        pytest.skip("refused there: test_attention_refusals.py")
    case, _ = solved([1, 2], [6, 5], layout=layout)
    for slots in (3, 1, 0) if layout == "rows" else (3, 1):
        if layout == "rows":
            small = {name: case[name][:, :slots].contiguous() for name in ("k_cache", "v_cache")}
        else:
            small = {"block_table": case["block_table"][:, :slots].contiguous()}
        out, lse = run(backend, case | small)
        assert out.shape == case["q"].shape and lse.shape == out.shape[:2]


# ---- what only a GPU can show ----


@pytest.mark.parametrize("new", [False, True])
def test_replays_in_a_cuda_graph_with_other_lengths_and_trees(cuda, new):
    """Captured with the fewest nodes and replayed with more, fewer and none: only shapes are fixed."""
    steps = [
        solved(prefixes, sizes, seed=seed, layout="paged 16", new=new, spare=40 - sum(sizes), mask=mask, window=50)[0]
        for seed, (prefixes, sizes, mask) in enumerate(
            [
                ([1, 0], [1, 0], FULL),
                ([900, 30], [7, 20], BITS),
                ([0, 3000], [0, 33], "uniform"),
                ([64, 64], [20, 20], "chain"),
            ]
        )
    ]
    held = dict(steps[0], max_nodes=40)
    rows, pages = 40, max(step["block_table"].shape[1] for step in steps)
    pool = max(step["k_cache"].shape[0] for step in steps)
    held["visible"] = torch.zeros(rows, 1, dtype=torch.int64)
    held["block_table"] = torch.zeros(2, pages, dtype=torch.int32)
    held["k_cache"], held["v_cache"] = (torch.zeros(pool, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    held = to(held, cuda.device)
    pass_ext.attention_tree(**held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = pass_ext.attention_tree(**held)
    for step in [*steps, *reversed(steps)]:
        for name, value in step.items():
            if isinstance(value, torch.Tensor):
                held[name][tuple(slice(size) for size in value.shape)] = value.to(cuda.device)
        graph.replay()
        assert_same_runs(result, pass_ext.attention_tree(**held))
        exact = attention_terms(**step | {"max_nodes": 40})
        assert_right(tuple(tensor.cpu() for tensor in result), step, exact)


def test_more_work_than_a_schedule_can_count_is_refused(cuda):
    """2^17 requests, 8 key heads, 2^18 slots in tiles of 64: 2^32 tiles. All of them lie at the same few bytes."""
    requests, slots = 2**17, 2**18
    q = torch.zeros(requests, 8, 64, dtype=torch.float16, device=cuda.device)
    cache = q.new_zeros(1, 1, 8, 64).expand(requests, slots, 8, 64)
    bounds = torch.arange(requests + 1, dtype=torch.int32, device=cuda.device)
    visible = torch.ones(requests, 1, dtype=torch.int64, device=cuda.device)
    with pytest.raises(
        RuntimeError, match=r"must multiply to less than 2\^31 on CUDA, got 131072 requests, 8 key heads"
    ):
        pass_ext.attention_tree(q, cache, cache, bounds[:-1] * 0, bounds, visible, 1)


def test_the_plan_counts_in_64_bits_what_a_schedule_counts_in_32():
    """The same without memory: 2^31 - 2^14 tiles are planned, a slot more in each request are too many."""
    fits = dict(
        requests=2**14,
        kv_heads=1,
        heads=1,
        head_dim=64,
        value_dim=64,
        max_nodes=1,
        slots=64 * (2**17 - 1) - 1,
        type=FLOAT16,
        most_blocks=264,
        multiprocessors=132,
    )
    with emulator.session({}) as machine:
        assert machine.attention_workspace(fits) == 264 * (2 * 16 * 72 + 6)  # parts, and a shared tile and its rows
        with pytest.raises(
            RuntimeError, match=r"must multiply to less than 2\^31 on CUDA, got 16384 requests.*: 2147483648"
        ):
            machine.attention_workspace(fits | {"slots": fits["slots"] + 1})


def test_debug_mode_checks_on_the_gpu_what_the_cpu_always_checks(cuda, debug_mode):
    case = to(solved([30, 9], [3, 4], layout="paged 16", window=20)[0], cuda.device)
    broken = [
        ({"depths": torch.tensor([0, 1, 2, 0, 1, 4, 3], dtype=torch.int32)}, "depths must be in"),
        ({"prefix_lens": torch.tensor([30, 2000], dtype=torch.int32)}, "request 1 needs 2004 slots"),
        ({"cu_nodes": torch.tensor([0, 5, 3], dtype=torch.int32)}, "cu_nodes must rise"),
        ({"cu_nodes": torch.tensor([0, 3, 8], dtype=torch.int32)}, "cu_nodes must rise"),
        ({"block_table": torch.full_like(case["block_table"], 99)}, "block_table must name pages below"),
    ]
    pass_ext.attention_tree(**case)
    for change, message in broken:
        with pytest.raises(IndexError, match=message):
            pass_ext.attention_tree(**to(case | change, cuda.device))
