"""lookahead_embed on every backend: against the reference, against exact gradients, and every known misuse."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.each import each
from support.samples import K_SIZES, PACKED_SIZES, packed_weight

import pass_ext
from pass_ext import reference
from pass_ext.testing import assert_error_within, assert_same_bits, cpu_backends

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PAIRS = [(dtype, slots) for dtype in FLOATS for slots in dict.fromkeys((dtype, torch.float32))]
BEST_CPU = cpu_backends()[-1].name
embed_backward = torch.ops.pass_ext.lookahead_embed_backward


def make_case(
    backend, shape, dim, *, vocabulary=53, slots=5, dtype=torch.bfloat16, slot_dtype=None, id_dtype=torch.int64
):
    generator = torch.Generator().manual_seed(hash((shape, dim, vocabulary, slots)) % 2**31)
    table = torch.randn(vocabulary, dim, generator=generator, dtype=torch.float64).to(dtype)
    lookahead = torch.randn(slots, dim, generator=generator, dtype=torch.float64).to(slot_dtype or dtype)
    ids = torch.randint(-slots, vocabulary, shape, generator=generator, dtype=id_dtype)
    return ids.to(backend.device), table.to(backend.device), lookahead.to(backend.device)


# ---- forward ----


@pytest.mark.sanitizer
@pytest.mark.parametrize(("dtype", "slot_dtype"), PAIRS, ids=str)
@each("id_dtype", [torch.int32, torch.int64])
def test_every_type_gives_the_reference_bits(backend, dtype, slot_dtype, id_dtype):
    for shape, dim in [((7,), 64), ((3, 11), 33)]:
        case = make_case(backend, shape, dim, dtype=dtype, slot_dtype=slot_dtype, id_dtype=id_dtype)
        assert_same_bits(pass_ext.lookahead_embed(*case), reference.lookahead_embed(*case))


@pytest.mark.sanitizer
@each("dim", [1, 2, 7, 8, 15, 17, 31, 64, 100, 127, 576, 577, 1032, 2048])
def test_every_width(backend, dim):
    case = make_case(backend, (9,), dim)
    assert_same_bits(pass_ext.lookahead_embed(*case), reference.lookahead_embed(*case))


@pytest.fixture
def cpu_only(backend):
    if not backend.name.startswith("cpu"):
        pytest.skip("packed weights are for the CPU")


@pytest.mark.sanitizer
@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("size", PACKED_SIZES)
@each("dtype", [torch.bfloat16, torch.float16, torch.float32])
@each("id_dtype", [torch.int32, torch.int64])
def test_rows_of_a_packed_table(backend, size, dtype, id_dtype):
    """Of 3 groups of outputs, the last of which has 5; 50 rows are several threads' work."""
    table = packed_weight("cpu", 37, 512 if size in K_SIZES else 96, size)
    dense = pass_ext.layers.unpack_weight(table, 37).to(dtype)
    lookahead = torch.randn(3, dense.shape[1]).to(dtype)
    for shape in ((50,), (2, 3), (), (0,)):
        ids = torch.randint(-3, 37, shape, dtype=id_dtype)
        got = pass_ext.lookahead_embed(ids, table, lookahead)
        assert_same_bits(got, reference.lookahead_embed(ids, table, lookahead))
        assert_same_bits(got, reference.lookahead_embed(ids, dense, lookahead))


@pytest.mark.quick_on("best")
@pytest.mark.usefixtures("cpu_only")
def test_a_packed_table_refuses_what_it_cannot_do(backend):
    table, slots = packed_weight("cpu", 37, 64, 320), torch.zeros(2, 64)
    for ids, tried, lookahead, message in (
        ([0, 48], table, slots, r"ids must be in \[-2, 48\).*got 48 at flat index 1"),
        ([-3], table, slots, r"ids must be in \[-2, 48\).*got -3 at flat index 0"),
        ([0], table, slots.double(), "lookahead must be bfloat16, float16 or float32, got float64"),
        ([0], table, slots[:, :32], r"lookahead must have 64 \(the table's width d\) in dimension 1"),
        ([0], table[..., :100], slots, "table must have 296, 320"),
        ([0], table[:, :1], slots[:, :32], "table must be contiguous"),
    ):
        with pytest.raises(RuntimeError, match="pass_ext::lookahead_embed: .*" + message):
            pass_ext.lookahead_embed(torch.tensor(ids), tried, lookahead)


