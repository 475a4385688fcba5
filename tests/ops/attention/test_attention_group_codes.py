"""attention_tree to latents and lists in 8 bits: on a GPU the heads that share a key are the rows of fragments, as in 16 bits,
and a warp turns its part of the codes into numbers.
"""

import pytest
import torch
from attention_cases import BITS, BUSHY, CHAIN, PEAKY, UNIFORM, attention_case
from attention_checks import assert_right, assert_same_runs, run, run_and_record, run_on_gpu, sized, solved
from support.pairwise import pairwise
from test_attention_codes import CODES, quantized
from test_attention_one_row import assert_rows_of_case_are_alone

import pass_ext
from pass_ext.ops.quantize import CODE_HEADER
from pass_ext.reference.attention import attention_terms

FLOATS = torch.bfloat16, torch.float16
LATENT = dict(dim=576, value_dim=512)
HEADS = dict(dim=128)
E4M3 = torch.float8_e4m3fn
ONE_ORDER = {"batch_invariant": True}


def latents(case):
    """The case whose values are the first numbers of its keys, in the same memory."""
    keys = {name: case[f"k_{name}"] for name in ("cache", "new") if case[f"k_{name}"] is not None}
    return case | {f"v_{name}": rows[..., : CODE_HEADER + 512] for name, rows in keys.items()}


def latent_case(codes, prefixes, sizes, **options):
    return latents(quantized(solved(prefixes, sizes, **LATENT | options)[0], codes))


def check(backend, case):
    assert_right(run(backend, case | ONE_ORDER), case, attention_terms(**case))


@pytest.mark.sanitizer
@pytest.mark.parametrize(("codes", "group"), pairwise(CODES, [1, 16, 17, 40], "cpu"), ids=str)
def test_every_type_and_number_of_heads(backend, codes, group):
    """Less than a tile of fragments, one, and more; of latents, of keys beside values of their own, and of other widths."""
    for dtype in FLOATS:
        check(backend, latent_case(codes, [37, 0], [2, 1], heads=(1, group), dtype=dtype))
        case = solved([70, 0], [3, 2], heads=(1, group), dtype=dtype, new=True, spare=1, **LATENT)[0]
        check(backend, quantized(case, codes))
    check(backend, quantized(solved([70, 0, 9], [3, 0, 2], heads=(2, group), spare=1, **HEADS)[0], codes))
    check(backend, quantized(solved([40], [2], heads=(1, group), dim=192, value_dim=128)[0], codes))


@pytest.mark.parametrize("places", [1, 31, 32, 33, 64, 65, 127, 256, 257, 300, 513])
def test_every_length(backend, places):
    """Around the ends of tiles of 32 and of shares of 256; the last row of a chain sees all."""
    nodes = min(places, 2)
    for codes in sized(backend, CODES[:1], CODES):
        check(backend, latent_case(codes, [places - nodes], [nodes], heads=(1, 8), mask=CHAIN, new=places % 2 == 0))
        case = solved([places - nodes], [nodes], heads=(1, 9), mask=CHAIN, new=places % 2 == 1, **HEADS)[0]
        check(backend, quantized(case, codes))


@pytest.mark.parametrize("layout", ["heads", "gaps", "paged 1", "paged 3", "paged 16"])
def test_every_layout(backend, layout):
    """A page that no table names is zeros, and all memory that no row sees is NaN."""
    for new in (False, True):
        options = dict(layout=layout, new=new, spare=2)
        check(backend, latent_case(E4M3, [40, 3, 0], [3, 0, 1], heads=(1, 8), **options))
        check(backend, quantized(solved([40, 3, 0], [3, 0, 2], heads=(2, 8), **options, **HEADS)[0], torch.int8))


@pytest.mark.parametrize(("codes", "listed"), pairwise(CODES, [0.0, 0.1, 0.7], "cpu"), ids=str)
def test_lists_of_latents(backend, codes, listed):
    prefixes, sizes = sized(backend, ([70, 0], [3, 1]), ([3000, 0, 9, 600], [5, 0, 3, 33]))
    check(backend, latent_case(codes, prefixes, sizes, heads=(1, 16), listed=listed, new=True, mask=BITS))
    check(backend, latent_case(codes, prefixes, sizes, heads=(1, 20), listed=listed, layout="paged 3", spare=2))
    check(backend, quantized(solved(prefixes, sizes, heads=(2, 3), listed=listed, new=True, **HEADS)[0], codes))


def test_windows_chunks_sinks_and_softcaps(backend):
    heads = dict(heads=(1, 8), mask=UNIFORM)
    for reach in (dict(window=40), dict(chunk=40, sinks=True), dict(softcap=5.0, sinks=True, window=50)):
        check(backend, latent_case(E4M3, [130, 9], [4, 3], **heads, **reach))
        check(backend, quantized(solved([130, 9], [4, 3], **heads, **reach, **HEADS)[0], torch.int8))


