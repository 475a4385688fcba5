"""``OneOrder``: every operation that adds up gives a row the bits that it has alone, or is refused by its name."""

import pytest
import torch
from support.each import each
from torch import nn
from torch.nn import functional as F

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
    **{
        f"function {number}": of(lambda x, *_, function=function: function(x[:, :37]))
        for number, function in enumerate(
            (
                *(
                    torch.sigmoid,
                    F.silu,
                    F.gelu,
                    F.softplus,
                    F.mish,
                    F.elu,
                    torch.exp2,
                    torch.tanh,
                    torch.sin,
                    torch.exp,
                ),
                lambda x: F.gelu(x, approximate="tanh"),
                lambda x: x.abs() ** 1.5,
                lambda x: (x.abs() + 1).rsqrt(),
                lambda x: torch.addcmul(x, x[:, :1], x, value=0.3),
                lambda x: torch.add(x, x[:, :1], alpha=0.3),
                lambda x: x.clone().sigmoid_(),
            )
        )
    },
    "choice": of(lambda x, *_: x.topk(5).values),
}
"""Name -> a function of rows ``[N, IN]``."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("name", CALLS)
def test_a_row_has_the_bits_that_it_has_alone(dtype, name):
    x, call = numbers(ROWS, IN, seed=9).to(dtype), CALLS[name]
    with OneOrder():
        together = call(x)
        for rows in (slice(1), slice(1, 2), slice(5, 9), slice(ROWS - 1, ROWS)):
            assert_same_bits(call(x[rows]), together[rows])
    theirs = call(x)
    assert together.dtype == theirs.dtype
    exact = theirs if name == "groups" else call(x.double())  # which PyTorch has in 16 bits alone
    most = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(together.double(), exact.double(), rtol=most, atol=most * float(exact.abs().max()))


def test_pytorchs_own_sums_depend_on_the_other_rows():
    """So the test above can fail."""
    x = numbers(300, 2048)
    w = numbers(2048, 2048, seed=1)
    assert any(not torch.equal((x @ w)[:n], x[:n] @ w) for n in (1, 2, 5, 17))


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


REFUSED = {
    "aten.cumsum": lambda x: x.cumsum(-1),
    "aten.convolution": lambda x: F.conv1d(x[:, None], torch.ones(1, 1, 3)),
    "aten._scaled_dot_product": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, -1, IN)] * 3),
    "aten.std": lambda x: x.std(-1),
    "aten.mm.default": lambda x: x.double() @ x.double().T,
    "aten.index_put_": lambda x: torch.zeros(9, IN).index_put_((torch.zeros(len(x)).long(),), x, accumulate=True),
    "aten._grouped_mm": lambda x: torch._grouped_mm(x, x.T, offs=torch.tensor([64], dtype=torch.int32)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_sums_are_refused_by_name(name):
    x = numbers(ROWS, 64 if "grouped" in name else IN)
    with OneOrder(), pytest.raises(ValueError, match=rf"batch_invariant must be False .*: Model calls {name}"):
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
