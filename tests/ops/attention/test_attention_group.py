"""attention_tree to keys that are wide, or listed, or added in one order: the heads that share a key are the rows of a GPU's
fragments, in 16 bits.
"""

import pytest
import torch
from attention_cases import BITS, BUSHY, CHAIN, FLAT, ORDERED, PEAKY, SINK, UNIFORM, attention_case
from attention_checks import (
    BFLOAT16,
    assert_right,
    assert_same_runs,
    check,
    is_thorough,
    run,
    run_and_record,
    run_on_gpu,
    sized,
    solved,
)
from emulator import session
from support.pairwise import pairwise
from support.steps import to
from test_attention_one_row import assert_rows_are_alone

import pass_ext
from pass_ext.reference.attention import AttentionTerms, attention_terms

FLOATS = torch.bfloat16, torch.float16
WIDTHS = (576, 512), (512, 512), (256, 256), (192, 128), (128, 128), (64, 64)
LATENT = dict(dim=576, value_dim=512)
NARROW = dict(dim=192, value_dim=128)
LISTED = dict(dim=128, listed=0.5)


def latents(case):
    """The case whose values are the first numbers of its keys, in the same memory."""
    return case | {
        f"v_{name}": case[f"k_{name}"][..., :512] for name in ("cache", "new") if case[f"k_{name}"] is not None
    }


def check_latents(backend, *arguments, **options):
    case = latents(solved(*arguments, **LATENT, **options)[0])
    assert_right(run(backend, case), case, attention_terms(**case))


def check_narrow(backend, *arguments, **options):
    """Values narrower than keys, in one order: without it they have a kernel of their own."""
    case, exact = solved(*arguments, **NARROW, **options)
    assert_right(run(backend, case | {"batch_invariant": True}), case, exact)


@pytest.mark.sanitizer
@pytest.mark.parametrize(("group", "dtype"), pairwise([1, 4, 16, 17, 40], FLOATS, "cpu"), ids=str)
def test_every_width_and_number_of_heads(backend, dtype, group):
    """Less than a tile of fragments, one, and more; less than a block of two, and more."""
    for dim, value_dim in WIDTHS:
        case, exact = solved([37, 0], [2, 1], heads=(1, group), dim=dim, value_dim=value_dim, dtype=dtype)
        assert_right(run(backend, case | {"batch_invariant": True}), case, exact)
    check_latents(backend, [37, 0], [2, 1], heads=(1, group), dtype=dtype)
    check(backend, [70, 0], [3, 2], heads=(2, group), dtype=dtype, spare=1, **LISTED)


def test_128_heads_of_one_latent(backend):
    for new in sized(backend, (True,), (False, True)):
        prefix = sized(backend, 45, 3000 if is_thorough(backend) else 300)
        check_latents(backend, [prefix], [sized(backend, 1, 6)], heads=(1, 128), new=new)


@pytest.mark.parametrize("places", [1, 31, 32, 33, 64, 65, 127, 256, 257, 300, 513])
def test_every_length(backend, places):
    """Around the ends of tiles of 32 and of shares of 256; the last row of a chain sees all."""
    nodes = min(places, 2)
    check_latents(backend, [places - nodes], [nodes], heads=(1, 8), mask=CHAIN, new=places % 2 == 0)
    check_narrow(backend, [places - nodes], [nodes], heads=(1, 9), mask=CHAIN, new=places % 2 == 1)


@pytest.mark.parametrize("layout", ["heads", "gaps", "paged 1", "paged 3", "paged 16"])
@pytest.mark.parametrize("new", [False, True], ids=["nodes in the cache", "nodes beside it"])
def test_every_layout(backend, layout, new):
    options = dict(layout=layout, new=new, spare=2)
    check_narrow(backend, [40, 3, 0], [3, 0, 2], heads=(2, 8), **options)
    check_latents(backend, [40, 3, 0], [3, 0, 1], heads=(1, 8), **options)


@pytest.mark.parametrize("mask", [CHAIN, BUSHY, BITS])
def test_trees_of_up_to_64_nodes(backend, mask):
    for sizes in sized(backend, ([64],), ([1, 64, 33], [200])):
        check(backend, [9] * len(sizes), sizes, heads=(1, 8), mask=mask, **LISTED | {"listed": 1.0})
        check_narrow(backend, [9] * len(sizes), sizes, heads=(1, 8), mask=mask)
    check_latents(backend, [30, 5], sized(backend, [6, 1], [64, 1]), heads=(1, 16), mask=mask)


@pytest.mark.parametrize(("listed", "dtype"), pairwise([0.0, 0.1, 0.7], FLOATS, "cpu"), ids=str)
def test_lists_of_latents(backend, dtype, listed):
    prefixes, sizes = sized(backend, ([70, 0], [3, 1]), ([3000, 0, 9, 600], [5, 0, 3, 33]))
    check_latents(backend, prefixes, sizes, heads=(1, 16), dtype=dtype, listed=listed, new=True, mask=BITS)
    check_latents(backend, prefixes, sizes, heads=(1, 9), dtype=dtype, listed=listed, layout="paged 3", spare=2)


