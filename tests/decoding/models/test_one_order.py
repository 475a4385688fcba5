"""``OneOrder``: every operation that adds up gives a row the bits that it has alone, or is refused by its name."""

from types import SimpleNamespace

import pytest
import torch
from support.each import each
from torch import distributed, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pass_ext.decoding.models.one_order import OneOrder, check_seen
from pass_ext.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")

IN, OUT, ROWS = 80, 40, 23


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Experts(nn.Module):
    """Two of five for each row, by PyTorch's product of groups."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        chosen = (x[:, :2].abs() * 100).long() % 5
        order = chosen.flatten().argsort(stable=True)
        offs = torch.bincount(chosen.flatten(), minlength=5).cumsum(0).int()
        out = torch._grouped_mm(x[order // 2], self.weight.to(x.dtype), offs=offs)
        return torch.empty_like(out).index_copy_(0, order, out).view(-1, 2, OUT).sum(1)


W, B, MANY, STRIDED = numbers(OUT, IN), numbers(OUT, seed=1), numbers(5, IN, OUT, seed=2), numbers(IN, OUT, seed=3)


def of(function):
    return lambda x: function(x, *(y.to(x.dtype) for y in (W, B, MANY, STRIDED)))


CALLS = {
    "linear": of(lambda x, w, b, *_: F.linear(x, w, b)),
    "linear of a batch": of(lambda x, w, b, *_: F.linear(x[None], w, b)[0]),
    "product": of(lambda x, w, *_: x @ w.T),
    "weights that are not rows": of(lambda x, w, b, many, strided: torch.addmm(b, x, strided)),
    "scaled": of(lambda x, w, b, many, strided: torch.addmm(b, x, strided, beta=0.5, alpha=2.0)),
    "a matrix is added": of(lambda x, w, b, *_: torch.addmm(x[:, :OUT], x, w.T)),
    "all experts": of(lambda x, w, b, many, _: torch.bmm(x.expand(5, -1, -1), many).sum(0)),
    "and added to": of(lambda x, w, b, many, _: torch.baddbmm(b.view(1, 1, -1), x.expand(5, -1, -1), many)[3]),
    "an expert for each row": of(lambda x, w, b, many, _: torch.bmm(many[[2] * len(x)].mT, x[..., None])[..., 0]),
    "sums over names": of(lambda x, w, b, many, _: torch.einsum("ni,eio->neo", x, many).flatten(1)),
    "groups": of(lambda x, w, b, many, _: Experts(many)(x)),
    "sum": of(lambda x, *_: x.sum(-1, keepdim=True)),
    "sum of the first numbers": of(lambda x, *_: x.view(-1, 8, 10).sum(1)),
    "mean of two axes": of(lambda x, *_: x.view(-1, 2, 8, 5).mean((1, 3))),
    "mean in float32": of(lambda x, *_: x.mean(1, keepdim=True, dtype=torch.float32)),
    "length": of(lambda x, *_: x.norm(dim=-1, keepdim=True)),
    "sum of sizes": of(lambda x, *_: torch.linalg.vector_norm(x, 1, -1)),
    "softmax": of(lambda x, *_: x.softmax(-1)),
    "softmax in float32": of(lambda x, *_: x.softmax(-1, dtype=torch.float32)),
    "layer norm": of(lambda x, *_: F.layer_norm(x, (IN,))),
    "rms norm": of(lambda x, *_: F.rms_norm(x, (IN,))),
    "rows are added": of(
        lambda x, *_: torch.zeros_like(x).index_add_(0, torch.arange(len(x)).repeat(2), torch.cat([x, 2 * x]))
    ),
}
"""Name -> a function of rows ``[N, IN]`` with sums, which ``linear_rows`` adds up unless their name is in ``IN_ORDER``."""
IN_ORDER = {"layer norm": "native_layer_norm", "rows are added": "index_add_"}
SUMS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "sum", "mean", "linalg_vector_norm", "_softmax", "index_add_"}


ANGLES = numbers(18)


def rotated(x):
    """As llama4 and deepseek_v2 turn queries and keys."""
    pairs = torch.stack(x[:, :36].float().chunk(2, 1), -1)
    turns = torch.polar(torch.ones(18), ANGLES)
    return torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(1).to(x.dtype)


def into(x):
    """Wider rows than those of ``x``."""
    return torch.sigmoid(x, out=torch.empty(len(x), 2 * x.shape[1], dtype=x.dtype)[:, ::2])


FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "softplus": F.softplus,
    "mish": F.mish,
    "elu": F.elu,
    "exp2": torch.exp2,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "exp": torch.exp,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "pow": lambda x: x.abs() ** 1.5,
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "addcmul": lambda x: torch.addcmul(x, x[:, :1], x, value=0.3),
    "add": lambda x: torch.add(x, x[:, :1], alpha=0.3),
    "sigmoid_": lambda x: x.clone().sigmoid_(),
    "sigmoid of out": into,
    "mul of complex numbers": rotated,
}
"""Name -> a function of rows ``[N, 37]``, whose operation is its first word."""

COPIES = {
    "choice": lambda x: x.topk(5).values,
    "clone": lambda x: x[:, :36].unflatten(1, (2, 3, 6)).contiguous(memory_format=torch.channels_last).flatten(1),
    "comparison": lambda x: (x > x[:, :1]).to(x.dtype),
    "nothing missing": lambda x: x.masked_fill(x.isnan() | (x.sign() == 1), 0.5),
    "floor": lambda x: x.floor() + x.round(),
    "reciprocal": lambda x: (x + 20).reciprocal(),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, torch.zeros(len(x), 1).long(), x[:, :1]),
}
"""Name -> a function of rows ``[N, 37]`` that PyTorch computes as ever."""


class Operations(TorchDispatchMode):
    """What reaches PyTorch's kernels: names, and the counts of numbers that each takes."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        sizes = [x.numel() for x in args if isinstance(x, torch.Tensor) and x.dim()]
        self.counts.setdefault(func._opname, []).append(max(sizes, default=0))
        return func(*args, **(kwargs or {}))