@each("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 4), (4096,), (1, 1, 1, 1)])
def test_every_leading_shape(backend, shape):
    case = make_case(backend, shape, 24)
    assert_same_bits(pass_ext.lookahead_embed(*case), reference.lookahead_embed(*case))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(0, 6), max_size=3).map(tuple),
    dim=st.integers(0, 70),
    vocabulary=st.integers(1, 9),
    slots=st.integers(0, 4),
    dtype=st.sampled_from(PAIRS),
)
def test_any_shape(backend, shape, dim, vocabulary, slots, dtype):
    case = make_case(backend, shape, dim, vocabulary=vocabulary, slots=slots, dtype=dtype[0], slot_dtype=dtype[1])
    assert_same_bits(pass_ext.lookahead_embed(*case), reference.lookahead_embed(*case))


def test_an_empty_table_and_no_slots(backend):
    _ids, table, lookahead = make_case(backend, (6,), 8, vocabulary=3, slots=4)
    only_slots = -1 - torch.arange(4, device=backend.device)
    assert_same_bits(pass_ext.lookahead_embed(only_slots, table[:0], lookahead), lookahead)
    only_tokens = torch.arange(3, device=backend.device)
    assert_same_bits(pass_ext.lookahead_embed(only_tokens, table, lookahead[:0]), table)


def test_tensors_need_not_be_contiguous(backend):
    ids, table, lookahead = make_case(backend, (5, 6), 40)
    expected = reference.lookahead_embed(ids.t(), table, lookahead)
    wide = torch.full((53, 100), float("nan"), dtype=table.dtype, device=backend.device)
    for offset in (0, 8, 3):  # an aligned and an unaligned start of each row
        strided = wide[:, offset : offset + 40].copy_(table)
        transposed = lookahead.t().contiguous().t()
        assert not strided.is_contiguous() and not transposed.is_contiguous() and not ids.t().is_contiguous()
        assert_same_bits(pass_ext.lookahead_embed(ids.t(), strided, transposed), expected)


def test_rows_that_no_id_picks_are_never_read(backend):
    ids, table, lookahead = make_case(backend, (30,), 48, vocabulary=200)
    table[torch.arange(200, device=backend.device)[~torch.isin(torch.arange(200), ids.cpu()).to(backend.device)]] = (
        float("nan")
    )
    assert torch.isfinite(pass_ext.lookahead_embed(ids, table, lookahead)).all()


def test_nan_and_infinity_pass_through_untouched(backend):
    _ids, table, lookahead = make_case(backend, (4,), 32, dtype=torch.float32)
    table[3], table[4], lookahead[1] = float("nan"), float("-inf"), float("inf")
    case = (torch.tensor([3, 4, -2, 0], device=backend.device), table, lookahead)
    assert_same_bits(pass_ext.lookahead_embed(*case), reference.lookahead_embed(*case))


def test_float32_slots_round_to_nearest_even_beside_a_16_bit_table(backend):
    halfway = torch.tensor([[1.00390625, 1.01171875, -1.00390625, 3.4e38, 1e-40, 65520.0, 65519.9, 2.0**-25] * 5])
    for dtype in (torch.bfloat16, torch.float16):
        table = torch.zeros(1, halfway.shape[1], dtype=dtype, device=backend.device)
        got = pass_ext.lookahead_embed(torch.tensor([-1], device=backend.device), table, halfway.to(backend.device))
        assert_same_bits(got, halfway.to(dtype))