@pytest.mark.parametrize("inputs", [PEAKY, FLAT, SINK])
def test_every_shape_of_weights(backend, inputs):
    for dtype in FLOATS:
        check_latents(backend, [sized(backend, 90, 2000)], [2], heads=(1, 8), dtype=dtype, inputs=inputs)
        check_narrow(backend, [sized(backend, 300, 2000)], [2], heads=(1, 8), dtype=dtype, inputs=inputs)


def test_windows_chunks_sinks_and_softcaps(backend):
    heads = dict(heads=(2, 8), mask=UNIFORM)
    for window in (1, 40, 64, 260):
        check_narrow(backend, [300, 9], [5, 3], window=window, **heads)
    for chunk in (1, 40, 260):
        check_narrow(backend, [300, 9], [5, 3], chunk=chunk, sinks=True, **heads)
    check_narrow(backend, [70], [4], softcap=5.0, sinks=True, window=50, **heads)
    check_latents(backend, [70, 3], [4, 1], heads=(1, 17), softcap=20.0, sinks=True, window=33, layout="paged 16")


def test_a_scale_of_latents_is_that_of_the_heads(backend):
    check_latents(backend, [50], [2], heads=(1, 8), scale=192**-0.5)
    check_latents(backend, [50], [2], heads=(1, 8), scale=-0.2)


def test_a_visible_value_that_is_not_finite_is_its_columns_only(backend):
    case, _ = solved([60], [3], heads=(1, 8), dim=512, mask=CHAIN)
    values = case["v_cache"].clone()
    values[0, 40, 0, 300] = torch.nan
    out, lse = run(backend, case | {"v_cache": values})
    clean, same = run(backend, case)
    assert out[..., 300].isnan().all()
    keep = torch.arange(512) != 300
    assert_same_runs([out[..., keep], lse], [clean[..., keep], same])


def test_rows_that_see_nothing(backend):
    for options in (LATENT, LISTED):
        case, _ = solved([0, 30], [3, 2], heads=(1, 8), spare=2, **options)
        visible = case["visible"].clone()
        visible[1] = 0
        out, lse = run(backend, case | {"visible": visible})
        assert (out[[1, 5, 6]] == 0).all() and (lse[[1, 5, 6]] == -torch.inf).all()


@pytest.mark.parametrize("reach", [dict(window=1), dict(chunk=128)], ids=str)
@pytest.mark.parametrize("options", [LATENT, NARROW], ids=str)
def test_rows_that_see_nothing_and_whose_reach_begins_where_their_places_end(options, reach):
    """A block that takes one of them and another row after it must have no copies on their way between the two."""
    case = attention_case([128], [6], heads=(1, 8), mask=CHAIN, **options, **reach)
    visible = case["visible"].clone()
    visible[:3] = 0
    case |= {"visible": visible}
    for multiprocessors in (1, 100):
        result = run_on_gpu(case | {"batch_invariant": True}, multiprocessors=multiprocessors)
        assert_right(result, case, attention_terms(**case))
        assert (result[0][:3] == 0).all() and (result[1][:3] == -torch.inf).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_latents_have_the_bits_of_keys_and_values_that_are_copies(backend, dtype):
    case = latents(solved([130], [3], heads=(1, 16), dtype=dtype, new=True, **LATENT)[0])
    copies = {f"v_{name}": case[f"v_{name}"].clone() for name in ("cache", "new")}
    assert_same_runs(run(backend, case), run(backend, case | copies))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_a_row_of_a_tree_has_the_bits_of_a_row_alone(backend, dtype, widths):
    """Around the ends of tiles and of shares; alone on a GPU a block has a share, in a tree it may have all."""
    options = dict(dtype=dtype, dim=widths[0], value_dim=widths[1])
    for prefix in sized(backend, (0, 29, 252), (0, 29, 60, 252, 509, 1020, 9214)):
        nodes = 5 if widths[0] < 512 else 2
        assert_rows_are_alone(backend, prefix, nodes, mask=BUSHY, heads=(1, 4), seed=prefix, **options)
    if dtype == torch.bfloat16:
        nodes = 9 if widths[0] < 512 else 3
        assert_rows_are_alone(backend, 270, nodes, mask=UNIFORM, heads=(1, 17), inputs=ORDERED, **options)
        assert_rows_are_alone(backend, 300, nodes, mask=UNIFORM, heads=(1, 8), window=100, **options)


