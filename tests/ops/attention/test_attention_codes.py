"""Attention to keys and values in 8 bits: the numbers that are stored."""

import emulator
import pytest
import torch
from attention_cases import MASKS, attention_case
from attention_checks import FLOATS, assert_right, assert_same_runs, is_small, run, run_on_gpu, runs, solved, threads
from support.pairwise import pairwise

import pass_ext
from pass_ext.ops.quantize import CODE_HEADER, MOST_OF_CODES
from pass_ext.reference.attention import attention_terms

CODES = tuple(MOST_OF_CODES)


def quantized(case, codes):
    """A case whose keys and values are codes. Memory that must not be read stays poison: rows that are all NaN."""
    rows = {name: case[name] for name in ("k_cache", "v_cache", "k_new", "v_new") if case[name] is not None}
    return case | {name: strided(pass_ext.layers.quantize_rows(x, codes), x) for name, x in rows.items()}


def strided(rows, like):
    """The rows with gaps between them, and heads in front of slots where the case has them so."""
    if like.dim() == 4 and like.stride(2) > like.stride(1):
        return rows.transpose(1, 2).contiguous().transpose(1, 2)
    gaps = rows.new_zeros(*rows.shape[:-1], rows.shape[-1] + 16)
    gaps[..., : rows.shape[-1]] = rows
    return gaps[..., : rows.shape[-1]]


def cases(backend):
    yield dict(prefixes=[70, 0, 9], sizes=[5, 0, 3], options=dict(heads=(2, 3), new=True))
    yield dict(prefixes=[3, 30], sizes=[7, 1], options=dict(layout="paged 3", window=9, sinks=True))
    yield dict(prefixes=[40], sizes=[4], options=dict(dim=96, value_dim=48, layout="heads", new=True, softcap=20.0))
    yield dict(prefixes=[50], sizes=[3], options=dict(dim=192, value_dim=128, heads=(1, 4)))
    yield dict(prefixes=[0, 66, 5], sizes=[2, 18, 0], options=dict(dim=128, heads=(2, 4), new=True, layout="paged 16"))
    yield dict(prefixes=[33], sizes=[20], options=dict(dim=256, heads=(1, 4), mask="bits"))
    yield dict(prefixes=[60, 1], sizes=[3, 17], options=dict(dim=80, heads=(1, 4), new=True))
    yield dict(prefixes=[70], sizes=[2], options=dict(dim=96, heads=(1, 3), chunk=40))
    yield dict(prefixes=[70], sizes=[2], options=dict(dim=96, heads=(2, 1), softcap=5.0))
    yield dict(prefixes=[70, 0, 9], sizes=[5, 0, 3], options=dict(listed=0.4, new=True, heads=(2, 3), mask="bits"))
    if backend.name.startswith("cpu"):  # on a GPU lists are of rows in the type of the queries
        yield dict(prefixes=[90, 4], sizes=[6, 2], options=dict(heads=(1, 3), new=True, listed=0.4))
    if not is_small(backend):
        yield dict(prefixes=[1000, 64], sizes=[33, 80], options=dict(layout="paged 16", new=True, heads=(1, 5)))
        yield dict(prefixes=[300], sizes=[66], options=dict(chunk=70, dim=128, mask="bits"))


@pytest.mark.by_tiles
@pytest.mark.parametrize(("dtype", "codes"), pairwise(FLOATS, CODES, "cpu"), ids=str)
def test_the_stored_numbers_are_attended_to(backend, dtype, codes):
    for each in cases(backend):
        case = quantized(solved(each["prefixes"], each["sizes"], dtype=dtype, **each["options"])[0], codes)
        assert_right(run(backend, case), case, attention_terms(**case))


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_the_error_is_at_most_twice_pytorchs(backend, codes):
    """Both against float64, of the same stored numbers, in float32."""
    for mask in MASKS[:4]:
        case = quantized(solved([300], [9], dtype=torch.float32, mask=mask, heads=(2, 2), new=True)[0], codes)
        exact = attention_terms(**case).out
        numbers = {
            name: pass_ext.layers.dequantize_rows(case[name]) for name in ("k_cache", "v_cache", "k_new", "v_new")
        }
        with threads(1):
            plain = attention_terms(**case | numbers, precision=torch.float32).out
        ours, theirs = ((x.double() - exact).abs() for x in (run(backend, case)[0], plain))
        assert ours.max() <= 2 * theirs.max() and ours.mean() <= 2 * theirs.mean()


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_values_that_are_the_first_numbers_of_the_keys(backend, codes):
    case, _ = solved([130], [4], heads=(1, 5), dim=576, value_dim=512, dtype=torch.bfloat16, new=True)
    case = quantized(case, codes)
    views = {f"v_{name}": case[f"k_{name}"][..., : CODE_HEADER + 512] for name in ("cache", "new")}
    copies = {name: view.clone() for name, view in views.items()}
    result = run(backend, case | views)
    assert_right(result, case | views, attention_terms(**case | views))
    assert_same_runs(list(result), list(run(backend, case | copies)))