def counts_of_rows(call, x):
    """What reaches PyTorch's kernels. Rows have the bits that they have alone, and the numbers of PyTorch to a rounding."""
    with Operations() as reached, OneOrder():
        together = call(x)
        for rows in (slice(1), slice(1, 2), slice(5, 9), slice(ROWS - 1, ROWS)):
            assert_same_bits(call(x[rows]), together[rows])
    theirs = call(x)
    assert together.dtype == theirs.dtype
    most = 1e-4 if x.dtype == torch.float32 else 3e-2
    exact = theirs if call is CALLS["groups"] else call(x.double())  # which PyTorch has in 16 bits alone
    torch.testing.assert_close(together.double(), exact.double(), rtol=most, atol=most * float(exact.abs().max()))
    return reached.counts


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@DTYPES
@each("name", CALLS)
def test_sums_of_a_row(dtype, name):
    counts = counts_of_rows(CALLS[name], numbers(ROWS, IN, seed=9).to(dtype))
    assert counts.keys() & (SUMS | {"linear_rows", *IN_ORDER.values()}) == {IN_ORDER.get(name, "linear_rows")}


@DTYPES
@each("name", FUNCTIONS)
def test_functions_of_a_row(dtype, name):
    counts = counts_of_rows(FUNCTIONS[name], numbers(ROWS, 37, seed=9).to(dtype))
    assert not [count for count in counts[name.split()[0]] if count % 64]


@DTYPES
@each("name", COPIES)
def test_copies_of_a_row(dtype, name):
    counts = counts_of_rows(COPIES[name], numbers(ROWS, 37, seed=9).to(dtype))
    assert "pad" not in counts  # which whole vectors need


def test_pytorchs_own_numbers_depend_on_the_other_rows():
    """So the tests above can fail."""
    x, w = numbers(300, 2048), numbers(2048, 2048, seed=1)
    few = (1, 2, 5, 17)
    assert any(not torch.equal((x @ w)[:n], x[:n] @ w) for n in few)
    with OneOrder():
        together = x[:40] @ w
        assert all(torch.equal(together[:n], x[:n] @ w) for n in few)
    x = numbers(ROWS, 37)
    differing = {
        name
        for name, function in FUNCTIONS.items()
        if not all(torch.equal(function(x[i : i + 1])[0], row) for i, row in enumerate(function(x)))
    }
    assert differing


def test_a_single_number():
    with OneOrder():
        assert torch.tensor(2.0).sum(-1) == torch.tensor(2.0).mean() == 2
        assert torch.tensor(2.0).softmax(0) == 1


def test_results_that_are_no_tensor():
    with OneOrder():
        assert torch.equal(torch.ones(3), torch.ones(3)) and not torch.equal(torch.ones(3), torch.ones(2))


def test_a_tensor_for_the_result_takes_its_size():
    x, empty = numbers(3, 37), torch.empty(0)
    with OneOrder():
        assert torch.sigmoid(x, out=empty) is empty
        assert_same_bits(empty, torch.sigmoid(x))


def test_threads_change_no_bit():
    x = numbers(3001, 37)
    with OneOrder():
        alone = F.silu(x)
        torch.set_num_threads(3)
        try:
            assert_same_bits(F.silu(x), alone)
        finally:
            torch.set_num_threads(1)
    for function in (F.silu, torch.sigmoid):  # PyTorch's, of a number by another place
        assert not torch.equal(torch.cat([function(row) for row in x.view(-1, 1)]), function(x.view(-1)))