@pytest.mark.parametrize("options", [LATENT, LISTED, NARROW], ids=str)
@pytest.mark.parametrize("group", [2, 40])
def test_the_same_bits_on_any_gpu(options, group):
    """A block for each share and a sum of their parts, or one for all shares, or for several rows."""
    case = attention_case([700, 9, 0, 250], [1, 2, 0, 3], heads=(1, group), new=True, spare=1, **options)
    expected = run_on_gpu(case | {"batch_invariant": True}, multiprocessors=1000)
    assert_right(expected, case, attention_terms(**case))
    for multiprocessors in (1, 3):
        again = run_on_gpu(case | {"batch_invariant": True}, multiprocessors=multiprocessors)
        assert_same_runs(again, expected)


def test_memory_of_parts_is_that_of_ten_for_each_block():
    """However long a text is and however many its rows: 174 MB for 128 heads of latents on 132 multiprocessors."""
    shape = dict(kv_heads=1, head_dim=576, value_dim=512, type=BFLOAT16, heads=128)
    shape |= dict(slots=131_072, max_nodes=1, requests=1, multiprocessors=132)
    with session({}) as machine:
        floats = [machine.attention_workspace(shape | {"rows": rows}) for rows in (1, 7, 32)]
    sums_before = 264 * 32 * 512
    memory = [parts * 128 * 516 + sums_before for parts in (96, 660, 660)]
    plans = [2 + 8 * rows + 2 * parts for rows, parts in ((1, 96), (7, 660), (32, 660))]  # counts, rows, shares
    assert floats == [size + -(-plan // 4) * 4 for size, plan in zip(memory, plans, strict=True)]


def test_the_same_bits_however_many_slots_a_cache_has():
    """After 131,072 slots and after 736."""
    case = latents(attention_case([700], [2], heads=(1, 8), layout="paged 16", spare=90, **LATENT))
    unused = torch.full((1, 131_072 // 16), -1, dtype=torch.int32)
    many = case | {"block_table": torch.cat([case["block_table"], unused], dim=1)}
    assert_same_runs(run_on_gpu(many, multiprocessors=1000), run_on_gpu(case, multiprocessors=1000))


def test_the_order_of_threads_changes_nothing():
    case = latents(attention_case([300], [2], heads=(1, 17), **LATENT))
    expected = run_on_gpu(case, seed=0)
    for seed in (1, 2):
        assert_same_runs(run_on_gpu(case, seed=seed), expected)


def test_a_long_text_with_many_shares():
    """Six shares of 256 places and one of 128: a sum has eight of them on their way."""
    case = attention_case([1600], [2], heads=(1, 8), **NARROW)
    for multiprocessors in (1, 100):
        result = run_on_gpu(case | {"batch_invariant": True}, multiprocessors=multiprocessors)
        assert_right(result, case, attention_terms(**case))


def copied_bytes(case):
    return 16 * len(run_and_record(case, multiprocessors=1)[1])


def test_latents_are_copied_once():
    """Each key 1152 bytes for 16 heads, of tiles that are not whole too; beside values of their own 1024 bytes more."""
    case = latents(attention_case([94], [2], heads=(1, 16), mask=CHAIN, **LATENT))
    assert copied_bytes(case) == (95 + 96) * 1152
    assert copied_bytes(case | {"v_cache": case["v_cache"].clone()}) == (95 + 96) * (1152 + 1024)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_hardly_worse_than_rounding_the_exact_result(backend, dtype):
    case = latents(solved([sized(backend, 120, 3000)], [2], heads=(1, 16), dtype=dtype, **LATENT)[0])
    exact = attention_terms(**case).out
    rms = lambda got: (got.double() - exact).square().mean().sqrt().item()  # noqa: E731
    assert rms(run(backend, case)[0]) <= 1.5 * rms(exact.to(dtype))


def test_rows_that_cannot_be_copied_16_bytes_at_a_time_are_refused(backend):
    if backend.name.startswith("cpu"):
        pytest.skip("the CPU reads rows at any address")
    case = to(attention_case([20], [2], heads=(1, 8), **LATENT), backend.device)
    padded = torch.zeros(*case["k_cache"].shape[:3], 580, dtype=torch.bfloat16, device=backend.device)
    with pytest.raises(RuntimeError, match="k_cache must have strides that are multiples of 8"):
        pass_ext.attention_tree(**case | {"k_cache": padded[..., :576]})


# ---- a real GPU ----


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_long_texts_on_a_real_grid(cuda, rows):
    case = latents(attention_case([8000, 17, 0, 2500], [rows, 1, 0, 3], heads=(1, 128), layout="paged 16", **LATENT))
    moved = latents(to(case, cuda.device))
    first = pass_ext.attention_tree(**moved)
    # In fp64 on the GPU: on cores that thirty processes share, 68 rows of 128 heads take longer than a test may.
    exact = AttentionTerms(*(term.cpu() for term in attention_terms(**moved)))
    assert_right(tuple(tensor.cpu() for tensor in first), case, exact)
    for _ in range(20):
        assert_same_runs(pass_ext.attention_tree(**moved), first)