@pytest.mark.by_tiles
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_every_code(backend, codes):
    """One key a request: the result is its value. Codes that are no number make the result NaN, or infinite, in e5m2."""
    every = torch.arange(256, dtype=torch.uint8).view(codes)
    expected = every.float() * 0.37
    rows = torch.zeros(1, 1, 1, CODE_HEADER + 256, dtype=torch.uint8)
    rows[..., :4] = torch.tensor([0.37]).view(torch.uint8)
    rows[..., CODE_HEADER:] = every.view(torch.uint8)
    values, keys = rows.view(codes), pass_ext.layers.quantize_rows(torch.zeros(1, 1, 1, 16), codes)
    one = torch.tensor([0, 1], dtype=torch.int32)
    step = torch.tensor([1], dtype=torch.int32), one, torch.zeros(1, 1, dtype=torch.int64), 1
    fresh = dict(k_new=keys[0], v_new=values[0])
    out, _ = pass_ext.attention_tree(torch.ones(1, 1, 16), keys, values, *step, **fresh)
    torch.testing.assert_close(out[0, 0], expected, rtol=1e-6, atol=0.0, equal_nan=True)


@pytest.mark.by_tiles
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_values_that_are_no_numbers_reach_the_rows_that_see_them(backend, codes):
    """One value's scale is NaN; or one code of it NaN, or infinite. Other rows keep their bits."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        case = quantized(solved([70], [7], dtype=dtype, new=True, heads=(2, 3))[0], codes)
        sees = (case["visible"][:, 0] >> 4 & 1).bool()
        assert sees.any() and not sees.all()
        before = runs(backend, case)
        for place, byte, columns in ((3, 0x7F, slice(None)), (CODE_HEADER + 5, 0x7F, 5), (CODE_HEADER + 5, 0xFC, 5)):
            values = case["v_new"].clone()
            values[4, 1].view(torch.uint8)[place] = byte
            if place < CODE_HEADER:
                values[4, 1].view(torch.uint8)[:4] = torch.tensor([torch.nan]).view(torch.uint8)
            number = pass_ext.layers.dequantize_rows(values[4, 1])[columns].reshape(-1)[0]
            if number.isfinite():
                continue
            after = runs(backend, case | dict(v_new=values))
            for which, (out, was) in enumerate(zip(after, before, strict=True)):
                if which % 2:
                    assert_same_runs([out], [was])
                    continue
                mine = out[sees][:, 3:, columns]
                assert (mine.isnan() if number.isnan() else mine == number).all()
                out, was = out.clone(), was.clone()
                for each in (out, was):
                    each[sees.nonzero()[:, :1], torch.arange(3, 6), columns] = 0.0
                assert_same_runs([out], [was])


def test_a_value_that_is_no_number_costs_no_more_than_reading_its_tile_again():
    """The cost is not rows times keys: 64 rows, and all see it."""
    case = quantized(attention_case([80], [16], heads=(1, 4), mask="bits"), torch.float8_e4m3fn)
    case["visible"] = torch.full_like(case["visible"], -1)
    run_on_gpu(case, multiprocessors=1, seed=0)
    clean = emulator.load().count_accesses()
    case["v_cache"][0, 90, 0].view(torch.uint8)[CODE_HEADER + 3] = 0x7F
    out, _ = run_on_gpu(case, multiprocessors=1, seed=0)
    assert out[:, :, 3].isnan().all() and not out[:, :, :3].isnan().any() and not out[:, :, 4:].isnan().any()
    assert emulator.load().count_accesses() < 1.25 * clean


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_ragged_batches_on_any_grid_of_the_emulator(codes):
    """The kernels of a GPU, on the emulator: blocks share tiles, or have several each; a page that is outside is zeros."""
    for blocks in (1, 3, 7, 16):
        case = solved([0, 33, 130, 64], [1, 0, 70, 6], heads=(2, 4), spare=2, mask="bits", dtype=torch.float16)[0]
        case = quantized(case, codes)
        assert_right(run_on_gpu(case, multiprocessors=blocks), case, attention_terms(**case))
    case = quantized(solved([1000], [3], heads=(1, 1), dim=128)[0], codes)
    results = [run_on_gpu(case, multiprocessors=blocks, seed=seed) for blocks in (1, 9) for seed in (1, 2)]
    assert_same_runs(list(results[0] + results[2]), list(results[1] + results[3]))
    for result in results:
        assert_right(result, case, attention_terms(**case))


def test_scales_of_any_size(backend):
    """Weights of values are near the values' own size, which fp16 holds whatever the scales are."""
    for codes in CODES:
        for size in (1e-3, 1.0, 1e3):
            case = solved([90], [4], dtype=torch.float16, new=True, heads=(1, 3))[0]
            case = quantized(case | {name: case[name] * size for name in ("v_cache", "v_new")}, codes)
            assert_right(run(backend, case), case, attention_terms(**case))