def test_a_table_past_two_billion_elements(backend):
    if backend.name not in ("cuda", "emulated", BEST_CPU):
        pytest.skip("the address arithmetic is the same at every instruction set, and one reservation of 4 GB will do")
    rows, dim = 2**31 // 512 + 3, 512
    torch.utils.deterministic.fill_uninitialized_memory = False  # or 4 GB would be written, not reserved
    table = torch.empty(rows, dim, dtype=torch.bfloat16, device=backend.device)
    table[-1] = 7
    got = pass_ext.lookahead_embed(torch.tensor([rows - 1], device=backend.device), table, table[:0])
    assert (got == 7).all()


# ---- ids out of range ----


@pytest.mark.parametrize("bad", [-6, 53, 2**31 - 1, -(2**31), 2**62, -(2**63)])
def test_ids_out_of_range(backend, bad):
    ids, table, lookahead = make_case(backend, (2, 3), 16)
    if abs(bad) >= 2**31:
        ids = ids.long()
    ids[1, 1] = bad
    if backend.name.startswith("cpu"):
        with pytest.raises(RuntimeError, match=rf"ids must be in \[-5, 53\).*got {bad} at flat index 4"):
            pass_ext.lookahead_embed(ids, table, lookahead)
        return
    got = pass_ext.lookahead_embed(ids, table, lookahead)
    assert (got[1, 1] == 0).all()
    ids[1, 1], got_elsewhere = 0, got.clone()
    got_elsewhere[1, 1] = table[0]
    assert_same_bits(got_elsewhere, reference.lookahead_embed(ids, table, lookahead))


def test_debug_mode_reports_ids_out_of_range_on_every_device(backend, debug_mode):
    ids, table, lookahead = make_case(backend, (2, 3), 16)
    ids[1, 2] = 53
    with pytest.raises(IndexError, match=r"ids must be in \[-5, 53\).*got 53 at flat index 5"):
        pass_ext.lookahead_embed(ids, table, lookahead)


# ---- gradient ----


def gradients(function, ids, table, lookahead, grad):
    table, lookahead = table.detach().clone().requires_grad_(), lookahead.detach().clone().requires_grad_()
    function(ids, table, lookahead).backward(grad)
    return table.grad, lookahead.grad


@pytest.mark.sanitizer
@pytest.mark.parametrize(("dtype", "slot_dtype"), PAIRS, ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((5,), 24), ((40, 9), 33), ((300,), 136)], ids=str)
def test_gradients_are_as_close_to_exact_as_pytorchs(backend, dtype, slot_dtype, shape, dim):
    ids, table, lookahead = make_case(backend, shape, dim, vocabulary=11, dtype=dtype, slot_dtype=slot_dtype)
    grad = torch.randn(*shape, dim, device=backend.device).to(dtype)
    exact = gradients(reference.lookahead_embed, ids, table.double(), lookahead.double(), grad.double())
    plain = gradients(reference.lookahead_embed, ids, table, lookahead, grad)
    ours = gradients(pass_ext.lookahead_embed, ids, table, lookahead, grad)
    for got, near, truth, source in zip(ours, plain, exact, (table, lookahead), strict=True):
        assert got.dtype == source.dtype
        assert_error_within(got, near, truth)


def test_sums_run_in_fp32(backend):
    """4,099 ones add to 256 in bfloat16 and to 2,048 in float16, but to 4,099 in fp32."""
    ids = torch.full((4099,), -1, device=backend.device)
    grad = torch.ones(4099, 8, dtype=torch.bfloat16, device=backend.device)
    assert (embed_backward(grad, ids, 1, True, torch.float32) == 4099).all()
    assert (embed_backward(grad, -1 - ids, 1, False, torch.bfloat16) == torch.tensor(4099.0).bfloat16()).all()


def test_gradient_of_rows_that_no_id_picks_is_zero(backend):
    for slots in (True, False):
        ids = torch.tensor([2, 2]) if not slots else torch.tensor([-3, -3])
        got = embed_backward(torch.ones(2, 5, device=backend.device), ids.to(backend.device), 4, slots, torch.float32)
        assert got.tolist() == [[0.0] * 5, [0.0] * 5, [2.0] * 5, [0.0] * 5]


