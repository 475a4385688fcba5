"""attention_merge on every backend: against fp64, with dead sides, and in place of one attention over all the keys."""

import importlib.util
import math

import pytest
import torch
from attention_cases import BITS, INPUTS, RANDOM
from attention_checks import FLOATS, UNIT, assert_right, assert_within, check, run, sized, solved
from support.each import each
from support.steps import to

import pass_ext
from pass_ext import reference
from pass_ext.testing import assert_same_bits

SHAPES = [(64,), (1, 80), (5, 3, 64), (2, 3, 4, 96), (7, 9, 128), (33, 2, 256)]
ODD_SHAPES = [(0, 4, 64), (3, 0, 64), (6, 7), (5, 1), (3, 577), (2, 0)]


def merge(backend, *sides, sinks=None):
    sinks = None if sinks is None else sinks.to(backend.device)
    results = pass_ext.attention_merge(*(side.to(backend.device) for side in sides), sinks=sinks)
    return tuple(tensor.cpu() for tensor in results)


def random_sides(shape, dtype, seed=0, spread=3.0):
    random = torch.Generator().manual_seed(seed)
    for _ in range(2):
        yield torch.randn(shape, generator=random).to(dtype)
        yield torch.randn(shape[:-1], generator=random) * spread


def check_merge(backend, *sides, sinks=None):
    out, lse = merge(backend, *sides, sinks=sinks)
    exact_out, exact_lse = reference.attention_merge(*sides, sinks=sinks)
    magnitude, _ = reference.attention_merge(sides[0].abs(), sides[1], sides[2].abs(), sides[3], sinks=sinks)
    assert out.dtype == sides[0].dtype and out.shape == sides[0].shape and lse.dtype == torch.float32
    assert_within("lse", lse, exact_lse, 2e-6 + 2.0**-21 * exact_lse.abs())
    smallest = torch.finfo(out.dtype).smallest_normal * UNIT[out.dtype]
    assert_within("out", out, exact_out, UNIT[out.dtype] * exact_out.abs() + 2.0**-20 * magnitude + smallest)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each("shape", SHAPES + ODD_SHAPES)
def test_every_shape_and_type(backend, shape, dtype):
    for spread in (0.1, 3.0, 60.0, 1000.0):
        check_merge(backend, *random_sides(shape, dtype, spread=spread))


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each("shape", [shape for shape in SHAPES + ODD_SHAPES if len(shape) > 1])
def test_sinks(backend, dtype, shape):
    heads = shape[-2]
    for spread in (0.1, 3.0):
        sinks = spread * torch.randn(heads, generator=torch.Generator().manual_seed(1))
        sinks[1::4] = -math.inf
        sides = list(random_sides(shape, dtype, spread=spread))
        sides[1][:1], sides[3][:2] = -math.inf, -math.inf  # the first rows saw nothing
        check_merge(backend, *sides, sinks=sinks)
        out, lse = merge(backend, *sides, sinks=sinks)
        assert (out[:1] == 0).all() and (lse[:1] == -math.inf).all()
        assert_same_bits(lse, merge(backend, *sides)[1])


def test_sides_need_not_be_contiguous(backend):
    out_a, lse_a, out_b, lse_b = random_sides((6, 5, 64), torch.bfloat16)
    transposed = lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1)  # noqa: E731
    expected = merge(backend, out_a, lse_a, out_b, lse_b)
    got = merge(backend, transposed(out_a), transposed(lse_a), out_b, transposed(lse_b))
    for left, right in zip(got, expected, strict=True):
        assert_same_bits(left, right)


def test_the_order_of_sides_hardly_matters(backend):
    for dtype in FLOATS:
        out_a, lse_a, out_b, lse_b = random_sides((40, 64), dtype)
        out, lse = merge(backend, out_a, lse_a, out_b, lse_b)
        turned_out, turned_lse = merge(backend, out_b, lse_b, out_a, lse_a)
        magnitude = torch.maximum(out_a.abs(), out_b.abs()).double()
        assert_within("out", turned_out, out.double(), 2 * UNIT[dtype] * magnitude + 2.0**-20 * magnitude)
        assert_within("lse", turned_lse, lse.double(), 1e-6 + 2.0**-22 * lse.double().abs())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each("value", [math.nan, math.inf, 1.0])
def test_a_side_that_saw_nothing_does_not_count(backend, dtype, value):
    """To the bit, whatever its out holds; if neither side saw anything, out 0 and lse -inf."""
    out_a, lse_a, out_b, lse_b = random_sides((6, 64), dtype)
    out_a[:3], lse_a[:3] = value, -math.inf
    out_b[2:5], lse_b[2:5] = value, -math.inf
    out, lse = merge(backend, out_a, lse_a, out_b, lse_b)
    assert_same_bits(out[:2], out_b[:2])
    assert_same_bits(lse[:2], lse_b[:2])
    assert_same_bits(out[3:5], out_a[3:5])
    assert_same_bits(lse[3:5], lse_a[3:5])
    assert (out[2] == 0).all() and lse[2] == -math.inf
    check_merge(backend, out_a, lse_a, out_b, lse_b)