@pytest.mark.by_tiles
def test_a_step_has_the_bits_of_one_row(backend):
    """Of a row alone, whose path is in the cache."""
    if not backend.name.startswith("cpu"):
        pytest.skip("a GPU divides the work by its amount")
    for codes in CODES:
        for dtype in (torch.float32, torch.bfloat16):
            case = quantized(solved([200], [6], dtype=dtype, mask="chain", new=True, heads=(2, 2))[0], codes)
            out, lse = run(backend, case)
            cache = {name: torch.cat([case[f"{name}_cache"], case[f"{name}_new"][None]], 1) for name in ("k", "v")}
            for row in range(6):
                one = dict(
                    case, q=case["q"][row : row + 1], k_cache=cache["k"], v_cache=cache["v"],
                    prefix_lens=torch.tensor([200 + row], dtype=torch.int32), max_nodes=1, visible=torch.ones(1, 1).long(),
                    cu_nodes=torch.tensor([0, 1], dtype=torch.int32), k_new=None, v_new=None,
                )  # fmt: skip
                assert_same_runs([x[0] for x in run(backend, one)], [out[row], lse[row]])


def test_committing_moves_rows_with_their_scales(backend):
    for codes in CODES:
        new = pass_ext.layers.quantize_rows(torch.randn(3, 2, 32), codes)
        cache = pass_ext.layers.quantize_rows(torch.zeros(1, 8, 2, 32), codes)
        bounds, path = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([[0, 2]], dtype=torch.int32)
        counts = torch.tensor([1], dtype=torch.int32)
        pass_ext.cache_commit_([cache], torch.tensor([4], dtype=torch.int32), bounds, path, counts, new=[new])
        assert torch.equal(cache[0, 4:6].view(torch.uint8), new[[0, 2]].view(torch.uint8))


def test_the_op_has_a_shape_for_compilers(backend):
    if is_small(backend):
        pytest.skip("it has no fake kernels")
    case = quantized(solved([5, 9], [3, 4], dim=32, value_dim=16, new=True)[0], torch.int8)
    names = ("q", "k_cache", "v_cache", "prefix_lens", "cu_nodes", "visible", "max_nodes", "k_new", "v_new")
    arguments = [case[name] for name in names]
    checks = ("test_schema", "test_faketensor")
    options = None, None, None, 0.0, -1, None, -1, None, False
    torch.library.opcheck(torch.ops.pass_ext.attention_tree.default, (*arguments, *options), test_utils=checks)


REFUSED = [
    (lambda case: {"k_cache": case["k_cache"].float()}, r"k_cache must be bfloat16, got float32"),
    (lambda case: {"v_cache": case["v_cache"].view(torch.float8_e5m2)}, r"v_cache must be int8, got float8_e5m2"),
    (lambda case: {"v_new": case["v_new"].view(torch.float8_e4m3fn)}, r"v_new must be int8, got float8_e4m3fn"),
    (lambda case: {"k_cache": case["k_cache"][..., 16:]}, r"k_cache must have 80 \(16 bytes for the scale, and q's head size"),
    (lambda case: {"v_cache": case["v_cache"][..., :16]}, r"v_cache must have a head size that is a multiple of 16"),
    (lambda case: {"k_cache": case["k_cache"].view(torch.uint8)}, r"k_cache must be bfloat16, got uint8"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message[:32] for _, message in REFUSED])
def test_bad_rows_are_refused_in_words(backend, change, message):
    case = quantized(solved([5, 9], [3, 4], new=True)[0], torch.int8)
    with pytest.raises(RuntimeError, match=message):
        pass_ext.attention_tree(**case | change(case))
