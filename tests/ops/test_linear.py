"""linear_rows and linear_packed on every backend: values against float64, bits of a row that do not depend on other rows, and
memory that must not be read. Also `computes_by_ops`, which gives linear_rows to a model's layers.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from support.each import each
from support.samples import K_SIZES, PACKED_SIZES, packed_weight
from torch import nn
from torch.nn import functional

import pass_ext
from pass_ext import _library, reference
from pass_ext.decoding.models import module_ops, product_times
from pass_ext.decoding.models.module_ops import are_few, computes_by_ops, most_few_rows
from pass_ext.testing import assert_error_within, assert_same_bits, cpu_backends

pytestmark = pytest.mark.usefixtures("on_backend")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BEST_CPU = cpu_backends()[-1].name


def make_case(rows, width, outputs, dtype=torch.bfloat16):
    generator = torch.Generator("cpu").manual_seed(rows * 7919 + width * 31 + outputs)
    shapes = ((rows, width), (outputs, width), (outputs,))
    numbers = [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in shapes]
    return [part.to(torch.get_default_device(), dtype) for part in numbers]


def assert_right(x, weight, bias=None):
    got = pass_ext.layers.linear_rows(x, weight, bias)
    plain = functional.linear(x, weight, bias)
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype == plain.dtype and got.shape == plain.shape
    if got.numel():
        assert_error_within(got, plain, exact)
    return got


# ---- values ----


@pytest.mark.by_tiles
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each("width", [1, 7, 63, 65, 768, 1000])
@pytest.mark.parametrize(
    "outputs", [1, 45, *(pytest.param(n, marks=pytest.mark.quick_on("cpu")) for n in (3, 17, 193, 601))]
)
def test_odd_sizes(backend, dtype, width, outputs):
    x, weight, bias = make_case(130, width, outputs, dtype)  # so many that a single unlucky sum decides nothing
    for given in (bias, None):
        got = assert_right(x, weight, given)
        for rows in (1, 5, 13):
            assert_same_bits(pass_ext.layers.linear_rows(x[:rows], weight, given), got[:rows])


@pytest.mark.by_tiles
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_reference_agrees(backend, dtype):
    case = make_case(6, 96, 21, dtype)
    exact = functional.linear(*(tensor.double() for tensor in case))
    assert_error_within(pass_ext.layers.linear_rows(*case), reference.linear_rows(*case), exact)


@pytest.mark.by_tiles
def test_rows_wider_than_the_scratch_holds_at_once(backend):
    assert_right(*make_case(53, 5600, 9))


def test_many_rows(backend):
    assert_right(*make_case(700, 200, 70, torch.float32))


@pytest.mark.by_tiles
@pytest.mark.parametrize(("rows", "width", "outputs"), [(0, 8, 3), (4, 0, 3), (4, 8, 0), (0, 0, 0)])
def test_empty(backend, rows, width, outputs):
    x, weight, bias = make_case(rows, width, outputs)
    assert_same_bits(pass_ext.layers.linear_rows(x, weight, bias), bias.expand(rows, outputs))
    assert_same_bits(pass_ext.layers.linear_rows(x, weight), torch.zeros(rows, outputs, dtype=x.dtype))


@pytest.mark.parametrize("shape", [(40,), (1, 40), (2, 3, 40), (2, 0, 40), (1, 1, 5, 40)], ids=str)
def test_every_leading_shape(backend, shape):
    _, weight, bias = make_case(1, 40, 12)
    assert_right(torch.randn(shape).bfloat16(), weight, bias)


@pytest.mark.by_tiles
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tensors_need_not_be_contiguous(backend, dtype):
    x, weight, bias = make_case(10, 45, 14, dtype)
    expected = pass_ext.layers.linear_rows(x, weight, bias)
    for offset in (0, 3):
        wide_x, wide_weight = (torch.full((len(t), 100), float("nan"), dtype=dtype) for t in (x, weight))
        strided = wide_x[:, offset : offset + 45].copy_(x), wide_weight[:, offset : offset + 45].copy_(weight)
        assert_same_bits(pass_ext.layers.linear_rows(*strided, bias), expected)
    every_other = torch.full((20, 45), float("nan"), dtype=dtype)
    every_other[::2] = x
    assert_same_bits(pass_ext.layers.linear_rows(every_other[::2], weight, bias.repeat_interleave(2)[::2]), expected)
    assert_same_bits(pass_ext.layers.linear_rows(x.t().contiguous().t(), weight, bias), expected)
    split = x.view(2, 5, 45)
    apart = torch.full((2, 9, 45), float("nan"), dtype=dtype)
    apart[:, :5] = split
    assert_same_bits(pass_ext.layers.linear_rows(apart[:, :5], weight, bias), expected.view(2, 5, 14))
    assert_same_bits(
        pass_ext.layers.linear_rows(split.transpose(0, 1), weight, bias),
        expected.view(2, 5, 14).transpose(0, 1).contiguous(),
    )
    assert_same_bits(pass_ext.layers.linear_rows(x[:1].expand(4, 45), weight, bias), expected[:1].repeat(4, 1))


@pytest.mark.by_tiles
def test_sums_run_in_fp32(backend):
    """4,100 ones add to 256 in bfloat16 and to 2,048 in float16, but to 4,100 in fp32."""
    ones = torch.ones(3, 4100)
    for dtype, sum_of_ones in ((torch.bfloat16, 4096.0), (torch.float16, 4100.0), (torch.float32, 4100.0)):
        assert (pass_ext.layers.linear_rows(ones.to(dtype), ones.to(dtype)) == sum_of_ones).all()
    bias = torch.full((3,), -4096.0, dtype=torch.bfloat16)
    assert (pass_ext.layers.linear_rows(ones.bfloat16(), ones.bfloat16(), bias) == 4.0).all()


# ---- a row's bits are its own ----


@pytest.mark.by_tiles
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("width", "outputs"), [(100, 23), (1600, 9)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(backend, dtype, width, outputs):
    x, weight, bias = make_case(40, width, outputs, dtype)
    alone = torch.cat([pass_ext.layers.linear_rows(row[None], weight, bias) for row in x])
    for rows in range(1, 41):
        assert_same_bits(pass_ext.layers.linear_rows(x[:rows], weight, bias), alone[:rows])
    for first in (1, 5, 17):
        assert_same_bits(pass_ext.layers.linear_rows(x[first:], weight, bias), alone[first:])
    shuffled = torch.randperm(40)
    assert_same_bits(pass_ext.layers.linear_rows(x[shuffled], weight, bias), alone[shuffled])
    assert_same_bits(pass_ext.layers.linear_rows(x.view(4, 10, width), weight, bias), alone.view(4, 10, outputs))
    assert_same_bits(pass_ext.layers.linear_rows(x.repeat(12, 1), weight, bias), alone.repeat(12, 1))


@pytest.mark.by_tiles
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_threads_change_no_bit(backend, with_threads, dtype):
    x, weight, bias = make_case(9, 576, 95 if backend.name == "emulated" else 1023, dtype)
    # More threads take smaller and smaller groups of outputs.
    results = with_threads(
        lambda: (pass_ext.layers.linear_rows(x, weight, bias), pass_ext.layers.linear_rows(x[4:5], weight, bias)),
        (1, 2, 3, 5, 8),
    )
    for whole, row in results:
        assert_same_bits(whole, results[0][0])
        assert_same_bits(row, whole[4:5])


@pytest.mark.by_tiles
def test_an_output_has_the_same_bits_among_any_others(backend):
    x, weight, bias = make_case(7, 130, 90)
    whole = pass_ext.layers.linear_rows(x, weight, bias)
    for first, end in ((0, 1), (3, 90), (70, 81)):
        part = pass_ext.layers.linear_rows(x, weight[first:end], bias[first:end])
        assert_same_bits(part, whole[:, first:end].contiguous())


def documented_tile_sums(x, weight):
    """What Intel documents for TDPBF16PS on tiles of 32 inputs: sums from 0 on over the even and the odd ones, each product
    fused, their sum, and its addition; denormal numbers are 0."""

    def flushed(numbers):
        return torch.where(numbers.abs() < torch.finfo(torch.float32).tiny, 0.0 * numbers, numbers).float()

    left, right = (flushed(part.float()).double() for part in (x[:, None], weight[None]))
    total = torch.zeros(len(x), len(weight))
    for first in range(0, x.shape[-1], 32):
        even, odd = torch.zeros_like(total), torch.zeros_like(total)
        for i in range(first, first + 32, 2):
            even = flushed((left[..., i] * right[..., i] + even).float())
            odd = flushed((left[..., i + 1] * right[..., i + 1] + odd).float())
        total = flushed(total + flushed(even + odd))
    return total


@pytest.mark.by_tiles
@pytest.mark.usefixtures("cpu_only")
@each("scale", [1.0, 2.0**-63])  # the second: products around the smallest normal number
def test_tiles_have_the_bits_that_intel_documents(backend, scale):
    if "amx" not in backend.name:
        return
    x, weight, _ = (part * scale for part in make_case(19, 320, 37))
    x[:, 160:], weight[:, 160:] = x[:, :160], -weight[:, :160]  # what is left are errors, of few bits: each is seen
    x[:, 5], weight[:, 5], weight[:, 165] = 2.0**110, 2.0**-130, 0.0  # the weights are denormal: none counts
    expected = documented_tile_sums(x, weight)
    assert expected.any()
    assert_same_bits(pass_ext.layers.linear_rows(x, weight), expected.bfloat16())


@pytest.mark.skipif(BEST_CPU != "cpu-avx512_bf16", reason="other processors have one unit")
def test_status_names_the_unit_that_multiplies():
    """Without a limit the one that was measured to be faster; a limit names another."""
    x, weight, _ = make_case(5, 700, 40)
    x[:, 350:], weight[:, 350:] = x[:, :350], -weight[:, :350]  # what is left are errors: each unit has its own
    products = {}
    try:
        for limit in ("avx512", "avx512_bf16", "amx_emulated", ""):
            _library.limit_cpu_isa(limit)
            products.setdefault(pass_ext.status().cpu_products, []).append(pass_ext.layers.linear_rows(x, weight))
    finally:
        _library.limit_cpu_isa("")
    assert {"fp32", "pairs", "amx_emulated"} <= products.keys()
    for unit, (first, *others) in products.items():
        for other in others:
            assert_same_bits(other, first)
        assert unit == "amx" or not any(
            torch.equal(first, products[name][0]) for name in products.keys() - {unit, "amx"}
        )


# ---- values that are not finite stay in their places ----


@pytest.mark.by_tiles
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_spoils_its_row_or_output_only(backend, dtype, bad):
    for width in (64, 71, 900):
        x, weight, bias = make_case(11, width, 19, dtype)
        clean = pass_ext.layers.linear_rows(x, weight, bias)
        for place in (0, width // 2, width - 1):
            spoiled = x.clone()
            spoiled[4, place] = bad
            got = pass_ext.layers.linear_rows(spoiled, weight, bias)
            assert not torch.isfinite(got[4]).any()
            assert_same_bits(got[torch.arange(11) != 4], clean[torch.arange(11) != 4])
            spoiled = weight.clone()
            spoiled[17, place] = bad
            got = pass_ext.layers.linear_rows(x, spoiled, bias)
            assert not torch.isfinite(got[:, 17]).any()
            assert_same_bits(got[:, torch.arange(19) != 17], clean[:, torch.arange(19) != 17])


@pytest.mark.by_tiles
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nothing_is_left_of_earlier_calls(backend, dtype):
    case, before = make_case(9, 79, 31, dtype), make_case(40, 1000, 70, dtype)
    expected = pass_ext.layers.linear_rows(*case)
    pass_ext.layers.linear_rows(*(torch.full_like(tensor, float("nan")) for tensor in before))
    assert_same_bits(pass_ext.layers.linear_rows(*case), expected)
    assert torch.isfinite(expected).all()


# ---- refusals ----

X, WEIGHT = torch.zeros(2, 8), torch.zeros(3, 8)
REFUSALS = [
    ((X.double(), WEIGHT.double()), r"x must be bfloat16, float16 or float32, got float64\[2, 8\]"),
    ((X, WEIGHT.half()), r"weight must be float32, got float16\[3, 8\]"),
    ((X, WEIGHT[0]), r"weight must have shape \[out, in\], got float32\[8\]"),
    ((X[0, 0], WEIGHT), r"x must have shape \[\.\.\., in\], got float32\[\]"),
    ((X[:, :7], WEIGHT), r"x must have 8 \(in, the columns of weight\) in dimension 1, got float32\[2, 7\]"),
    ((X, torch.zeros(8, 3).t()), r"weight must be contiguous in its last dimension.* with stride 3"),
    ((X, WEIGHT, torch.zeros(3).half()), r"bias must be float32, got float16\[3\]"),
    ((X, WEIGHT, torch.zeros(1, 3)), r"bias must have shape \[out\]"),
    ((X, WEIGHT, torch.zeros(4)), r"bias must have 3 \(out, the rows of weight\) in dimension 0, got float32\[4\]"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS, ids=[m[:30] for _, m in REFUSALS])
def test_bad_input_is_refused_in_words(arguments, message):
    with pytest.raises(RuntimeError, match="pass_ext::linear_rows: " + message):
        pass_ext.layers.linear_rows(*arguments)


# ---- packed weights ----


@pytest.fixture
def cpu_only(backend):
    if not backend.name.startswith("cpu"):
        pytest.skip(_library.CPU_ONLY["linear_packed"])


def packed_case(rows, width, outputs, size, dtype=torch.float32):
    torch.manual_seed(rows * 7919 + width * 31 + outputs + size)
    width = -(-width // 256) * 256 if size in K_SIZES else width
    x = torch.randn(rows, width, dtype=torch.float64).to(dtype)
    return x, packed_weight("cpu", outputs, width, size), torch.randn(outputs).to(dtype)


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("size", PACKED_SIZES)
@each("width", [32, 64, 1440])
@each("outputs", [1, 15, 16, 83])
def test_packed_products_are_within_the_stated_error(backend, size, width, outputs):
    """Half a unit for each number of x times its weight, and fp32's rounding of a few sums."""
    x, weight, bias = packed_case(11, width, outputs, size)
    exact = reference.linear_packed(x.double(), weight, bias.double(), outputs=outputs)
    got = pass_ext.layers.linear_packed(x, weight, bias, outputs=outputs)
    dense = pass_ext.layers.unpack_weight(weight, outputs).double()
    largest = x.double().abs().view(11, -1, 32).amax(-1).repeat_interleave(32, -1)
    bound = largest @ dense.abs().T / 65024
    sums = largest @ (dense.abs() + 300 * 0.125).T * 2**-22  # codes times scales are larger than the weights they make
    assert bool(((got.double() - exact).abs() <= bound + sums + 1e-6).all())
    rounded = functional.linear(x.double(), dense.bfloat16().double(), bias.double())
    if outputs > 1:  # enough numbers to compare two sums of errors
        assert (got.double() - exact).norm() < 0.1 * (rounded - exact).norm(), "a tenth of weights in bfloat16"


