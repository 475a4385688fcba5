"""step_rms_norm, step_rotary and step_gate on every backend: bits of transformers' modules where the order of sums allows,
errors against float64 elsewhere, the same bits on every backend, and memory that must not be read.
"""

import pytest
import torch
from support.each import each
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

import pass_ext
from pass_ext import _library, reference
from pass_ext.ops.step import ACTIVATIONS, NORM_FORMS
from pass_ext.testing import assert_error_within, assert_same_bits

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (1, 2, 7, 8, 15, 16, 17, 33, 64, 100, 576, 577, 1016, 1023, 1024, 1025, 1032, 2048, 3001, 4096)
NAN = float("nan")


def make(backend, *shapes, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator().manual_seed(hash(shapes) % 2**31)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) * scale for shape in shapes]
    return [tensor.to(dtype).to(backend.device) for tensor in tensors]


def apart(x, gap=5):
    """The same numbers with NaN between the rows."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + gap), NAN, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def on_portable_cpu(op, *arguments, **options):
    """The result of the CPU kernels that use no vector instruction."""
    arguments, options = (
        [value.cpu() if isinstance(value, torch.Tensor) else value for value in arguments],
        {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in options.items()},
    )
    before = pass_ext.status().cpu_isa
    _library.limit_cpu_isa("portable")
    try:
        with _disable_current_modes():
            return getattr(pass_ext.layers, op)(*arguments, **options)
    finally:
        _library.limit_cpu_isa(before)


def assert_all_same_bits(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same_bits(ours, theirs)


# ---- norm ----


def check_norm(x, weight, **options):
    """The sum has the reference's bits. Each number of out is within 3 fp32 units of exact, or its roundings to 16 bits."""
    out, total = pass_ext.layers.step_rms_norm(x, weight, **options)
    assert_same_bits(total, reference.step_rms_norm(x, weight, **options)[1])
    assert out.dtype == x.dtype and out.shape == x.shape
    eps, form = options.get("eps", 1e-6), options.get("form", "llama")
    s = total.double()
    exact = s * (s.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.double() + (form == "gemma"))
    unit = torch.finfo(x.dtype).eps
    allowed = 3 * unit if x.dtype == torch.float32 else 1.01 * unit * (1 if form == "llama" else 0.5)
    assert ((out.double() - exact).abs() <= allowed * exact.abs() + 1e-7).all()


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each("width", WIDTHS)
def test_norm_of_every_width(backend, dtype, width):
    x, residual, weight = make(backend, (5, width), (5, width), (width,), dtype=dtype, scale=2.0)
    for form in NORM_FORMS:
        check_norm(x, weight, form=form)
        check_norm(x, weight, residual=residual, form=form, eps=0.25)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each("width", [8, 100, 1032, 4095])
def test_norm_has_the_same_bits_on_every_backend(backend, dtype, width):
    x, residual, weight = make(backend, (4, width), (4, width), (width,), dtype=dtype)
    for form in NORM_FORMS:
        options = dict(form=form, eps=1e-5)
        expected = on_portable_cpu("step_rms_norm", x, weight, residual=residual, **options)
        assert_all_same_bits(pass_ext.layers.step_rms_norm(x, weight, residual=residual, **options), expected)


def modules():
    """Form -> (transformers' module of a width and eps, the value of its weight as it is made)."""
    pytest.importorskip("transformers")
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    return dict(llama=LlamaRMSNorm, olmo2=Olmo2RMSNorm, gemma=Gemma2RMSNorm)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each("form", NORM_FORMS)
def test_norm_has_the_bits_of_transformers_if_the_sum_is_exact(backend, dtype, form):
    """Squares of small whole numbers add exactly in any order."""
    for width in (7, 576, 2048):
        module = modules()[form](width, eps=1e-5).to(dtype).requires_grad_(False)
        x, residual = (torch.randint(-9, 10, (6, width)).to(dtype) for _ in range(2))
        module.weight.copy_(torch.randn(width))
        inputs = (tensor.to(backend.device) for tensor in (x, module.weight.data, residual))
        x_there, weight, residual_there = inputs
        assert_same_bits(pass_ext.layers.step_rms_norm(x_there, weight, eps=1e-5, form=form)[0], module(x))
        out, total = pass_ext.layers.step_rms_norm(x_there, weight, eps=1e-5, form=form, residual=residual_there)
        assert_same_bits(total, x + residual)
        assert_same_bits(out, module(x + residual))


