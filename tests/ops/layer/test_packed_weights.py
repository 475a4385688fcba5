"""The layer ops with packed weights, on the CPU at every instruction set: the bits of linear_packed and the other ops one by
one, whose own tests have their errors against float64.
"""

import pytest
import test_layer_stack as stack
import torch
from layer_cases import after_by_ops, before_by_ops

import pass_ext
from pass_ext.testing import assert_same_bits

SIZES = dict(WIDTH=64, INNER=96, VOCABULARY=96)
PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.fixture(autouse=True)
def whole_blocks(monkeypatch):
    """Layers whose sizes are whole blocks."""
    for name, size in SIZES.items():
        monkeypatch.setattr(stack, name, size)
    for sizes, ends in ((stack.INPUTS, ("q", "k", "v", "gate", "up")), (stack.OUTPUTS, ("o", "down"))):
        changed = sizes | dict.fromkeys(ends, SIZES["WIDTH"])
        inner = {"down": SIZES["INNER"]} if sizes is stack.INPUTS else dict.fromkeys(("gate", "up"), SIZES["INNER"])
        monkeypatch.setattr(stack, "INPUTS" if sizes is stack.INPUTS else "OUTPUTS", changed | inner)


def packed(weight, bits=8):
    most = (1 << bits - 1) - 1
    blocks = weight.float().unflatten(1, (-1, 32))
    scale = (blocks.abs().amax(-1) / most).half()
    codes = (blocks / scale[..., None].float()).round().clamp(-most, most) + (most + 1)
    return pass_ext.layers.pack_weight(codes.to(torch.uint8).flatten(1), scale, -(most + 1) * scale, bits=bits)


def with_packed(layer, names, bits):
    return layer._replace(**{f"{name}_weight": packed(getattr(layer, f"{name}_weight"), bits) for name in names})


CASES = [
    (PRODUCTS, 4, dict(adapted=("q", "o", "gate", "down"))),
    (("q", "gate", "down"), 8, dict(biases=True, norms=("input_norm", "mlp_norm", "q_norm", "k_norm"))),
    (("k", "v", "o", "up"), 4, dict(norms=("attention_norm", "output_norm"), adapted=("k", "up"))),
]


@pytest.mark.parametrize("dtype", stack.FLOATS, ids=str)
@pytest.mark.parametrize(("names", "bits", "options"), CASES, ids=["all", "some", "others"])
def test_a_stack_has_the_bits_of_the_ops_one_by_one(cpu, on_backend, dtype, names, bits, options):
    case = stack.case_of(dtype, **options)
    case["layers"] = [with_packed(layer, names, bits) for layer in case["layers"]]
    case["head"] = packed(case["head"])
    expected = stack.by_ops(**case)
    stack.assert_same(pass_ext.layers.layer_stack(**case), expected)
    kept = pass_ext.layers.layer_pack(case["layers"], head_dim=stack.DIM)
    stack.assert_same(pass_ext.layers.layer_stack(**case | dict(layers=kept)), expected)


def test_the_halves_of_a_layer_have_the_bits_of_the_ops_one_by_one(cpu, on_backend):
    case = stack.case_of(torch.bfloat16, biases=True)
    x, layer = case["x"], with_packed(case["layers"][0], PRODUCTS, 4)._asdict()
    before = {name: layer[name] for name in ("q_bias", "k_bias", "v_bias", "input_norm", "q_norm", "k_norm")}
    weights = [layer[f"{name}_weight"] for name in "qkv"]
    got = pass_ext.layers.layer_before_attention(x, *weights, head_dim=stack.DIM, **before)
    for ours, theirs in zip(got, before_by_ops(x, *weights, head_dim=stack.DIM, **before), strict=True):
        assert_same_bits(ours, theirs.contiguous())
    after = {name: value for name, value in layer.items() if name not in before and name[0] not in "qkv"}
    attended = got[0].flatten(1)
    assert_same_bits(pass_ext.layers.layer_after_attention(attended, x, **after), after_by_ops(attended, x, **after))


def test_layers_that_do_not_fit_are_refused():
    case = stack.case_of(torch.bfloat16)
    layers = [with_packed(layer, PRODUCTS, 4) for layer in case["layers"]]
    other = layers[0]._replace(down_weight=packed(torch.randn(64, 128)))
    with pytest.raises(
        RuntimeError, match=r"layer 0: down_weight must have blocks of 32 for 96 \(in, the width of its input"
    ):
        pass_ext.layers.layer_pack([other], head_dim=stack.DIM)
    other = layers[0]._replace(up_weight=packed(torch.randn(80, 64)))
    with pytest.raises(RuntimeError, match=r"layer 0: up_weight must have 96 \(the rows of gate_weight\) outputs"):
        pass_ext.layers.layer_pack([other], head_dim=stack.DIM)
    bare = layers[0]._replace(input_norm=None, mlp_norm=None)
    with pytest.raises(
        RuntimeError, match="layers of packed weights must have a norm, whose dtype is that of the rows"
    ):
        pass_ext.layers.layer_pack([bare], head_dim=stack.DIM)
    kept = pass_ext.layers.layer_pack(layers, head_dim=stack.DIM)
    layers[1].o_weight.data = layers[1].o_weight.clone()
    with pytest.raises(RuntimeError, match="layer 1: o_weight must be as layer_pack found it"):
        pass_ext.layers.layer_stack(**case | dict(layers=kept))