def test_scales_of_any_size(backend):
    """Weights of values are near the values' own size, which fp16 holds whatever the scales are."""
    for codes in CODES:
        for size in (1e-3, 1e2):
            case = solved([60], [2], dtype=torch.float16, new=True, heads=(1, 3), inputs=PEAKY, **LATENT)[0]
            check(backend, quantized(case | {name: case[name] * size for name in ("v_cache", "v_new")}, codes))


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_latents_have_the_bits_of_keys_and_values_that_are_copies(backend, codes):
    case = latent_case(codes, [130], [3], heads=(1, 17), new=True)
    copies = {f"v_{name}": case[f"v_{name}"].clone() for name in ("cache", "new")}
    assert_same_runs(list(run(backend, case)), list(run(backend, case | copies)))


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_codes_and_scales_that_are_no_numbers_reach_the_rows_that_see_them(backend, codes):
    """One value's scale is NaN; or one code of it NaN, or infinite. Other rows, heads and columns keep their bits."""
    for case in (
        solved([70], [7], new=True, heads=(1, 9), **LATENT)[0],
        solved([70], [7], new=True, heads=(2, 3), **HEADS)[0],
    ):
        case = quantized(case, codes) | ONE_ORDER
        sees = (case["visible"][:, 0] >> 4 & 1).bool()
        assert sees.any() and not sees.all()
        before, lse = run(backend, case)
        for place, byte, columns in ((0, 0, slice(None)), (CODE_HEADER + 99, 0x7F, 99), (CODE_HEADER + 99, 0xFC, 99)):
            values = case["v_new"].clone()
            row = values[4, 0].view(torch.uint8)
            if place == 0:
                row[:4] = torch.tensor([torch.nan]).view(torch.uint8)
            else:
                row[place] = byte
            number = pass_ext.layers.dequantize_rows(values[4, 0])[columns].reshape(-1)[0]
            if number.isfinite():
                continue
            heads = case["q"].shape[1] // values.shape[1]
            out, same = run(backend, case | dict(v_new=values))
            mine = out[sees][:, :heads, columns]
            assert (mine.isnan() if number.isnan() else mine == number).all()
            was = before.clone()
            for each in (out, was):
                each[sees.nonzero()[:, :1], torch.arange(heads), columns] = 0.0
            assert_same_runs([out, same], [was, lse])


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_a_row_of_a_tree_has_the_bits_of_a_row_alone(backend, codes):
    """Around the ends of tiles and of shares; alone on a GPU a block has a share, in a tree it may have all."""
    for prefix in sized(backend, (29, 252), (0, 29, 60, 252, 509, 1020)):
        for options in (dict(heads=(1, 17), **LATENT), dict(heads=(1, 4), **HEADS)):
            case = quantized(solved([prefix], [3], new=True, mask=BUSHY, seed=prefix, **options)[0], codes)
            case = latents(case) if options["dim"] == 576 else case
            assert_rows_of_case_are_alone(backend, case, attention_terms(**case), 3)


@pytest.mark.parametrize("listed", [None, 0.6])
@pytest.mark.parametrize("options", [LATENT, HEADS], ids=str)
def test_the_same_bits_on_any_gpu_and_in_any_order(options, listed):
    """A block for each share and a sum of their parts, or one for all shares, or for several rows."""
    case = attention_case([700, 9, 0, 250], [1, 2, 0, 3], heads=(1, 20), new=True, spare=1, listed=listed, **options)
    case = quantized(case, E4M3)
    case = latents(case) if options is LATENT else case
    expected = run_on_gpu(case | ONE_ORDER, multiprocessors=1000)
    assert_right(expected, case, attention_terms(**case))
    for gpu in (dict(multiprocessors=1), dict(multiprocessors=3), dict(multiprocessors=3, seed=2)):
        assert_same_runs(list(run_on_gpu(case | ONE_ORDER, **gpu)), list(expected))


def test_a_latent_and_its_scale_are_copied_once():
    """Each key 576 bytes for 16 heads, of tiles that are not whole too; beside values of their own 512 bytes more."""
    case = latents(quantized(attention_case([94], [2], heads=(1, 16), mask=CHAIN, **LATENT), E4M3))
    copies = lambda case: len(run_and_record(case, multiprocessors=1)[1])  # noqa: E731
    assert copies(case) == (95 + 96) * (576 // 16 + 1)
    assert copies(case | {"v_cache": case["v_cache"].clone()}) == (95 + 96) * (576 // 16 + 512 // 16 + 2)