def test_norm_of_rows_that_are_not_contiguous(backend):
    x, residual, weight = make(backend, (3, 4, 40), (3, 4, 40), (40,))
    expected = pass_ext.layers.step_rms_norm(x, weight, residual=residual)
    joined = torch.full((3, 9, 40), NAN, dtype=x.dtype, device=backend.device)
    heads = joined[:, 2:6].copy_(x)
    for strange in (heads, apart(x), apart(x, 8), x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT):
        assert not strange.is_contiguous()
        assert_all_same_bits(pass_ext.layers.step_rms_norm(strange, weight, residual=residual), expected)
        assert_all_same_bits(pass_ext.layers.step_rms_norm(residual, weight, residual=strange), expected)
    spread = weight.repeat_interleave(2)[::2]
    assert_all_same_bits(pass_ext.layers.step_rms_norm(x, spread, residual=residual), expected)
    four = x.view(3, 2, 2, 40)
    uneven = four.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    assert_same_bits(pass_ext.layers.step_rms_norm(uneven, weight)[0], pass_ext.layers.step_rms_norm(four, weight)[0])
    alike = x[:1, :1].expand(3, 4, 40)
    alone = pass_ext.layers.step_rms_norm(alike.contiguous(), weight)[0]
    assert_same_bits(pass_ext.layers.step_rms_norm(alike, weight)[0], alone)


@each("shape", [(0, 8), (3, 0, 8), (4, 0), (8,), (2, 1, 3, 8)])
def test_norm_of_every_leading_shape(backend, shape):
    x, residual, weight = make(backend, shape, shape, shape[-1:])
    check_norm(x, weight)
    check_norm(x, weight, residual=residual)


def test_norm_returns_x_itself_without_a_residual(backend):
    x, weight = make(backend, (3, 8), (8,))
    assert pass_ext.layers.step_rms_norm(x, weight)[1] is x


def test_eps_keeps_a_row_of_zeros_finite(backend):
    weight = torch.ones(40, device=backend.device)
    zeros = torch.zeros(2, 40, device=backend.device)
    assert_same_bits(pass_ext.layers.step_rms_norm(zeros, weight, eps=1e-6)[0], zeros)
    assert pass_ext.layers.step_rms_norm(zeros, weight, eps=0.0)[0].isnan().all()


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_number_that_is_not_finite_spoils_its_row_alone(backend, bad):
    x, weight = make(backend, (5, 1100), (1100,), dtype=torch.float32)
    clean = pass_ext.layers.step_rms_norm(x, weight)[0]
    for place in (0, 555, 1099):
        spoiled = x.clone()
        spoiled[2, place] = bad
        out = pass_ext.layers.step_rms_norm(spoiled, weight)[0]
        assert not out[2].any() or out[2].isnan().any()
        others = torch.arange(5) != 2
        assert_same_bits(out[others], clean[others])


# ---- rotary embedding ----