def test_gradient_ignores_the_other_source_and_ids_out_of_range(backend):
    ids = torch.tensor([0, 5, -1, -4, 1, -2, 2**40, -(2**40)], device=backend.device)
    grad = torch.arange(1.0, 9, device=backend.device)[:, None].expand(8, 3).contiguous()
    assert embed_backward(grad, ids, 2, False, torch.float32)[:, 0].tolist() == [1.0, 5.0]
    assert embed_backward(grad, ids, 2, True, torch.float32)[:, 0].tolist() == [3.0, 6.0]


@pytest.mark.parametrize(("rows", "dim", "out_rows"), [(0, 8, 3), (4, 0, 3), (4, 8, 0), (1, 1, 1)])
@pytest.mark.parametrize("slots", [True, False])
def test_gradient_of_empty_and_tiny_shapes(backend, rows, dim, out_rows, slots):
    ids = torch.full((rows,), -1 if slots else 0, device=backend.device)
    got = embed_backward(torch.ones(rows, dim, device=backend.device), ids, out_rows, slots, torch.float32)
    expected = torch.zeros(out_rows, dim)
    expected[:1] = rows
    assert_same_bits(got, expected)


def test_gradient_accepts_strided_input(backend):
    ids, _table, _lookahead = make_case(backend, (12,), 10, dtype=torch.float32)
    grad = torch.randn(10, 12, device=backend.device).t()
    one = torch.randn(1, 10, device=backend.device).expand(12, 10)
    for strided in (grad, one):
        got = embed_backward(strided, ids, 5, True, torch.float32)
        assert_same_bits(got, embed_backward(strided.contiguous(), ids, 5, True, torch.float32))


@pytest.mark.parametrize("slots", [True, False])
def test_gradients_are_the_same_bits_in_every_run_and_with_any_thread_count(backend, slots, with_threads):
    ids = torch.randint(0, 5, (700,), device=backend.device)
    ids, grad = (-1 - ids if slots else ids), torch.randn(700, 1100, device=backend.device).bfloat16()
    results = with_threads(lambda: embed_backward(grad, ids, 5, slots, torch.float32))
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_gradcheck(backend):
    ids, table, lookahead = make_case(backend, (2, 4), 3, vocabulary=4, slots=3, dtype=torch.float64)
    inputs = (ids, table.requires_grad_(), lookahead.requires_grad_())
    assert torch.autograd.gradcheck(pass_ext.lookahead_embed, inputs)


def test_the_op_itself_gives_the_wrappers_gradient(backend):
    """Eager calls of the wrapper and calls of torch.ops.pass_ext reach the formula on different paths."""
    ids, table, lookahead = make_case(backend, (20,), 12, dtype=torch.float32)
    grad = torch.randn(20, 12, device=backend.device)
    expected = gradients(pass_ext.lookahead_embed, ids, table, lookahead, grad)[1]
    direct = gradients(torch.ops.pass_ext.lookahead_embed, ids, table, lookahead, grad)[1]
    assert_same_bits(direct, expected)


def test_gradgradcheck(backend):
    ids, table, lookahead = make_case(backend, (2, 4), 3, vocabulary=4, slots=3, dtype=torch.float64)
    inputs = (ids, table.requires_grad_(), lookahead.requires_grad_())
    assert torch.autograd.gradgradcheck(lambda *arguments: pass_ext.lookahead_embed(*arguments) ** 3, inputs)
    weight = torch.ones(2, 4, 3, dtype=torch.float64, device=backend.device, requires_grad=True)
    (first,) = torch.autograd.grad((pass_ext.lookahead_embed(*inputs) * weight).sum(), lookahead, create_graph=True)
    first.sum().backward()
    assert torch.equal(weight.grad[..., 0], (ids < 0).double())