def test_integers_are_left_alone():
    with OneOrder():
        assert torch.arange(6).view(2, 3).sum(1).tolist() == [3, 12]
        assert (torch.arange(6).view(2, 3) @ torch.ones(3, 1, dtype=torch.long)).flatten().tolist() == [3, 12]


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@torch.library.custom_op("pass_ext_tests::double_into", mutates_args={"to"})
def double_into(x: torch.Tensor, to: torch.Tensor) -> None:
    to.copy_(x * 2)


REFUSED = {
    "aten.cumsum": lambda x: x.cumsum(-1),
    "aten.convolution": lambda x: F.conv1d(x[:, None], torch.ones(1, 1, 3)),
    "aten._scaled_dot_product": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, -1, IN)] * 3),
    "aten.std": lambda x: x.std(-1),
    "aten.mm.default": lambda x: x.double() @ x.double().T,
    "aten.index_put_": lambda x: torch.zeros(9, IN).index_put_((torch.zeros(len(x)).long(),), x, accumulate=True),
    "c10d.allreduce_": lambda x: distributed.all_reduce(x),
    "aten.mm.default of complex numbers": lambda x: x.to(torch.complex64) @ x.T.to(torch.complex64),
    "aten._fft_r2c": lambda x: torch.fft.rfft(x),
    "aten.mm.out": lambda x: torch.mm(x, x.T, out=torch.empty(len(x), len(x))),
    "aten.sum.default": lambda x: x.double().sum(),
    "aten.sum.dim_IntList": lambda x: x.sum(-1, dtype=torch.float64),
    "aten._softmax": lambda x: x.double().softmax(-1),
    "aten.linalg_vector_norm": lambda x: x.double().norm(dim=-1),
    "aten.scatter.reduce": lambda x: x.scatter(1, torch.zeros(len(x), 2).long(), x, reduce="add"),
    "aten.scatter_.value_reduce": lambda x: x.scatter_(1, torch.zeros(len(x), 2).long(), 2.0, reduce="multiply"),
    "aten.bincount": lambda x: torch.bincount(torch.zeros(len(x)).long(), weights=x[:, 0]),
    "aten.frexp": lambda x: torch.frexp(x),
    "pass_ext_tests.double_into": lambda x: double_into(x, torch.empty_like(x)),
    "aten._grouped_mm": lambda x: torch._grouped_mm(x, x.T, offs=torch.tensor([64], dtype=torch.int32)),
}


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    store = f"file://{tmp_path_factory.mktemp('rank') / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("name", REFUSED)
def test_other_sums_are_refused_by_name(name):
    x = numbers(ROWS, 64 if "grouped" in name else IN)
    operation = name.split()[0]
    with OneOrder(), pytest.raises(ValueError, match=rf"batch_invariant must be False .*: Model calls {operation}"):
        Model(REFUSED[name])(x)


@torch.library.custom_op("pass_ext_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_operations_of_other_libraries_are_refused():
    x = numbers(2, 2)
    with OneOrder(), pytest.raises(ValueError, match=r"Model calls pass_ext_tests\.doubled"):
        Model(doubled)(x)


class Codes(torch.Tensor):
    """A weight of a library that quantises."""


@pytest.mark.parametrize(
    ("weight", "what"),
    [
        (nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False), "Parameter in torch.uint8"),
        (nn.Parameter(torch.zeros(8, 8).to(torch.float8_e4m3fn), requires_grad=False), "in torch.float8_e4m3fn"),
        (nn.Parameter(torch.zeros(8, 8).as_subclass(Codes)), "the class Codes in torch.float32"),
    ],
)
def test_weights_in_codes_are_refused(weight, what):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    check_seen(model)
    model[1][0].weight = weight
    with pytest.raises(ValueError, match=rf"1\.0 \(Linear\) has a weight of.* {what}"):
        check_seen(model)
    packed = nn.Sequential(nn.Identity())
    packed[0].register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"0 \(Identity\) has a weight of the class Tensor in torch.int32"):
        check_seen(packed)


@pytest.mark.parametrize("name", [None, "eager", "grouped_mm", "batched_mm", "deepgemm", "sonicmoe", "of_ones_own"])
def test_experts_of_other_libraries_are_refused(name):
    model = nn.Sequential(nn.Identity())
    model[0].config = SimpleNamespace(_experts_implementation=name)
    if name in (None, "eager", "grouped_mm", "batched_mm"):
        check_seen(model)
    else:
        with pytest.raises(ValueError, match=rf"0 \(Identity\) computes experts by {name}"):
            check_seen(model)
