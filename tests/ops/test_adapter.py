"""adapter_rows_ on every backend: values against float64, rows of tokens to the bit, rows that do not depend on the rows beside
them, and memory that must not be read. Also its differentiable form.
"""

import pytest
import torch
from support.each import each
from torch.nn import functional

import pass_ext
from pass_ext import reference
from pass_ext.ops.adapter import MAX_RANK, adapter_rows
from pass_ext.testing import assert_error_within, assert_same_bits

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
NAN = float("nan")
MIXED = [5, -1, -3, 0, -2, -1, 9, -3, -1, 2, -2]  # unsorted, tokens between slots


def make_case(backend, ids=MIXED, *, width=40, outputs=24, rank=8, adapters=3, dtype=torch.bfloat16):
    """out, x, ids, down, up."""
    generator = torch.Generator().manual_seed(width * 7919 + outputs * 31 + rank)
    shapes = (len(ids), outputs), (len(ids), width), (adapters, rank, width), (adapters, rank, outputs)
    out, x, down, up = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(backend.device) for shape in shapes
    )
    return out, x, torch.tensor(ids, dtype=torch.int64, device=backend.device), down, up


def exact_of(out, x, ids, down, up, scale=1.0):
    """The formula, row by row, in float64."""
    rows = out.double().clone()
    for n, id in enumerate(ids.tolist()):
        if id < 0:
            k = 0 if len(down) == 1 else -1 - id
            rows[n] += scale * ((x[n].double() @ down[k].double().T) @ up[k].double())
    return rows


def assert_right(case, scale=1.0):
    """Errors as PyTorch's in the same dtype; rows of tokens keep their bits."""
    out, x, ids, down, up = case
    got, plain = out.clone(), out.cpu().clone()  # plain PyTorch on the CPU: a GPU's library may add in a better order
    assert pass_ext.layers.adapter_rows_(got, x, ids, down, up, scale) is got
    reference.adapter_rows_(plain, x.cpu(), ids.cpu(), down.cpu(), up.cpu(), scale)
    assert_same_bits(got[ids >= 0], out[ids >= 0])
    if got.numel():
        assert_error_within(got, plain, exact_of(out, x, ids, down, up, scale).to(got.device))
    return got


# ---- values ----


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each("width", [1, 7, 64, 255, 256, 577])
@each("outputs", [1, 9, 64, 2049])
def test_odd_sizes(backend, dtype, width, outputs):
    if backend.name == "emulated" and outputs > 9 and (width, outputs) not in ((7, 2049), (256, 64)):
        return  # seconds each
    for rank, adapters in ((4, 3), (1, 1), (9, 3)):
        ids = MIXED * 6  # so many that a single unlucky sum decides nothing
        case = make_case(backend, ids, width=width, outputs=outputs, rank=rank, adapters=adapters, dtype=dtype)
        assert_right(case, scale=0.5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each("rank", [2, 3, 8, 16, 31, 33, 64, 127, MAX_RANK])
def test_every_rank(backend, dtype, rank):
    for adapters in (1, 3):
        assert_right(make_case(backend, width=72, outputs=48, rank=rank, adapters=adapters, dtype=dtype))


@pytest.mark.parametrize("scale", [0.0, 1.0, -2.5])
def test_the_scale_multiplies_the_product_alone(backend, scale):
    case = make_case(backend, dtype=torch.float32)
    got = assert_right(case, scale)
    assert_same_bits(got, case[0]) if scale == 0 else None


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64, torch.int16], ids=str)
def test_ids_of_every_integer_type(backend, id_dtype):
    out, x, ids, down, up = make_case(backend)
    assert_same_bits(assert_right((out, x, ids.to(id_dtype), down, up)), assert_right((out, x, ids, down, up)))


def test_one_adapter_serves_every_slot(backend):
    out, x, ids, down, up = make_case(backend, [-1, 4, -9, -1000, 3], adapters=1, dtype=torch.float32)
    got = assert_right((out, x, ids, down, up))
    assert_same_bits(got, assert_right((out, x, torch.tensor([-1, 4, -1, -1, 3], device=ids.device), down, up)))


def test_sums_run_in_fp32(backend):
    """4,100 ones add to 256 in bfloat16 and to 2,048 in float16, but to 4,100 in fp32."""
    for dtype in FLOATS:
        x, down, up = (
            torch.ones(*shape, dtype=dtype, device=backend.device) for shape in ((2, 4100), (1, 1, 4100), (1, 1, 8))
        )
        out = torch.full((2, 8), -4096.0, dtype=dtype, device=backend.device)
        pass_ext.layers.adapter_rows_(out, x, torch.tensor([-1, 0], device=backend.device), down, up)
        assert (out[0] == 4.0).all() and (out[1] == -4096.0).all()