def test_a_frozen_table_gets_no_gradient_and_costs_none(backend):
    ids, table, lookahead = make_case(backend, (6,), 8)
    out = pass_ext.lookahead_embed(ids, table, lookahead.requires_grad_())
    out.sum().backward()
    assert table.grad is None and lookahead.grad is not None
    assert not pass_ext.lookahead_embed(ids, table, lookahead.detach()).requires_grad
    with torch.no_grad():
        assert not pass_ext.lookahead_embed(ids, table, lookahead).requires_grad


# ---- torch.compile ----


def test_compiles_whole_forward_and_backward(backend):
    if backend.name not in ("cuda", BEST_CPU):
        pytest.skip("what is compiled does not depend on which CPU kernel runs after the op")
    ids, table, lookahead = make_case(backend, (2, 5), 16, dtype=torch.float32)
    function = lambda ids, table, lookahead: pass_ext.lookahead_embed(ids, table, lookahead).square()  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        grad = torch.randn(2, rows, 16, device=backend.device)
        got = gradients(compiled, ids[:, :rows], table, lookahead, grad)
        for one, other in zip(got, gradients(function, ids[:, :rows], table, lookahead, grad), strict=True):
            assert_same_bits(one, other)


# ---- refusals ----

good = {"ids": torch.tensor([0, -1]), "table": torch.zeros(4, 8), "lookahead": torch.zeros(2, 8)}
REFUSALS = [
    ({"ids": torch.tensor([0.0])}, r"ids must be int32 or int64, got float32\[1\] on cpu"),
    ({"table": torch.zeros(4, 8).int()}, r"table must be bfloat16, float16, float32 or float64, got int32\[4, 8\]"),
    ({"table": torch.zeros(4)}, r"table must have shape \[V, d\], got float32\[4\]"),
    ({"lookahead": torch.zeros(2, 8, 1)}, r"lookahead must have shape \[L, d\], got float32\[2, 8, 1\]"),
    (
        {"lookahead": torch.zeros(2, 9)},
        r"lookahead must have 8 \(the table's width d\) in dimension 1, got float32\[2, 9\]",
    ),
    ({"lookahead": torch.zeros(2, 8).half()}, r"lookahead must be float32, got float16\[2, 8\]"),
    (
        {"table": torch.zeros(4, 8).half(), "lookahead": torch.zeros(2, 8).bfloat16()},
        r"must be float16 or float32, got bfloat16",
    ),
    (
        {"table": torch.zeros(8, 4).t()},
        r"table must be contiguous in its last dimension, got float32\[4, 8\].*stride 4",
    ),
]


@pytest.mark.quick_on("best")
@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[m[:24] for _, m in REFUSALS])
def test_bad_input_is_refused_in_words(backend, change, message):
    arguments = {name: tensor.to(backend.device) for name, tensor in (good | change).items()}
    with pytest.raises(RuntimeError, match="pass_ext::lookahead_embed: .*" + message.replace("on cpu", "on ")):
        pass_ext.lookahead_embed(**arguments)


def test_the_gradient_op_refuses_bad_input_in_words(backend):
    grad, ids = torch.zeros(3, 8, device=backend.device), torch.zeros(3, dtype=torch.long, device=backend.device)
    with pytest.raises(RuntimeError, match=r"grad must have shape \[\*ids.shape, d\]"):
        embed_backward(grad[0], ids, 2, True, torch.float32)
    with pytest.raises(RuntimeError, match=r"grad must have 3 \(as ids\) in dimension 0, got float32\[2, 8\]"):
        embed_backward(grad[:2], ids, 2, True, torch.float32)
    with pytest.raises(RuntimeError, match="rows must not be negative, got -1"):
        embed_backward(grad, ids, -1, True, torch.float32)
    with pytest.raises(RuntimeError, match=r"dtype must be float32 \(grad's\) or float32, got float16"):
        embed_backward(grad, ids, 2, True, torch.float16)