def factors(backend, rows, width, dtype):
    """Cosines and sines as transformers makes them."""
    positions = torch.arange(rows)[:, None] * 37 % 2048
    angles = positions * 10000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.cat([angles, angles], dim=-1)
    return [part.to(dtype).to(backend.device) for part in (angles.cos(), angles.sin())]


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each("in_fp32", [False, True])
@each("width", [2, 6, 16, 20, 64, 80, 96, 128])
def test_rotation_has_the_reference_bits(backend, dtype, in_fp32, width):
    q, k = make(backend, (7, 5, width), (7, 2, width), dtype=dtype)
    for rotated in {width, width // 4 * 2, 0}:
        angles = factors(backend, 7, rotated, torch.float32 if in_fp32 else dtype)
        assert_all_same_bits(pass_ext.layers.step_rotary(q, k, *angles), reference.step_rotary(q, k, *angles))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each("architecture", ["llama", "phi3", "olmo2"])
def test_rotation_has_the_bits_of_transformers(backend, dtype, architecture):
    """phi3 rotates a part of each head; olmo2 has cosines in fp32."""
    pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama
    from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as olmo2
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as phi3

    q, k = make(backend, (9, 6, 32), (9, 3, 32), dtype=dtype)
    rotated = 24 if architecture == "phi3" else 32
    angles = factors(backend, 9, rotated, torch.float32 if architecture == "olmo2" else dtype)
    ours = pass_ext.layers.step_rotary(q, k, *angles)
    heads_first = [x.cpu().transpose(0, 1)[None] for x in (q, k)]
    theirs = dict(llama=llama, phi3=phi3, olmo2=olmo2)[architecture](*heads_first, *(x.cpu()[None] for x in angles))
    assert_all_same_bits(ours, [x[0].transpose(0, 1).contiguous() for x in theirs])


def test_each_half_of_a_row_of_cosines_counts(backend):
    q, k, cos, sin = make(backend, (4, 3, 12), (4, 1, 12), (4, 8), (4, 8), dtype=torch.float32)
    assert_all_same_bits(pass_ext.layers.step_rotary(q, k, cos, sin), reference.step_rotary(q, k, cos, sin))


def test_rotation_of_views_of_a_joined_product(backend):
    for width in (16, 24):
        (joined,) = make(backend, (5, 10 * width))
        rows = apart(joined, 3 if width == 24 else 8)
        q, k = (part.unflatten(1, (-1, width)) for part in rows.split([6 * width, 2 * width, 2 * width], 1)[:2])
        angles = factors(backend, 5, width, torch.bfloat16)
        assert not q.is_contiguous() and not k.is_contiguous()
        expected = reference.step_rotary(q.contiguous(), k.contiguous(), *angles)
        wide = [apart(x) for x in angles]
        for given in (
            (q, k, *angles),
            (q, k, *wide),
            (q.mT.contiguous().mT, k, angles[0], angles[1].t().contiguous().t()),
        ):
            assert_all_same_bits(pass_ext.layers.step_rotary(*given), expected)
        heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
        assert_all_same_bits(pass_ext.layers.step_rotary(heads_first, k, *angles), expected)


@pytest.mark.parametrize(("rows", "heads", "key_heads"), [(0, 3, 1), (4, 0, 2), (4, 2, 0), (1, 1, 1), (0, 0, 0)])
def test_rotation_of_few_heads(backend, rows, heads, key_heads):
    q, k = make(backend, (rows, heads, 16), (rows, key_heads, 16))
    angles = factors(backend, rows, 16, torch.bfloat16)
    assert_all_same_bits(pass_ext.layers.step_rotary(q, k, *angles), reference.step_rotary(q, k, *angles))


# ---- gate ----


def exact_gate(gate, up, activation):
    return reference.step_gate(gate.double(), up.double(), activation=activation)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@each("width", [1, 7, 8, 17, 64, 576, 1537])
def test_gate_of_every_width(backend, dtype, activation, width):
    gate, up = make(backend, (9, width), (9, width), dtype=dtype, scale=2.0)
    out = pass_ext.layers.step_gate(gate, up, activation=activation)
    plain = reference.step_gate(gate, up, activation=activation)
    assert out.dtype == dtype
    assert_error_within(out, plain, exact_gate(gate, up, activation))
    assert_same_bits(pass_ext.layers.step_gate(torch.cat([gate, up], 1), activation=activation), out)
    assert_same_bits(out, on_portable_cpu("step_gate", gate, up, activation=activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_in_every_range_of_fp32(backend, activation):
    """In units in the last place of the result; of gelu_tanh below -1 of its input, like PyTorch's."""
    gate = torch.cat([torch.linspace(-30, 30, 20001), torch.logspace(-30, 1.4, 3000), -torch.logspace(-30, 1.4, 3000)])
    ones = torch.ones_like(gate).to(backend.device)
    out = pass_ext.layers.step_gate(gate.to(backend.device), ones, activation=activation).double().cpu()
    exact = exact_gate(gate, torch.ones_like(gate), activation)
    unit = 2.0**-23 * (torch.where(gate < -1, gate.double(), exact) if activation == "gelu_tanh" else exact).abs()
    assert ((out - exact).abs() <= 4 * unit + 1e-37).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_has_the_bits_of_transformers_in_bfloat16(backend, activation):
    """All numbers above -4 that do not overflow, where a product differs from PyTorch's only if fp32 is near a tie."""
    bits = torch.arange(2**16).to(torch.int32).to(torch.int16)
    gate = bits.view(torch.bfloat16)
    gate = gate[(gate > -4) & (gate < 1e30) & (gate.abs() > 1e-30)]
    up = make(backend, gate.shape)[0].cpu()
    function = functional.silu if activation == "silu" else lambda x: functional.gelu(x, approximate="tanh")
    out = pass_ext.layers.step_gate(gate.to(backend.device), up.to(backend.device), activation=activation).cpu()
    theirs = function(gate) * up
    assert (out != theirs).double().mean() < 1e-3
    assert ((out.double() - theirs.double()).abs() <= 2.0**-7 * theirs.double().abs()).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_of_numbers_that_are_not_finite_or_are_zero(backend, activation):
    gate = torch.tensor([0.0, -0.0, 1e-40, 200.0, -200.0, 3e38, -3e38, float("inf"), float("-inf"), NAN])
    ones = torch.ones_like(gate)
    out = pass_ext.layers.step_gate(gate.to(backend.device), ones.to(backend.device), activation=activation).cpu()
    theirs = reference.step_gate(gate, ones, activation=activation)
    assert torch.equal(out.isnan(), theirs.isnan())
    torch.testing.assert_close(out, theirs, rtol=1e-6, atol=1e-35, equal_nan=True)


def test_gate_of_rows_that_are_not_contiguous(backend):
    (joined,) = make(backend, (4, 3, 48))
    expected = reference.step_gate(joined)
    out = pass_ext.layers.step_gate(joined)
    torch.testing.assert_close(out, expected)
    gate, up = joined.chunk(2, dim=-1)
    for strange in (
        apart(joined),
        apart(joined, 8),
        joined.mT.contiguous().mT,
        joined.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        assert_same_bits(pass_ext.layers.step_gate(strange), out)
    assert_same_bits(pass_ext.layers.step_gate(gate, up), out)
    assert_same_bits(pass_ext.layers.step_gate(apart(gate), up.mT.contiguous().mT), out)


@each("shape", [(0, 8), (3, 0, 8), (4, 0), (8,), (2, 1, 3, 8)])
def test_gate_of_every_leading_shape(backend, shape):
    gate, up = make(backend, shape, shape)
    out = pass_ext.layers.step_gate(gate, up)
    torch.testing.assert_close(out, reference.step_gate(gate, up))
    assert_same_bits(pass_ext.layers.step_gate(torch.cat([gate, up], -1)), out)


# ---- rows and threads ----


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_has_the_same_bits_among_any_others(backend, dtype):
    x, residual, weight = make(backend, (9, 1100), (9, 1100), (1100,), dtype=dtype)
    angles = factors(backend, 9, 110, dtype)

    def results(rows):
        q = x[rows].unflatten(1, (10, 110))
        return (
            *pass_ext.layers.step_rms_norm(x[rows], weight, residual=residual[rows]),
            *pass_ext.layers.step_rotary(q[:, :7], q[:, 7:], *(part[rows] for part in angles)),
            pass_ext.layers.step_gate(x[rows]),
        )

    together = results(slice(None))
    for row in (0, 4, 8):
        assert_all_same_bits(results(slice(row, row + 1)), [part[row : row + 1].contiguous() for part in together])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_threads_change_no_bit(backend, dtype, with_threads):
    if not backend.name.startswith("cpu"):
        pytest.skip("about the CPU's threads")
    x, residual, weight = make(backend, (301, 1024), (301, 1024), (1024,), dtype=dtype)
    angles = factors(backend, 301, 64, dtype)
    q, k = x.unflatten(1, (16, 64)).split([12, 4], dim=1)
    results = with_threads(
        lambda: (
            *pass_ext.layers.step_rms_norm(x, weight, residual=residual),
            *pass_ext.layers.step_rotary(q, k, *angles),
            pass_ext.layers.step_gate(x),
        )
    )
    for other in results[1:]:
        assert_all_same_bits(other, results[0])


# ---- refusals ----

X, Q = torch.zeros(2, 8), torch.zeros(2, 3, 8)
REFUSALS = [
    ("step_rms_norm", (X.double(), X[0]), {}, r"x must be bfloat16, float16 or float32, got float64\[2, 8\]"),
    ("step_rms_norm", (X[0, 0], X[0]), {}, r"x must have shape \[\.\.\., d\], got float32\[\]"),
    ("step_rms_norm", (X, X[0].half()), {}, r"weight must be float32, got float16\[8\]"),
    ("step_rms_norm", (X, X), {}, r"weight must have shape \[d\]"),
    ("step_rms_norm", (X, X[0, :7]), {}, r"weight must have 8 \(d, the width of x\) in dimension 0, got float32\[7\]"),
    ("step_rms_norm", (X, X[0]), dict(residual=X.half()), r"residual must be float32, got float16"),
    (
        "step_rms_norm",
        (X, X[0]),
        dict(residual=X[:1]),
        r"residual must have the shape of x \(float32\[2, 8\] on cpu\), got ",
    ),
    ("step_rms_norm", (X, X[0]), dict(residual=X[0]), r"residual must have the shape of x"),
    ("step_rms_norm", (X, X[0]), dict(eps=-1.0), r"eps must be at least 0, got -1"),
    ("step_rms_norm", (X, X[0]), dict(eps=NAN), r"eps must be at least 0, got nan"),
    ("step_rotary", (Q.double(), Q, X, X), {}, r"q must be bfloat16, float16 or float32"),
    ("step_rotary", (X, Q, X, X), {}, r"q must have shape \[N, Hq, D\]"),
    ("step_rotary", (Q, Q.half(), X, X), {}, r"k must be float32, got float16"),
    ("step_rotary", (Q, X, X, X), {}, r"k must have shape \[N, Hk, D\]"),
    ("step_rotary", (Q, Q[:1], X, X), {}, r"k must have 2 \(N, the rows of q\) in dimension 0"),
    ("step_rotary", (Q, Q[..., :6], X, X), {}, r"k must have 8 \(D, the width of a head of q\) in dimension 2"),
    ("step_rotary", (Q, Q, X.half(), X), {}, r"cos must be float32, got float16"),
    ("step_rotary", (Q.half(), Q.half(), X.bfloat16(), X), {}, r"cos must be float16 or float32, got bfloat16"),
    ("step_rotary", (Q, Q, X[0], X), {}, r"cos must have shape \[N, D'\]"),
    ("step_rotary", (Q, Q, X[:1], X), {}, r"cos must have 2 \(N, the rows of q\) in dimension 0"),
    ("step_rotary", (Q, Q, X[:, :7], X), {}, r"cos must have an even number of at most 8 \(D\) in dimension 1, got "),
    ("step_rotary", (Q[..., :6], Q[..., :6], X, X), {}, r"cos must have an even number of at most 6 \(D\)"),
    ("step_rotary", (Q, Q, X, X[:, :6]), {}, r"sin must have the shape of cos"),
    ("step_rotary", (Q.half(), Q.half(), X, X.half()), {}, r"sin must be float32, got float16"),
    ("step_gate", (X.double(),), {}, r"gate must be bfloat16, float16 or float32"),
    ("step_gate", (X[0, 0],), {}, r"gate must have shape \[\.\.\., I\], or \[\.\.\., 2 I\] if there is no up, got"),
    (
        "step_gate",
        (X[:, :7],),
        {},
        r"gate must have an even number \(2 I, gate and up\) in dimension 1, got float32\[2, 7\]",
    ),
    ("step_gate", (X, X[:1]), {}, r"up must have the shape of gate"),
    ("step_gate", (X, X.half()), {}, r"up must be float32, got float16"),
]


@pytest.mark.parametrize(
    ("op", "arguments", "options", "message"), REFUSALS, ids=[r[0] + "-" + r[3][:24] for r in REFUSALS]
)
def test_bad_input_is_refused_in_words(op, arguments, options, message):
    with pytest.raises(RuntimeError, match=f"pass_ext::{op}: {message}"):
        getattr(pass_ext.layers, op)(*arguments, **options)


def test_an_unknown_form_or_activation_is_refused():
    with pytest.raises(ValueError, match="step_rms_norm: form must be one of llama, olmo2, gemma, got 'qwen'"):
        pass_ext.layers.step_rms_norm(X, X[0], form="qwen")
    with pytest.raises(ValueError, match="step_gate: activation must be one of silu, gelu_tanh, got 'relu'"):
        pass_ext.layers.step_gate(X, activation="relu")
    for number in (-1, 3):
        with pytest.raises(RuntimeError, match=rf"step_rms_norm: form must be in \[0, 3\), got {number}"):
            torch.ops.pass_ext.step_rms_norm(X, X[0], None, 1e-6, number)
        with pytest.raises(RuntimeError, match=rf"step_gate: activation must be in \[0, 2\), got {number}"):
            torch.ops.pass_ext.step_gate(X, None, number)