def test_the_hidden_numbers_are_not_rounded(backend):
    """257 has no bfloat16."""
    x, down = (torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16, device=backend.device) for _ in range(2))
    down = torch.ones_like(down)[None]
    up = torch.ones(1, 1, 8, dtype=torch.bfloat16, device=backend.device)
    out = torch.full((1, 8), -256.0, dtype=torch.bfloat16, device=backend.device)
    pass_ext.layers.adapter_rows_(out, x, torch.tensor([-1], device=backend.device), down, up)
    assert (out == 1.0).all()


# ---- the gate ----


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_of_tokens_keep_their_bits_beside_wild_slots(backend, dtype):
    """NaN and infinity in the adapters, in slots' rows and in tokens' own rows reach no row of a token."""
    out, x, ids, down, up = make_case(backend, dtype=dtype)
    x[ids < 0], down[1], up[2] = NAN, float("inf"), NAN
    x[0] = NAN
    out[3] = torch.tensor(-0.0, dtype=dtype)
    before = out.clone()
    pass_ext.layers.adapter_rows_(out, x, ids, down, up)
    assert_same_bits(out[ids >= 0], before[ids >= 0])
    assert out[ids < 0].isnan().any(1).all()


def test_a_layer_beside_its_adapter(backend):
    """A linear layer with its adapter gives rows of tokens the bits of the layer alone."""
    _, x, ids, down, up = make_case(backend, width=64, outputs=48)
    weight = torch.randn(48, 64).bfloat16().to(backend.device)
    alone = functional.linear(x, weight)
    both = pass_ext.layers.adapter_rows_(functional.linear(x, weight), x, ids, down, up)
    assert_same_bits(both[ids >= 0], alone[ids >= 0])
    assert not torch.equal(both[ids < 0], alone[ids < 0])


def test_a_call_without_slots_changes_and_reads_nothing(backend):
    out, x, _, down, up = make_case(backend)
    before = out.clone()
    tokens = torch.arange(len(x), device=out.device)
    pass_ext.layers.adapter_rows_(out, x, tokens, torch.full_like(down, NAN), torch.full_like(up, NAN), NAN)
    assert_same_bits(out, before)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("adapters", [1, 3])
def test_a_row_has_the_same_bits_whatever_is_beside_it(backend, dtype, adapters):
    out, x, ids, down, up = make_case(backend, width=100, outputs=70, rank=6, adapters=adapters, dtype=dtype)
    together = pass_ext.layers.adapter_rows_(out.clone(), x, ids, down, up)
    order = torch.tensor([10, 2, 5, 7, 0, 1, 9, 3, 8, 4, 6], device=out.device)
    shuffled = pass_ext.layers.adapter_rows_(out[order], x[order], ids[order], down, up)
    assert_same_bits(shuffled, together[order])
    for n in range(len(ids)):
        alone = pass_ext.layers.adapter_rows_(out[n : n + 1].clone(), x[n : n + 1], ids[n : n + 1], down, up)
        assert_same_bits(alone, together[n : n + 1])


@pytest.mark.quick_on("best")
def test_bits_do_not_depend_on_the_threads(backend, with_threads):
    case = make_case(backend, [-1 - n % 3 for n in range(60)], width=700, outputs=900, rank=32)
    results = with_threads(lambda: assert_right(case), (1, 2, 5))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


# ---- shapes and layouts ----


def test_leading_dimensions(backend):
    out, x, ids, down, up = make_case(backend, MIXED[:6])
    expected = assert_right((out, x, ids, down, up))
    got = out.clone().view(1, 2, 3, 24)
    pass_ext.layers.adapter_rows_(got, x.view(1, 2, 3, 40), ids, down, up)
    assert_same_bits(got.view(6, 24), expected)


def test_rows_apart(backend):
    """NaN lies between the rows, and stays."""
    out, x, ids, down, up = make_case(backend)
    expected = assert_right((out, x, ids, down, up))
    wide = torch.full((len(x), 80), NAN, dtype=x.dtype, device=x.device)
    for offset in (0, 3):
        wide_out, wide_x = wide.clone()[:, offset : offset + 24].copy_(out), wide.clone()[:, :40].copy_(x)
        pass_ext.layers.adapter_rows_(wide_out, wide_x, ids, down, up)
        assert_same_bits(wide_out, expected)
    whole = wide.clone()
    whole[:, 8:32] = out
    pass_ext.layers.adapter_rows_(whole[:, 8:32], x, ids, down, up)
    assert whole[:, :8].isnan().all() and whole[:, 32:].isnan().all()
    strided = [tensor.repeat_interleave(2, -1)[..., ::2] for tensor in (x, down, up)]
    got = pass_ext.layers.adapter_rows_(out.clone(), strided[0], ids.repeat_interleave(2)[::2], *strided[1:])
    assert_same_bits(got, expected)