def packed_bits():
    """The products of many cases, as the best instruction set gives them."""
    return {
        (size, dtype, rows): pass_ext.layers.linear_packed(*packed_case(rows, 352, 83, size, dtype), outputs=83)
        for size in PACKED_SIZES
        for dtype in FLOATS
        for rows in (1, 9, 40)
    }


@pytest.fixture(scope="module")
def bits_of_portable():
    _library.limit_cpu_isa("portable")
    try:
        return packed_bits()
    finally:
        _library.limit_cpu_isa("")


@pytest.mark.usefixtures("cpu_only")
def test_packed_products_have_the_same_bits_on_every_instruction_set(backend, bits_of_portable):
    for case, got in packed_bits().items():
        assert_same_bits(got, bits_of_portable[case])


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("size", PACKED_SIZES)
def test_a_row_of_a_packed_product_has_the_bits_that_it_has_alone(backend, size):
    """In calls of any number of rows, more than stay ready at once, by any number of threads."""
    x, weight, bias = packed_case(600, 1600, 70, size, torch.bfloat16)
    whole = pass_ext.layers.linear_packed(x, weight, bias, outputs=70)
    for first, rows in ((0, 1), (3, 2), (10, 5), (590, 10), (100, 17), (0, 33)):
        got = pass_ext.layers.linear_packed(x[first : first + rows], weight, bias, outputs=70)
        assert_same_bits(got, whole[first : first + rows])
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert_same_bits(pass_ext.layers.linear_packed(x[:40], weight, bias, outputs=70), whole[:40])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("cpu_only")
def test_a_packed_weight_is_the_numbers_that_it_was_made_of(backend):
    """Rows of the unit matrix times the largest digit are exact: each product is one weight."""
    table = torch.randint(0, 256, (16,), dtype=torch.uint8)
    for bits, scales, factors, stands_for in (
        (4, torch.float16, 0, None),
        (4, torch.float16, 0, table),
        (4, torch.float16, 1, None),
        (4, torch.float16, 2, None),
        (4, torch.float32, 0, None),
        (4, torch.float32, 0, table),
        (8, torch.float16, 0, None),
        (8, torch.float16, 1, None),
        (8, torch.float16, 2, None),
        (8, torch.float32, 0, None),
    ):
        codes = torch.randint(0, 1 << bits, (21, 256), dtype=torch.uint8)
        scale, offset = (torch.randint(-4, 5, (21, 1 if factors else 8)).to(scales) / 8 for _ in range(2))
        whole = torch.randint(-128, 128, (2, 21, 8 * factors), dtype=torch.int8) if factors else None
        scale, offset = (number / 128 if factors else number for number in (scale, offset))
        weight = pass_ext.layers.pack_weight(codes, scale, offset, bits=bits, table=stands_for, factors=whole)
        numbers = codes if stands_for is None else stands_for[codes.int()]
        multiplied = (number.double() * (1 if whole is None else whole[i]) for i, number in enumerate((scale, offset)))
        each_scale, each_offset = (number.repeat_interleave(256 // number.shape[1], 1) for number in multiplied)
        dense = numbers * each_scale + each_offset
        assert torch.equal(pass_ext.layers.unpack_weight(weight, 21).double(), dense)
        assert torch.equal(reference.linear_packed(torch.eye(256).double(), weight, outputs=21), dense.T)
        got = pass_ext.layers.linear_packed(torch.eye(256) * 32512, weight, outputs=21)
        assert (got / 32512 - dense.T).abs().max() < 256 * 0.5 * 2**-22, "the rounding of a code times its scale"


@pytest.mark.usefixtures("cpu_only")
@each("bits", [4, 8])
@each("rows", [1, 3, 8])
def test_factors_give_the_bits_of_the_scales_that_they_make(backend, rows, bits):
    codes = torch.randint(0, 1 << bits, (21, 512), dtype=torch.uint8)
    scale, offset = torch.randn(21, 2).half() / 64, torch.randn(21, 2).half() / 64
    factors = torch.randint(-128, 128, (2, 21, 16), dtype=torch.int8)
    weight = pass_ext.layers.pack_weight(codes, scale, offset, bits=bits, factors=factors)
    whole = (
        number.float().repeat_interleave(8, 1) * each for number, each in zip((scale, offset), factors, strict=True)
    )
    x, wide = torch.randn(rows, 512), pass_ext.layers.pack_weight(codes, *whole, bits=bits)
    expected = pass_ext.layers.linear_packed(x, wide, outputs=21)
    assert_same_bits(pass_ext.layers.linear_packed(x, weight, outputs=21), expected)


@pytest.mark.usefixtures("cpu_only")
@each("bits", [4, 8])
@each("code", [0, 1, -1])
@each("rows", [1, 4, 9])
def test_packed_products_of_the_largest_digits_and_codes_are_exact(backend, rows, code, bits):
    """Every x at an end of its range, in any pattern of signs: no whole number leaves its 16 bits."""
    signs = torch.tensor([1.0, -1.0])[torch.randint(0, 2, (rows, 64))]
    signs[0] = 1
    codes = torch.full((16, 64), code % (1 << bits), dtype=torch.uint8)
    scale, offset = torch.ones(16, 2).half(), torch.zeros(16, 2).half()
    weight = pass_ext.layers.pack_weight(codes, scale, offset, bits=bits)
    got = pass_ext.layers.linear_packed(signs * 32512, weight, outputs=16)
    assert torch.equal(got.double(), 32512 * signs.double() @ codes.double().T)


@pytest.mark.usefixtures("cpu_only")
def test_packed_rows_that_are_not_finite_tiny_or_empty(backend):
    x, weight, bias = packed_case(5, 64, 20, 320)
    clean = pass_ext.layers.linear_packed(x, weight, bias, outputs=20)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for place in (0, 31, 40):
            spoiled = x.clone()
            spoiled[2, place] = bad
            got = pass_ext.layers.linear_packed(spoiled, weight, bias, outputs=20)
            assert got[2].isnan().all()
            assert_same_bits(got[torch.arange(5) != 2], clean[torch.arange(5) != 2])
    assert_same_bits(pass_ext.layers.linear_packed(x * 0, weight, bias, outputs=20), bias.expand(5, 20))
    assert_same_bits(pass_ext.layers.linear_packed(x * 1e-35, weight, bias, outputs=20), bias.expand(5, 20))
    small, large = (pass_ext.layers.linear_packed(x * 2.0**power, weight, outputs=20) for power in (-80, 100))
    assert_same_bits(small * 2.0**80, large * 2.0**-100)
    for shape in ((0, 64), (2, 0, 64), (64,), (2, 3, 64)):
        rows = torch.randn(shape)
        got = pass_ext.layers.linear_packed(rows, weight, bias, outputs=20)
        assert got.shape == (*shape[:-1], 20)
        assert_same_bits(got.view(-1, 20), pass_ext.layers.linear_packed(rows.view(-1, 64), weight, bias, outputs=20))


PACKED = torch.zeros(2, 3, 320, dtype=torch.uint8)
PACKED_REFUSALS = [
    ((X.new_zeros(2, 96).double(), PACKED, None, 32), r"x must be bfloat16, float16 or float32, got float64"),
    ((X.new_zeros(2, 96), PACKED.int(), None, 32), r"weight must be uint8, got int32"),
    (
        (X.new_zeros(2, 96), PACKED[0], None, 32),
        r"weight must have shape \[out / 16, in / 32, bytes\], got uint8\[3, 320\]",
    ),
    (
        (X.new_zeros(2, 96), PACKED[..., :100].contiguous(), None, 32),
        r"weight must have 296, 320, 328, 336, 384, 400, 552, 576, 584 or 640 \(bytes of a bl",
    ),
    (
        (X.new_zeros(2, 96), PACKED.new_zeros(2, 3, 296), None, 32),
        r"weight must have a multiple of 8 blocks of 296 bytes in dimension 1, got uint8\[2, 3, 296\]",
    ),
    ((X.new_zeros(2, 96), PACKED.transpose(0, 1), None, 48), r"weight must be contiguous"),
    ((X.new_zeros(2, 90), PACKED, None, 32), r"x must have 96 \(in, 32 for each block of weight\) in dimension 1"),
    ((X.new_zeros(2, 96), PACKED, None, 33), r"outputs must be at most 32 and more than 16 .* got 33"),
    ((X.new_zeros(2, 96), PACKED, None, 16), r"outputs must be at most 32 and more than 16 .* got 16"),
    ((X.new_zeros(2, 96), PACKED, torch.zeros(32), 31), r"bias must have 31 \(outputs\) in dimension 0"),
    ((X.new_zeros(2, 96), PACKED, torch.zeros(32).half(), 32), r"bias must be float32, got float16"),
    ((torch.tensor(1.0), PACKED, None, 32), r"x must have shape \[\.\.\., in\]"),
    (
        (X.new_zeros(2, 96), PACKED.new_zeros(1921)[1:].view(2, 3, 320), None, 32),
        r"weight must lie at a multiple",
    ),
]


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize(("arguments", "message"), PACKED_REFUSALS, ids=[m[:30] for _, m in PACKED_REFUSALS])
def test_bad_packed_input_is_refused_in_words(backend, arguments, message):
    x, weight, bias, outputs = arguments
    with pytest.raises(RuntimeError, match="pass_ext::linear_packed: " + message):
        pass_ext.layers.linear_packed(x, weight, bias, outputs=outputs)


# ---- a model's layers ----


class Twice(nn.Linear):
    """Not plain: a subclass."""

    def forward(self, input):
        return super().forward(input) * 2


def takes(rows, most, *, is_torchs):
    return not is_torchs and are_few(rows, most)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Sequential(nn.Linear(32, 8, bias=False)), Twice(8, 4)
    ).bfloat16()


@pytest.fixture
def calls(monkeypatch):
    """The number of rows of each call of the op."""
    seen, op = [], module_ops._linear

    def counting(x, weight, bias):
        seen.append(x.numel() // x.shape[-1])
        return op(x, weight, bias)

    monkeypatch.setattr(module_ops, "_linear", counting)
    return seen


def has_fused_forward(model):
    return [name for name, layer in model.named_modules() if "forward" in vars(layer)]


def test_plain_layers_compute_through_the_op(calls):
    model, x = make_model(), torch.randn(2, 3, 16).bfloat16()
    with torch.no_grad():
        expected = model(x)
        computes_by_ops(model, takes)
        assert has_fused_forward(model) == ["0", "2.0"]
        hidden = functional.gelu(pass_ext.layers.linear_rows(x, model[0].weight, model[0].bias))
        middle = pass_ext.layers.linear_rows(hidden, model[2][0].weight)
        assert_same_bits(model(x), model[3](middle))
        torch.testing.assert_close(model(x), expected)
        assert calls == [6] * 4


def test_many_rows_and_gradients_go_where_they_went(calls, monkeypatch):
    monkeypatch.setattr(module_ops, "most_few_rows", lambda dtype, is_cpu: 100)
    model = make_model()
    few, most, more = (torch.randn(rows, 16).bfloat16() for rows in (1, 100, 101))
    computes_by_ops(model, takes)
    model(few).sum().backward()
    assert calls == [] and model[0].weight.grad is not None
    with torch.inference_mode():
        model(more)
        assert calls == []
        model(most)
        assert calls == [100] * 2


@pytest.mark.parametrize(
    ("machine", "amx", "bf16", "fp16", "expected"),
    [
        ("x86_64", False, False, False, (sys.maxsize, sys.maxsize, 256)),
        ("x86_64", False, True, False, (192, sys.maxsize, 256)),
        ("x86_64", True, True, True, (64, 64, 256)),
        ("aarch64", False, False, False, (64, 64, 64)),
    ],
)
def test_rows_are_few_while_pytorch_is_slower(monkeypatch, machine, amx, bf16, fp16, expected):
    monkeypatch.setattr(module_ops.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: fp16)
    most = most_few_rows.__wrapped__  # which keeps nothing
    assert tuple(most(dtype, True) for dtype in FLOATS) == expected
    assert most(torch.bfloat16, False) == 64


def test_what_is_few_for_a_text_is_few_in_a_batch():
    assert are_few(64, 64) and not are_few(65, 64)
    assert are_few(300, 64, 64) and not are_few(300, 64, 65)
    assert are_few(64, 64, 65), "some rows of a long text"


def test_layers_that_are_not_plain_are_left_alone():
    hooked = make_model()
    hooked[0].register_forward_hook(lambda *_: None)
    own = make_model()
    own[0].forward = forward = lambda input: functional.linear(input, own[0].weight)
    for model, changed in (
        (hooked, ["2.0"]),
        (own, ["0", "2.0"]),
        (make_model().double(), []),
        (make_model().to("meta"), []),
    ):
        computes_by_ops(model, takes)
        assert has_fused_forward(model) == changed
    assert own[0].forward is forward
    with torch.autocast("cpu", torch.bfloat16):
        computes_by_ops(model := make_model().float(), takes)
    assert has_fused_forward(model) == []


def test_all_products_of_a_layer_are_of_the_library_that_is_faster_for_them(monkeypatch):
    """As k and v of an 8B model beside its q on a GPU."""
    is_large = lambda weights: sum(weight.numel() for weight in weights) > 1000  # noqa: E731
    monkeypatch.setattr(module_ops, "torch_is_faster", is_large)

    def layer(outputs):
        return nn.ModuleDict({"q": nn.Linear(16, outputs), "k": nn.Linear(16, 8), "norm": nn.LayerNorm(16)})

    model = nn.ModuleDict({"layers": nn.ModuleList([layer(32), layer(64)]), "head": nn.Linear(16, 20)})
    asked = []
    computes_by_ops(model, lambda *_, is_torchs: asked.append(is_torchs))
    with torch.no_grad():
        for part in (*(layer[name] for layer in model["layers"] for name in "qk"), model["head"]):
            part(torch.ones(1, 16))
    assert asked == [False, False, True, True, False]


class OfGpu:
    """What is asked of a weight on a GPU."""

    is_cuda, device = True, "cuda"

    def __init__(self, *shape, dtype=torch.bfloat16):
        self.shape, self.nbytes, self.dtype = shape, 2 * shape[0] * shape[1], dtype

    def dim(self):
        return 2


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """The products that were timed: a GPU's times stand in, `timed.torch` those of PyTorch in units of ours."""
    found = SimpleNamespace(torch=1.0, asked=[])

    def time_product(product, weight, rows):
        found.asked.append((tuple(weight.shape), rows))
        return weight.nbytes * rows * (found.torch if product is functional.linear else 1.0)

    monkeypatch.setattr(product_times, "time_product", time_product)
    monkeypatch.setattr(product_times, "_measured", {})
    monkeypatch.setattr(product_times, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(product_times, "kernels_hash", lambda device: "kernels")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    return found


@pytest.mark.parametrize("torchs, is_faster", [(0.9, True), (1.0, False), (1.1, False)])
def test_a_measurement_chooses_the_products_of_heavy_weights(timed, torchs, is_faster):
    timed.torch = torchs
    assert product_times.torch_is_faster([OfGpu(14336, 4096), OfGpu(1024, 1024)]) == is_faster
    assert timed.asked == [((14336, 4096), rows) for rows in (1, 16, 1, 16)]


def test_products_are_measured_once_for_a_shape_also_by_another_process(timed, monkeypatch):
    timed.torch = 0.5
    for _ in range(3):
        assert product_times.torch_is_faster([OfGpu(4096, 4096), OfGpu(4096, 4096)])
    assert len(timed.asked) == 4
    monkeypatch.setattr(product_times, "_measured", {})
    timed.torch = 2.0
    assert product_times.torch_is_faster([OfGpu(4096, 4096)]), "the times on disk"
    assert len(timed.asked) == 4
    (product_times.cache_folder() / "products.json").write_text("[")
    monkeypatch.setattr(product_times, "_measured", {})
    assert not product_times.torch_is_faster([OfGpu(4096, 4096)]), "a damaged file is measured again"


def test_weights_on_the_cpu_and_light_ones_are_ours_without_a_measurement(timed):
    weights = [torch.empty(1 << 13, 1 << 12), OfGpu(2048, 2048), OfGpu(1 << 13, 1 << 12, dtype=torch.float64)]
    assert not product_times.torch_is_faster(weights)
    assert timed.asked == []


class Own(torch.Tensor):
    """A subclass, as torchao's and distributed tensors are."""


def test_weights_that_are_no_plain_tensors_are_left_alone():
    def changed(change):
        model = make_model()
        change(model[0])
        computes_by_ops(model, takes)
        return has_fused_forward(model)

    def own_weight(layer):
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Own))

    def own_bias(layer):
        layer.bias = nn.Parameter(layer.bias.detach().as_subclass(Own))

    def sparse(layer):
        layer.weight = nn.Parameter(layer.weight.detach().float().to_sparse())

    def freed(layer):
        layer.weight.untyped_storage().resize_(0)

    def parametrized(layer):
        nn.utils.parametrizations.weight_norm(layer)

    for change in (own_weight, own_bias, sparse, freed, parametrized):
        assert changed(change) == ["2.0"], change
    assert changed(lambda _: None) == ["0", "2.0"]


def test_weights_that_are_replaced_meanwhile_are_used(calls):
    """By another parameter, by an adapter's subclass, by functional_call; then the first weight is back."""
    model, x = make_model(), torch.randn(3, 16).bfloat16()
    layer = model[0]
    first, other = layer.weight, nn.Parameter(torch.randn(32, 16).bfloat16())
    computes_by_ops(model, takes)
    with torch.no_grad():
        layer.weight = other
        assert_same_bits(layer(x), functional.linear(x, other, layer.bias))
        layer.weight, layer.bias, bias = first, None, layer.bias
        assert_same_bits(layer(x), functional.linear(x, first))
        layer.bias = bias
        called = torch.func.functional_call(layer, {"weight": other}, (x,))
        assert_same_bits(called, functional.linear(x, other, bias))
        layer.weight = nn.Parameter(first.as_subclass(Own))
        layer(x)
        assert calls == []
        layer.weight = first
        assert_same_bits(layer(x), pass_ext.layers.linear_rows(x, first, bias))
        assert calls == [3]
