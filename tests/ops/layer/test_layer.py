"""layer_before_attention and layer_after_attention on every backend: the bits of linear_rows and the step ops called one by
one, whose own tests have their errors against float64.
"""

import pytest
import torch
from layer_cases import after_by_ops, after_case, before_by_ops, before_case
from support.each import each
from support.pairwise import pairwise

import pass_ext
from pass_ext.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("on_backend")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


BEFORE = [
    {}, dict(whole=True), dict(plain=True), dict(fp32_cos=True), dict(width=65, head_dim=10), dict(plain=True, rotated=6),
    dict(plain=True, head_dim=80, rotated=40), dict(head_dim=520, heads=1, key_heads=1), dict(head_dim=7, rotated=6),
]  # fmt: skip
AFTER = [("mlp_norm",), (), ("attention_norm", "output_norm"), ("attention_norm", "mlp_norm", "output_norm")]
MANY = pytest.mark.quick_on("cpu")


def rows_and(options):
    """Up to eight rows, as a block of a GPU takes, in pairs; more on the CPU."""
    many = [pytest.param(rows, one, marks=MANY) for rows in (33, 130) for one in options]
    return [*pairwise([1, 5, 8], options, "cpu"), *many]


@pytest.mark.by_tiles
@each("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "options"), rows_and(BEFORE), ids=str)
def test_before_has_the_bits_of_the_single_ops(backend, dtype, rows, options):
    case = before_case(rows, dtype, **options) | dict(head_dim=options.get("head_dim", 16))
    for form in ("llama", "olmo2", "gemma"):
        got = pass_ext.layers.layer_before_attention(**case, eps=1e-3, form=form)
        for ours, theirs in zip(got, before_by_ops(**case, eps=1e-3, form=form), strict=True):
            assert ours.is_contiguous()
            assert_same_bits(ours, theirs.contiguous())
    for name in {"q_norm", "k_norm"} & set(case):
        for ours, theirs in zip(
            pass_ext.layers.layer_before_attention(**case | {name: None}),
            before_by_ops(**case | {name: None}),
            strict=True,
        ):
            assert_same_bits(ours, theirs.contiguous())
    case |= dict(cos=None, sin=None)
    for ours, theirs in zip(pass_ext.layers.layer_before_attention(**case), before_by_ops(**case), strict=True):
        assert_same_bits(ours, theirs.contiguous())


@pytest.mark.by_tiles
@each("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "norms"), rows_and(AFTER), ids=str)
def test_after_has_the_bits_of_the_single_ops(backend, dtype, rows, norms):
    for biases in (True, False):
        case = after_case(rows, dtype, norms=norms, biases=biases)
        for options in (dict(form="olmo2"), dict(activation="gelu_tanh", form="gemma", eps=0.5)):
            assert_same_bits(pass_ext.layers.layer_after_attention(**case, **options), after_by_ops(**case, **options))
        if norms in ((), ("mlp_norm",)):
            for scale in (0.25, 0.22):  # a power of two rounds nothing
                got = pass_ext.layers.layer_after_attention(**case, scale=scale)
                assert_same_bits(got, after_by_ops(**case, scale=scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_that_a_block_of_a_gpu_cannot_hold(backend, dtype):
    """Their norm has a launch of its own."""
    case = before_case(16, dtype, width=2120, heads=2, key_heads=1) | dict(head_dim=16)
    for ours, theirs in zip(pass_ext.layers.layer_before_attention(**case), before_by_ops(**case), strict=True):
        assert_same_bits(ours, theirs.contiguous())
    case = after_case(16, dtype, width=2120, attended=16, inner=24)
    assert_same_bits(pass_ext.layers.layer_after_attention(**case), after_by_ops(**case))


def test_parts_of_a_joined_weight(backend):
    """Rows with gaps between them hold NaN, which must not be read."""
    case = before_case(6, torch.float32, plain=True) | dict(head_dim=16)
    expected = pass_ext.layers.layer_before_attention(**case)
    sizes = [len(case[f"{name}_weight"]) for name in "qkv"]
    joined = torch.full((sum(sizes), 80), float("nan"))
    joined[:, :72] = torch.cat([case[f"{name}_weight"] for name in "qkv"])
    parts = dict(zip(("q_weight", "k_weight", "v_weight"), joined[:, :72].split(sizes), strict=True))
    for ours, theirs in zip(pass_ext.layers.layer_before_attention(**case | parts), expected, strict=True):
        assert_same_bits(ours, theirs)
    apart = torch.full((6, 90), float("nan"))
    apart[:, :72] = case["x"]
    for ours, theirs in zip(
        pass_ext.layers.layer_before_attention(**case | dict(x=apart[:, :72])), expected, strict=True
    ):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(head_dim=7), "q_weight must have a multiple of 7 .head_dim."),
        (dict(q_norm=torch.ones(9)), "q_norm must have 48 .the numbers that it norms."),
        (dict(sin=None), "cos and sin must be given together"),
        (dict(k_weight=torch.ones(32, 71)), "k_weight must have 72 .in"),
        (dict(v_bias=torch.ones(31)), "v_bias must have 32 .out"),
        (dict(input_norm=torch.ones(72).double()), "input_norm must be float32"),
        (dict(cos=torch.ones(6, 17), sin=torch.ones(6, 17)), "cos must have an even number of at most 16"),
        (dict(eps=-1.0), "eps must be at least 0, got -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments_before(changes, message):
    case = before_case(6, torch.float32) | dict(head_dim=16)
    with pytest.raises(RuntimeError, match=message):
        pass_ext.layers.layer_before_attention(**case | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(residual=torch.ones(5, 72)), "residual must have 6 .N, the rows of attended."),
        (dict(o_weight=torch.ones(71, 96)), "o_weight must have 72 .d, the width of residual."),
        (dict(up_weight=torch.ones(99, 72)), "up_weight must have 100 .the rows of gate_weight."),
        (dict(scale=0.5, output_norm=torch.ones(72)), "scale must be 1 beside attention_norm or output_norm"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments_after(changes, message):
    case = after_case(6, torch.float32, biases=False)
    with pytest.raises(RuntimeError, match=message):
        pass_ext.layers.layer_after_attention(**case | changes)