@pytest.mark.parametrize(
    "sizes", [dict(ids=[]), dict(width=0), dict(outputs=0), dict(rank=0), dict(ids=[3, 1], adapters=0)], ids=str
)
def test_empty(backend, sizes):
    out, x, ids, down, up = make_case(backend, **sizes)
    before = out.clone()
    assert_same_bits(pass_ext.layers.adapter_rows_(out, x, ids, down, up), before)


# ---- refusals ----


def test_refusals(backend):
    out, x, ids, down, up = make_case(backend)
    wrong = [
        (dict(x=x.float()), "x must be bfloat16"),
        (dict(out=out.double()), "out must be bfloat16, float16 or float32"),
        (dict(ids=ids.float()), "ids must be int32 or int64"),
        (dict(ids=ids[:-1]), r"ids must have 11 \(N, the rows of x\)"),
        (dict(ids=ids[:, None]), r"ids must have shape \[N\]"),
        (dict(out=out[:-1]), r"out must have 11 \(as x\)"),
        (dict(x=x[:, :-1]), r"x must have 40 \(in, the last size of down\)"),
        (dict(up=up[:, :-1]), r"up must have 8 \(r, the rank of down\)"),
        (dict(up=up[:1]), r"up must have 3 \(K, the adapters of down\)"),
        (dict(down=down[0]), r"down must have shape \[K, r, in\]"),
        (dict(out=out[:, :-1]), r"out must have 24 \(out, the last size of up\)"),
        (dict(out=out.repeat_interleave(2, 1)[:, ::2]), "out must have contiguous rows"),
    ]
    for changed, message in wrong:
        arguments = dict(out=out.clone(), x=x, ids=ids, down=down, up=up) | changed
        with pytest.raises((RuntimeError, ValueError), match=message):
            pass_ext.layers.adapter_rows_(**arguments)
    deep = make_case(backend, rank=MAX_RANK + 1)
    with pytest.raises(RuntimeError, match="down must have less than 129 ranks"):
        pass_ext.layers.adapter_rows_(*deep)
    same = torch.zeros(11, 40, dtype=out.dtype, device=out.device)
    with pytest.raises(RuntimeError, match="out must not be x"):
        pass_ext.layers.adapter_rows_(same, same, ids, down, torch.zeros_like(down))


def test_slots_without_an_adapter(backend):
    """The CPU names the first, before it writes; CUDA leaves such rows as they are, and names them in debug mode."""
    out, x, ids, down, up = make_case(backend, [-1, 2, -4, -9])
    before = out.clone()
    message = r"ids must be at least -3 \(3 adapters\), got -4 at index 2"
    if backend.name.startswith("cpu"):
        with pytest.raises(RuntimeError, match=message):
            pass_ext.layers.adapter_rows_(out, x, ids, down, up)
        assert_same_bits(out, before)
    else:
        pass_ext.layers.adapter_rows_(out, x, ids, down, up)
        assert_same_bits(out[1:], before[1:])
    pass_ext.set_debug(True)
    try:
        with pytest.raises(IndexError, match=message):
            pass_ext.layers.adapter_rows_(out, x, ids, down, up)
    finally:
        pass_ext.set_debug(False)


def test_gradients_are_refused(backend):
    out, x, ids, down, up = make_case(backend, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="adapter_rows, which has gradients"):
        pass_ext.layers.adapter_rows_(out, x, ids, down.requires_grad_(), up)
    with torch.no_grad():
        pass_ext.layers.adapter_rows_(out, x, ids, down, up)


# ---- the differentiable form ----


@pytest.mark.parametrize("adapters", [1, 3])
def test_the_differentiable_form(adapters):
    generator = torch.Generator().manual_seed(1)
    shapes = ((11, 5), (11, 7), (adapters, 2, 7), (adapters, 2, 5))
    out, x, down, up = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    ids = torch.tensor(MIXED)
    got = adapter_rows(out, x, ids, down, up, 0.5)
    torch.testing.assert_close(got, exact_of(out, x, ids, down, up, 0.5))
    assert_same_bits(got[ids >= 0], out[ids >= 0])
    inputs = [tensor.requires_grad_() for tensor in (out, x, down, up)]
    torch.autograd.gradcheck(lambda out, x, down, up: adapter_rows(out, x, ids, down, up, 0.5), inputs)


def test_the_differentiable_form_with_wide_weights():
    """Master weights in fp32 beside a model in bfloat16."""
    out, x = torch.zeros(1, 2, 5, dtype=torch.bfloat16), torch.ones(1, 2, 7, dtype=torch.bfloat16)
    down, up = torch.ones(1, 3, 7, requires_grad=True), torch.ones(1, 3, 5, requires_grad=True)
    got = adapter_rows(out, x, torch.tensor([-1, 0]), down, up)
    assert got.dtype == torch.bfloat16 and (got[0, 0] == 21).all() and (got[0, 1] == 0).all()
    got.float().sum().backward()
    assert down.grad.dtype == torch.float32 and (down.grad == 5).all() and (up.grad == 7).all()
