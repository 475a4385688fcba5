"""attention_tree where keys have 192 and values 128 numbers: a GPU has a kernel for them, without padding."""

import pytest
import torch
from attention_cases import BITS, BUSHY, CHAIN, FLAT, PEAKY, SINK, attention_case
from attention_checks import assert_right, assert_same_runs, check, run, run_and_record, run_on_gpu, sized, solved
from support.pairwise import pairwise

from pass_ext.ops.attention import TWO_WIDTHS, padded_widths
from pass_ext.reference.attention import attention_terms

FLOATS = torch.bfloat16, torch.float16
WIDTHS = dict(dim=TWO_WIDTHS[0], value_dim=TWO_WIDTHS[1])
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.by_tiles
@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("nodes", [1, 4, 17, 64])
def test_every_number_of_heads_and_rows(backend, dtype, group, nodes):
    """One tile of 16 rows, of 64 rows, and several of them."""
    prefixes, sizes = sized(backend, ([37, 5], [nodes, 1]), ([700, 5, 0, 64], [nodes, 1, 0, 3]))
    check(backend, prefixes, sizes, heads=(1, group), dtype=dtype, mask=BUSHY, new=group > 1, spare=2, **WIDTHS)


@pytest.mark.parametrize("prefix", [0, 1, 29, 31, 32, 33, 63, 64, 65, 95, 127, 129, 1000])
def test_every_length(backend, prefix):
    """Around the ends of tiles of 32 keys, and more tiles than are on their way at once."""
    for new in (False, True):
        for layout in ("heads", "paged 16"):
            check(backend, [prefix], [3], heads=(1, 4), new=new, layout=layout, mask=CHAIN, **WIDTHS)


@pytest.mark.parametrize(
    ("layout", "window"), pairwise(["rows", "heads", "gaps", "paged 1", "paged 3"], [-1, 1, 40, 64, 130]), ids=str
)
def test_layouts_windows_sinks_and_softcaps(backend, layout, window):
    options = dict(layout=layout, window=window, sinks=True, mask=BITS, **WIDTHS)
    check(backend, [200, 9, 0], [20, 3, 0], heads=(1, 4), spare=3, **options)
    check(backend, [70, 3], [4, 1], heads=(2, 3), softcap=20.0, new=True, dtype=torch.float16, **options)


@pytest.mark.parametrize("inputs", [PEAKY, FLAT, SINK])
def test_every_shape_of_weights(backend, inputs):
    for dtype in FLOATS:
        check(backend, [sized(backend, 150, 2000)], [5], heads=(1, 4), dtype=dtype, inputs=inputs, **WIDTHS)


def test_values_that_are_the_first_numbers_of_the_keys(backend):
    case, _ = solved([130], [4], heads=(1, 5), new=True, **WIDTHS)
    shared = {f"v_{name}": case[f"k_{name}"][..., :128] for name in ("cache", "new")}
    copies = {name: rows.clone() for name, rows in shared.items()}
    result = run(backend, case | shared)
    assert_right(result, case | shared, attention_terms(**case | shared))
    if backend.name.startswith("cpu"):  # the emulator's GPUs differ from launch to launch
        assert_same_runs(result, run(backend, case | copies))


@pytest.mark.parametrize("column", [0, 127])
def test_a_value_that_is_not_finite_is_in_its_column_of_the_rows_that_see_it(backend, column):
    case, exact = solved([60], [40], heads=(1, 2), mask=CHAIN, **WIDTHS)
    values = case["v_cache"].clone()
    values[0, 60 + 20, 0, column] = torch.nan
    out, lse = run(backend, case | {"v_cache": values})
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[20:, :, column] = True
    assert torch.equal(out.isnan(), expected)
    assert_right((torch.where(expected, exact.out.to(out.dtype), out), lse), case, exact)


def test_rows_without_a_request_and_rows_that_see_nothing(backend):
    case, _ = solved([0, 30], [3, 2], heads=(1, 4), spare=5, **WIDTHS)
    visible = case["visible"].clone()
    visible[1] = 0
    out, lse = run(backend, case | {"visible": visible})
    assert (out[[1, *range(5, 10)]] == 0).all() and (lse[[1, *range(5, 10)]] == -torch.inf).all()


@pytest.mark.by_tiles
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_hardly_worse_than_rounding_the_exact_result(backend, dtype):
    case, exact = solved([sized(backend, 120, 3000)], [8], heads=(1, 4), dtype=dtype, **WIDTHS)
    rms = lambda got: (got.double() - exact.out).square().mean().sqrt().item()  # noqa: E731
    assert rms(run(backend, case)[0]) <= 1.5 * rms(exact.out.to(dtype))


# ---- on a GPU's grid ----


@pytest.mark.parametrize("blocks", [1, 3, 7, 16])
def test_ragged_batches_on_any_grid(blocks):
    """A padded request, an empty prefix, a tile that is not whole; the order of threads changes nothing."""
    case = attention_case([0, 33, 130, 64], [1, 0, 23, 6], heads=(1, 3), spare=2, mask=BITS, **WIDTHS)
    first = run_on_gpu(case, multiprocessors=blocks, seed=0)
    assert_right(first, case, attention_terms(**case))
    assert_same_runs(run_on_gpu(case, multiprocessors=blocks, seed=1), first)


@pytest.mark.parametrize(("nodes", "group"), [(3, 4), (1, 16), (13, 4), (4, 16)])
def test_a_key_and_its_value_are_read_once_and_in_their_own_width(nodes, group):
    """640 bytes of a token for up to 64 rows, where a common width of 256 has 1,024."""
    case = attention_case([94], [nodes], heads=(1, group), mask=CHAIN, **WIDTHS)
    result, copies = run_and_record(case, multiprocessors=1)
    assert_right(result, case, attention_terms(**case))
    assert 16 * len(copies) == (94 + nodes) * 640


# ---- who has these widths ----


@pytest.mark.parametrize(
    ("keys", "values", "on_a_gpu", "in_codes"),
    [
        (192, 128, (192, 128), (256, 256)),
        (144, 128, (192, 128), (256, 256)),
        (192, 24, (192, 128), (256, 256)),
        (128, 64, (128, 128), (128, 128)),
        (128, 192, (256, 256), (256, 256)),
        (192, 192, (256, 256), (256, 256)),
        (192, 129, (256, 256), (256, 256)),
        (193, 128, (256, 256), (256, 256)),
        (24, 24, (64, 64), (64, 64)),
        (576, 512, (576, 512), (576, 512)),
        (300, 40, (304, 48), (304, 48)),
    ],
)
def test_the_widths_that_rows_are_padded_to(keys, values, on_a_gpu, in_codes):
    assert padded_widths(keys, values, CUDA, in_codes=False) == on_a_gpu
    assert padded_widths(keys, values, CUDA, in_codes=True) == in_codes
    sixteens = -(-keys // 16) * 16, -(-values // 16) * 16
    assert (
        padded_widths(keys, values, CPU, in_codes=False) == padded_widths(keys, values, CPU, in_codes=True) == sixteens
    )