def test_nan_stays_in_its_row(backend):
    sides = list(random_sides((4, 64), torch.float32))
    expected = merge(backend, *sides)
    sides[0][1, 5], sides[3][2] = math.nan, math.nan
    out, lse = merge(backend, *sides)
    assert_same_bits(out[[0, 3]], expected[0][[0, 3]])
    assert_same_bits(lse[[0, 1, 3]], expected[1][[0, 1, 3]])
    assert out[1].isnan().sum() == 1 and out[1, 5].isnan()
    assert out[2].isnan().all() and lse[2].isnan()


# ---- two attentions made one ----


def in_two(backend, case, outside=None):
    """The prefix alone (by `outside`, or with no bit set) merged with the nodes alone."""
    sinks, case = case["sinks"], case | {"sinks": None}  # of the merge alone: a row has one sink
    nothing = torch.zeros_like(case["visible"])
    prefix_only = outside or run(backend, case | {"visible": nothing})
    nodes_only = run(backend, case | {"prefix_lens": torch.zeros_like(case["prefix_lens"])})
    return merge(backend, *prefix_only, *nodes_only, sinks=sinks)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("sinks", [False, True])
def test_prefix_and_nodes_merged_are_the_whole(backend, dtype, inputs, sinks):
    options = dict(dtype=dtype, inputs=inputs, mask=BITS, new=True, layout="paged 16", spare=1, sinks=sinks)
    prefixes, sizes = sized(backend, ([50], [5]), ([300, 0, 64], [20, 4, 9]))
    check(backend, prefixes, sizes, **options)
    case, exact = solved(prefixes, sizes, **options)
    assert_right(in_two(backend, case), case, exact, factor=2)  # the two sides are rounded too


def flash_of_torch(q, k, v):
    """torch's own kernel on one request: q [n, Hq, D], k and v [keys, Hkv, D]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (rows.transpose(0, 1)[None] for rows in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    if q.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return out[0].transpose(0, 1), lse[0, :, : q.shape[2]].t().float()


def flash_attn(q, k, v):
    from flash_attn import flash_attn_func

    out, lse, _ = flash_attn_func(q[None], k[None], v[None], return_attn_probs=True)
    return out[0], lse[0].t().float()


def prefix_by(kernel, case, device):
    """out and lse of the rows of `case` over their prefixes, contiguous in the cache, by another kernel."""
    bounds, prefixes = case["cu_nodes"].tolist(), case["prefix_lens"].tolist()
    results = []
    for b, prefix in enumerate(prefixes):
        request_rows = slice(bounds[b], bounds[b + 1])
        rows = (case["q"][request_rows], case["k_cache"][b, :prefix], case["v_cache"][b, :prefix])
        results.append(kernel(*(tensor.contiguous().to(device) for tensor in rows)))
    return tuple(torch.cat([result[i].cpu() for result in results]).contiguous() for i in range(2))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_prefix_by_torchs_flash_attention(backend, dtype):
    if backend.device.type == "cuda" and dtype == torch.float32:
        pytest.skip("torch's flash attention on CUDA has no float32")
    prefixes, sizes = sized(backend, ([50], [5]), ([300, 65], [20, 9]))
    case, exact = solved(prefixes, sizes, dtype=dtype, new=True, inputs=RANDOM, heads=(2, 2))
    other = prefix_by(flash_of_torch, case, backend.device)
    assert_right(in_two(backend, case, other), case, exact, factor=2)


def test_a_prefix_by_flash_attn(cuda):
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed: pip install pass_ext[flash]")
    for dtype in (torch.bfloat16, torch.float16):
        case, exact = solved([300, 65], [20, 9], dtype=dtype, new=True, inputs=RANDOM, heads=(2, 2))
        assert_right(in_two(cuda, case, prefix_by(flash_attn, case, cuda.device)), case, exact, factor=2)


# ---- torch ----


REFUSALS = [
    ({"out_a": torch.zeros(3, 64).double()}, r"out_a must be bfloat16, float16 or float32, got float64\[3, 64\]"),
    ({"out_b": torch.zeros(3, 64).half()}, r"out_b must be float32, got float16\[3, 64\]"),
    ({"out_a": torch.tensor(0.0)}, r"out_a must have shape \[..., D\], got float32\[\]"),
    ({"out_b": torch.zeros(64)}, r"out_b must have shape as out_a, got float32\[64\]"),
    ({"out_b": torch.zeros(3, 65)}, r"out_b must have 64 \(as out_a\) in dimension 1, got float32\[3, 65\]"),
    ({"lse_a": torch.zeros(3).half()}, r"lse_a must be float32, got float16\[3\]"),
    ({"lse_b": torch.zeros(3, 1)}, r"lse_b must have shape out_a's without the last dimension, got float32\[3, 1\]"),
    ({"sinks": torch.zeros(4)}, r"sinks must have 3 \(the last dimension of lse_a\) in dimension 0, got float32\[4\]"),
    ({"sinks": torch.zeros(3).long()}, r"sinks must be float32, got int64\[3\]"),
    ({"lse_b": torch.zeros(4)}, r"lse_b must have 3 \(as out_a\) in dimension 0, got float32\[4\]"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[m[:24] for _, m in REFUSALS])
def test_bad_input_is_refused_in_words(backend, change, message):
    good = dict(out_a=torch.zeros(3, 64), lse_a=torch.zeros(3), out_b=torch.zeros(3, 64), lse_b=torch.zeros(3))
    with pytest.raises(RuntimeError, match="pass_ext::attention_merge: " + message):
        pass_ext.attention_merge(**to(good | change, backend.device))
